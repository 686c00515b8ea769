"""Check the folder of a draft for an engine: `python -m train.check draft.path=FOLDER target.path=TARGET`."""

from decode.common.command_line import stage_main


def main() -> None:
    """Entry point of `python -m train.check` and of the console script `draftsmith-check`."""
    stage_main("check", "train.check.config:CheckConfig", "train.check.stage:run", figures=None)


if __name__ == "__main__":
    main()
