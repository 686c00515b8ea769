"""Record what a target predicts: `python -m distill key=value ...`."""

from decode.common.command_line import stage_main
from decode.common.sweep_table import Figures

_COUNTED = {name: f"counts.{name}" for name in ("tokens", "records", "bytes")}
_TIMED = {name: f"spent.{name}" for name in ("starting", "writing", "reading")}
FIGURES = Figures({**_COUNTED, **_TIMED})
"""What the jobs of a multirun are compared by."""


def main() -> None:
    """Entry point of `python -m distill` and of the console script `draftsmith-distill`."""
    stage_main("distill", "distill.config:DistillConfig", "distill.stage:run", FIGURES)


if __name__ == "__main__":
    main()
