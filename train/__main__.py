"""Fit a target or a draft: `python -m train key=value ...`."""

from decode.common.command_line import stage_main
from decode.common.sweep_table import Figures

FIGURES = Figures({"alpha": "alpha", "tau": "tau", "loss": "loss"}, highest="tau", lowest="loss")
"""What the jobs of a multirun are compared by."""


def main() -> None:
    """Entry point of `python -m train` and of the console script `draftsmith-train`."""
    stage_main("train", "train.config:TrainConfig", "train.stage:run", FIGURES)


if __name__ == "__main__":
    main()
