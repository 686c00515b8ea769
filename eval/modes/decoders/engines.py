"""The engines of the vLLM peer, all loaded before the first cell and kept until the last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decode.common.progress import get_logger
from decode.common.run_folder import RunFolder
from decode.drafters.saved_draft import model_folder
from eval.arms.vllm_peer import WORKER, Engine
from eval.config import EvalConfig

VLLM = "vllm"
log = get_logger("eval")


@dataclass(frozen=True)
class Engines:
    """Arm name -> engine."""

    started: dict[str, Engine] = field(default_factory=dict)

    @property
    def version(self) -> str | None:
        """vLLM's version, where it runs."""
        return next((engine.version for engine in self.started.values()), None)


def engine_names(cfg: EvalConfig) -> dict[str, int | None]:
    """Arm name -> draft tokens per pass; None decodes without a draft. Nothing without an interpreter to run vLLM."""
    if cfg.peers.vllm_python is None:
        return {}
    return {VLLM: None} | {f"{VLLM}, k={k}": k for k in cfg.peers.vllm_draft_tokens}


@contextmanager
def started(cfg: EvalConfig, folder: RunFolder, max_length: int, dtype: str) -> Iterator[Engines]:
    """All engines of the configuration; RunError where one does not start."""
    with ExitStack() as stack:
        engines = {}
        for name, num_draft_tokens in engine_names(cfg).items():
            log.info("starting %s, which compiles its model at first", name)
            settings = engine_settings(cfg, num_draft_tokens, max_length, dtype)
            words = folder.file(f"{name.replace(', ', '-')}.log")
            engines[name] = stack.enter_context(Engine(str(cfg.peers.vllm_python), WORKER, settings, words))
        yield Engines(engines)


def engine_settings(cfg: EvalConfig, num_draft_tokens: int | None, max_length: int, dtype: str) -> dict[str, Any]:
    """The worker's first line."""
    draft = next(iter(cfg.drafts.values()))
    return {
        "target": _local(str(cfg.target.path)),
        "draft": None if num_draft_tokens is None else str(Path(model_folder(draft)).resolve()),
        "num_draft_tokens": num_draft_tokens,
        "dtype": dtype,
        "max_model_len": max_length + (num_draft_tokens or 0),
        "max_num_seqs": max(cfg.decoders.batch_sizes),
        "seed": cfg.seed,
    }


def _local(path: str) -> str:
    """A folder's absolute path, since a relative one may be taken for a hub id; a hub id as it is."""
    return str(Path(path).resolve()) if Path(path).exists() else path
