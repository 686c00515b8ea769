"""Stream one speculative completion to the terminal: `python -m decode key=value ...`."""

from decode.common.command_line import stage_main
from decode.common.sweep_table import Figures

FIGURES = Figures({"tau": "tau", "tokens": "tokens", "passes": "passes"}, highest="tau")
"""What the jobs of a multirun are compared by."""


def main() -> None:
    """Entry point of `python -m decode` and of the console script `draftsmith-decode`."""
    stage_main("decode", "decode.config:DecodeConfig", "decode.stage:run", FIGURES)


if __name__ == "__main__":
    main()
