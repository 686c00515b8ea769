"""Measure a draft and write the report: `python -m eval key=value ...`."""

from decode.common.command_line import stage_main
from decode.common.sweep_table import Figures

FIGURES = Figures({"speedup": "speedup", "alpha": "alpha", "tau": "tau"}, highest="speedup")
"""What the jobs of a multirun are compared by."""


def main() -> None:
    """Entry point of `python -m eval` and of the console script `draftsmith-eval`."""
    stage_main("eval", "eval.config:EvalConfig", "eval.stage:run", FIGURES)


if __name__ == "__main__":
    main()
