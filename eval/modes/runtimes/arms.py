"""An arm of the comparison: a run of `python -m distill` in a process of its own, and what it says of itself."""

from __future__ import annotations

import contextlib
import hashlib
import io
import shutil
import subprocess
import sys
import time
from collections import deque
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from decode.common.checked_json import read_json
from decode.common.compose import compose
from decode.common.environment import resolve_device
from decode.common.errors import ConfigError, InputError, RunError
from decode.common.plain_text import written
from decode.common.run_lock import check_unlocked
from decode.common.typed_config import build
from decode.config import ModelConfig
from distill import stage
from distill.config import DistillConfig
from distill.records.record_folder import RecordFolder
from eval.config import EvalConfig
from eval.measure.energy import energy_meter
from eval.results.energy import energy_entry

NO_VLLM = "needs vLLM, which was not asked for (peers=vllm)"
_LAST_LINES = 15


def check_arms(cfg: EvalConfig, probe: Path) -> dict[str, str]:
    """Arm -> why it is left out. Raises ConfigError and InputError, naming the arm, for whatever `python -m distill`
    refuses before it loads anything; nothing is written to `probe`."""
    left_out = {}
    for arm in cfg.runtimes.arms:
        for kind in cfg.runtimes.kinds:
            try:
                config = _distill_config(overrides(cfg, arm, kind, probe))
                if config.target.runtime == "vllm" and cfg.peers.vllm_python is None:
                    left_out[arm] = NO_VLLM
                    break
                with contextlib.redirect_stdout(io.StringIO()):
                    stage.run(replace(config, plan=True))
            except (ConfigError, InputError) as error:
                raise type(error)(f"runtimes.arms.{arm}, runtimes.kinds.{kind}: {error}") from error
    first = next(iter(cfg.runtimes.arms))
    if first in left_out:
        raise ConfigError(
            f"runtimes.arms.{first}, which others are held against, {left_out[first]}; name another first"
        )
    return left_out


def _distill_config(asked: list[str]) -> DistillConfig:
    container = compose("distill", DistillConfig, asked)
    assert container is not None, "options of Hydra's own are no overrides"
    return build(DistillConfig, container)


def overrides(cfg: EvalConfig, arm: str, kind: str, folder: Path) -> list[str]:
    """The command line behind `python -m distill`."""
    own, usual = cfg.target, ModelConfig()
    target = {one.name: getattr(own, one.name) for one in fields(ModelConfig)}
    given = [f"target.{name}={written(value)}" for name, value in target.items() if value != getattr(usual, name)]
    if cfg.peers.vllm_python is not None:
        given.append(f"target.vllm_python={written(cfg.peers.vllm_python)}")
    asked = cfg.runtimes
    return [*asked.common, *asked.kinds[kind], *asked.arms[arm], *given, f"output_dir={written(str(folder))}"]


def make(cfg: EvalConfig, arm: str, kind: str, folder: Path, log: Path) -> dict[str, Any]:
    """Make the records anew in `folder`, measure, and remove them. RunError with the last words of a run that
    failed."""
    if folder.exists():  # of a killed run, whose own process may still be there
        check_unlocked(folder)
        shutil.rmtree(folder)
    command, began = [sys.executable, "-m", "distill", *overrides(cfg, arm, kind, folder)], time.perf_counter()
    meter = energy_meter(cfg.timing.watts, [resolve_device(cfg.target.device)])
    with log.open("w", encoding="utf-8") as said:
        run = partial(subprocess.run, command, stdout=said, stderr=subprocess.STDOUT, check=False)
        done, joules = meter.around(run)
    wall = time.perf_counter() - began
    if done.returncode:
        with log.open(encoding="utf-8", errors="replace") as lines:
            words = "".join(deque(lines, _LAST_LINES))
        raise RunError(
            f"runtimes.arms.{arm} ended with code {done.returncode} making {kind}; {log} ends with:\n{words}"
        )
    found = {"wall_s": wall, **measured(folder)}
    spent = None if joules is None else [[joules, float(found["tokens"])]]
    found["energy"] = energy_entry(f"records of {kind}", arm, spent, meter, cfg.seed)
    shutil.rmtree(folder)
    return found


def measured(folder: Path) -> dict[str, Any]:
    """Seconds of each part, tokens that the target wrote, and a hash of each text."""
    spent, records = read_json(folder / "manifest.json")["spent"], RecordFolder.open(folder)
    every = [records.read(index, stores=(), layers=()) for index in range(len(records))]
    return {
        **{f"{name}_s": seconds for name, seconds in spent.items()},
        "tokens": sum(len(one.ids) - one.meta["prompt_end"] for one in every),
        "texts": [hashlib.sha256(one.ids.tobytes()).hexdigest()[:16] for one in every],
    }
