"""Measure a draft and write the report: `python -m eval key=value ...`."""

from decode.common.command_line import stage_main


def main() -> None:
    """Entry point of `python -m eval` and of the console script `draftsmith-eval`."""
    stage_main("eval", "eval.config:EvalConfig", "eval.stage:run")


if __name__ == "__main__":
    main()
