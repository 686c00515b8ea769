"""Record what a target predicts: `python -m distill key=value ...`."""

from decode.common.command_line import stage_main
from decode.common.sweep_table import Figures

FIGURES = Figures({"tokens": "counts.tokens", "records": "counts.records", "bytes": "counts.bytes"})
"""What the jobs of a multirun are compared by."""


def main() -> None:
    """Entry point of `python -m distill` and of the console script `draftsmith-distill`."""
    stage_main("distill", "distill.config:DistillConfig", "distill.stage:run", FIGURES)


if __name__ == "__main__":
    main()
