"""Write a trained draft for an engine: `python -m train.export draft.path=RUN format=vllm output_dir=FOLDER`."""

from decode.common.command_line import stage_main


def main() -> None:
    """Entry point of `python -m train.export` and of the console script `draftsmith-export`."""
    stage_main("export", "train.export.config:ExportConfig", "train.export.stage:run", figures=None)


if __name__ == "__main__":
    main()
