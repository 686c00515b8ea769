"""Where metrics go besides metrics.jsonl: nowhere, or Weights & Biases, behind one face."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from shlex import quote
from typing import Any

from decode.common.errors import RunError
from decode.common.extras import extra, require_installed
from decode.common.progress import get_logger
from train.config import TrainConfig
from train.metrics_log import METRICS, read_metrics

log = get_logger("tracker")


class Tracker:
    """Receives every line of metrics.jsonl, and the report at the end; this one does nothing with them."""

    def log(self, record: dict[str, Any]) -> None:
        """One line: `kind`, `step` and numbers."""

    def finish(self, report: list[Path], summary: dict[str, Any]) -> None:
        """Keep the report's files and the final numbers, and wait until all is written."""


class WandbTracker(Tracker):
    """A W&B run, offline unless told otherwise, with everything it writes inside the run folder."""

    def __init__(self, cfg: TrainConfig, folder: Path, fingerprint: str) -> None:
        """`fingerprint` names the run, so that a resumed training continues the same W&B run.

        Offline each part has a folder of its own. `wandb sync` lets the last one replace the others, and comes to none
        that lies behind one which was killed while it wrote: so each begins with what metrics.jsonl holds until then.
        """
        self._places = _places(folder.absolute())
        os.environ.update(self._places)
        import wandb
        from wandb.errors import CommError, UsageError

        self.wandb = wandb
        try:
            self.run = wandb.init(
                project=cfg.tracker.project,
                name=cfg.tracker.run_name or folder.name,
                id=fingerprint,
                dir=str(folder.absolute()),
                mode=cfg.tracker.mode,
                resume="allow" if cfg.tracker.mode == "online" else None,
                config=dataclasses.asdict(cfg),
                settings=wandb.Settings(silent=True),
            )
        except (UsageError, CommError) as error:
            self._forget_places()
            raise RunError(
                f"tracker=wandb tracker.mode={cfg.tracker.mode} could not start: {error}. Use tracker.mode=offline and "
                "`wandb sync` the run folder later, or tracker=jsonl"
            ) from error
        if self.run.offline and (folder / METRICS).is_file():
            for line in read_metrics(folder / METRICS):
                self.log(line)

    def log(self, record: dict[str, Any]) -> None:
        """Numbers become curves named kind/name over the optimizer step."""
        numbers = {key: value for key, value in record.items() if isinstance(value, int | float) and key != "step"}
        self.run.log({f"{record['kind']}/{key}": value for key, value in numbers.items()}, step=record["step"])

    def finish(self, report: list[Path], summary: dict[str, Any]) -> None:
        """The report becomes an artifact of type `report`.

        W&B's own process hears of a run's end without an answer, and on a busy machine closes the run's file seconds
        later; teardown waits for that process to end.
        """
        artifact = self.wandb.Artifact(f"report-{self.run.id}", type="report", metadata=summary)
        for file in report:
            artifact.add_file(str(file))
        self.run.log_artifact(artifact)
        self.run.summary.update(summary)
        place = Path(self.run.dir).parent  # of <folder>/wandb/offline-run-TIME-ID/files
        self.run.finish()
        self.wandb.teardown()
        self._forget_places()
        if self.run.offline:
            log.info("to upload it to Weights & Biases: wandb sync %s", quote(str(place)))

    def _forget_places(self) -> None:
        """Else the next run of this process would write into this one's folder."""
        for name in self._places:
            os.environ.pop(name, None)


def _places(folder: Path) -> dict[str, str]:
    """Where W&B writes, as environment variables, for what a user has not set otherwise."""
    places = {
        "WANDB_DIR": folder,
        "WANDB_DATA_DIR": folder / "wandb",
        "WANDB_CACHE_DIR": folder / "wandb" / "cache",
    }
    return {name: str(place) for name, place in places.items() if name not in os.environ}


def build_tracker(cfg: TrainConfig, folder: Path, fingerprint: str, is_main: bool) -> Tracker:
    """The tracker that `cfg.tracker` names; only rank 0 has one."""
    if cfg.tracker.name == "jsonl" or not is_main:
        return Tracker()
    return WandbTracker(cfg, folder, fingerprint)


def check_tracker(cfg: TrainConfig) -> None:
    """Raise ConfigError where the tracker cannot work here, before anything is loaded."""
    if cfg.tracker.name == "wandb":
        require_installed("wandb", "tracker=wandb", f"Install it, {extra('train')}, or use tracker=jsonl")
