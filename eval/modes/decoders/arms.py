"""Every arm of the comparison, made from one target, one draft and the vLLM engines that run beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from decode.common.progress import get_logger
from decode.common.run_folder import RunFolder
from decode.config import SamplingConfig
from decode.drafters.saved_draft import model_folder
from eval.arms.base import STATIC, Arm, eos_ids
from eval.arms.ours import assisted_arms, our_arm, plain_arms
from eval.arms.transformers_arms import TransformersArm, static_options
from eval.arms.vllm_peer import WORKER, Engine, VllmArm
from eval.comparison_config import arm_settings
from eval.config import EvalConfig
from eval.measure.quality import sampling_at

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


LOOKUP = "transformers prompt lookup"


def our_name(setting: str) -> str:
    """Name of a speculative arm of ours."""
    return f"ours, {setting}"


@dataclass(frozen=True)
class Stock:
    """What arms are made of."""

    cfg: EvalConfig
    model: PreTrainedModel
    drafter: Any
    family: str
    """The drafter's family, as rows name it."""
    engines: Engines
    max_length: int
    """Longest prompt and continuation in tokens."""

    def settings(self, temperature: float) -> dict[str, SamplingConfig]:
        """Our settings by name."""
        return arm_settings(self.cfg.decoders, self.cfg.decode, temperature)

    def ours(self, temperature: float, names: Sequence[str] | None = None) -> dict[str, Arm]:
        """Our speculative arms by the name of their setting."""
        known = self.settings(temperature)
        return {
            name: our_arm(our_name(name), self.model, self.drafter, known[name])
            for name in (known if names is None else names)
        }

    def plain(self, temperature: float) -> list[Arm]:
        """Both ways without a draft that a baseline is chosen from."""
        return plain_arms(self.cfg, self.model, temperature)

    def static(self, temperature: float) -> Arm:
        """transformers' compiled static cache."""
        options = static_options(self.model, self.max_length)
        return TransformersArm(STATIC, self.model, sampling_at(self.cfg, temperature), options)

    def assisted(self, temperature: float) -> dict[str, Arm]:
        """transformers assisted generation by setting; none for a draft that is no language model."""
        return assisted_arms(self.cfg, self.model, self.drafter, temperature)

    def lookup(self, temperature: float) -> dict[str, Arm]:
        """transformers prompt lookup by number of tokens."""
        sampling = sampling_at(self.cfg, temperature)
        return {
            f"n={tokens}": TransformersArm(
                f"{LOOKUP}, n={tokens}", self.model, sampling, {"prompt_lookup_num_tokens": tokens}
            )
            for tokens in self.cfg.peers.prompt_lookup_num_tokens
        }

    def vllm(self, temperature: float) -> list[Arm]:
        """vLLM without and with its draft; none unless asked for."""
        sampling, eos = sampling_at(self.cfg, temperature), eos_ids(self.model)
        return [VllmArm(name, engine, sampling, eos) for name, engine in self.engines.started.items()]


def is_vllm(arm: str) -> bool:
    """Whether an arm of that name is vLLM's."""
    return arm.startswith(VLLM)
