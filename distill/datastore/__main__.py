"""Index a corpus to draft from: `python -m distill.datastore target.path=TARGET data=... output_dir=FOLDER`."""

from decode.common.command_line import stage_main


def main() -> None:
    """Entry point of `python -m distill.datastore` and of the console script `draftsmith-datastore`."""
    stage_main("datastore", "distill.datastore.config:DatastoreConfig", "distill.datastore.stage:run", figures=None)


if __name__ == "__main__":
    main()
