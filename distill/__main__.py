"""Record what a target predicts: `python -m distill key=value ...`."""

from distill.cli import main

if __name__ == "__main__":
    main()
