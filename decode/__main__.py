"""Stream one speculative completion to the terminal: `python -m decode key=value ...`."""

from decode.common.command_line import stage_main


def main() -> None:
    """Entry point of `python -m decode` and of the console script `draftsmith-decode`."""
    stage_main("decode", "decode.config:DecodeConfig", "decode.stage:run")


if __name__ == "__main__":
    main()
