"""Record what a target predicts: `python -m distill key=value ...`."""

from decode.common.command_line import stage_main


def main() -> None:
    """Entry point of `python -m distill` and of the console script `draftsmith-distill`."""
    stage_main("distill", "distill.config:DistillConfig", "distill.stage:run")


if __name__ == "__main__":
    main()
