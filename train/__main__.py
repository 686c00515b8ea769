"""Fit a target or a draft: `python -m train key=value ...`."""

from decode.common.command_line import stage_main


def main() -> None:
    """Entry point of `python -m train` and of the console script `draftsmith-train`."""
    stage_main("train", "train.config:TrainConfig", "train.stage:run")


if __name__ == "__main__":
    main()
