"""Fit a target or a draft: `python -m train key=value ...`."""

from train.cli import main

if __name__ == "__main__":
    main()
