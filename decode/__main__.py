"""Stream one speculative completion to the terminal: `python -m decode key=value ...`."""

from decode.cli import main

if __name__ == "__main__":
    main()
