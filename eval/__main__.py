"""Measure a draft and write the report: `python -m eval key=value ...`."""

from eval.cli import main

if __name__ == "__main__":
    main()
