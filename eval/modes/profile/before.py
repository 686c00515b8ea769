"""The decoder of another checkout as a contestant: a worker with that folder's packages, asked call by call, so that
two versions take turns on one machine. Between calls it is stopped, as `distill.runtimes.engine_process` says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from decode.common.errors import ConfigError
from decode.common.run_folder import RunFolder
from decode.config import ModelConfig, SamplingConfig, model_folder
from decode.drafters.base import Drafter
from distill.runtimes.engine_process import Engine
from eval.config import EvalConfig
from eval.modes.profile.calls import COST_REPEATS, Call, Classes, Group, floor_of, passes, settings

WORKER = Path(__file__).with_name("checkout_worker.py")


@dataclass(frozen=True)
class Before:
    """The same pair, prompts and settings in that checkout."""

    name: str
    cfg: EvalConfig
    engine: Engine
    drafter: Drafter | None
    """This checkout's own, which says how far a round drafts."""

    def call(self, group: Group) -> Call:
        """Times are the worker's own: the pipe is not counted."""
        return Call(**self._ask("call", **self._wanted(group)))

    def operators(self, group: Group) -> tuple[dict[str, Classes], int]:
        """By the phases of that checkout."""
        answer = self._ask("operators", **self._wanted(group))
        return answer["seconds"], answer["rounds"]

    def floor(self, group: Group) -> dict[str, float]:
        """That checkout's own passes."""
        wanted = passes(self.cfg, self.drafter, group)
        asked = {"context": wanted.context, "nodes": wanted.nodes, "batch_size": len(group), "repeats": COST_REPEATS}
        answer = self._ask("passes", **asked)
        return floor_of(wanted, answer["t_draft"], answer["t_target"])

    def _wanted(self, group: Group) -> dict[str, Any]:
        return {"prompts": [list(prompt) for prompt in group], "settings": plain_settings(self.cfg)}

    def _ask(self, wanted: str, **details: Any) -> dict[str, Any]:
        return self.engine.call({"wanted": wanted, "is_drafted": self.drafter is not None, **details})


def plain_settings(cfg: EvalConfig) -> dict[str, Any]:
    """Those that differ from the default, since an earlier version may not know the rest."""
    usual, asked = vars(SamplingConfig()), settings(cfg)
    always = ("temperature", "verifier", "num_draft_tokens", "max_new_tokens")
    changed = {name: value for name, value in asked.items() if name in always or value != usual[name]}
    return {**changed, "seed": cfg.seed}


def check_checkout(folder: str) -> Path:
    """Its absolute path; ConfigError where no draftsmith lies there."""
    path = Path(folder).resolve()
    if not (path / "decode" / "autotune" / "timing.py").is_file():
        raise ConfigError(
            f"profile.before={folder} holds no decode/autotune/timing.py, so it is no checkout of draftsmith whose "
            "rounds could be timed. Make one of an earlier commit: git worktree add FOLDER COMMIT"
        )
    return path


def revision(folder: Path) -> str | None:
    """Of that checkout; None without git."""
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


@contextmanager
def started(cfg: EvalConfig, checkout: Path, folder: RunFolder) -> Iterator[Engine]:
    """The worker with that checkout's packages; ConfigError where it came by others."""
    usual = asdict(ModelConfig())
    target = {name: value for name, value in asdict(cfg.target).items() if value != usual[name]}
    content = {"target": target, "draft": model_folder(next(iter(cfg.drafts.values())))}
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
    environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    log = folder.file("before.log")
    with Engine(sys.executable, WORKER, content, log, environment, "the other checkout's worker") as engine:
        if Path(engine.version).resolve() != checkout:
            raise ConfigError(
                f"profile.before={checkout} was not what was measured: its worker imported {engine.version}. Something "
                "before PYTHONPATH names another draftsmith; run from an environment with an editable install, or none"
            )
        yield engine
