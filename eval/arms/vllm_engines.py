"""vLLM's engines of a comparison: one for each setting, started together, and what each is told first. Each is an arm,
a worker in an environment of its own (`distill.engines.worker_process`). Times are the worker's own, from the call to
the last token: the pipe to it is not counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from decode.common.progress import get_logger
from decode.common.run_folder import RunFolder
from decode.sampling.warp import Sampling
from distill.engines.worker_process import WORKER, Engine, WorkerTexts, first_line
from eval.arms.base import Arm, Sample, emitted

log = get_logger("eval")
_LOOKUP_MATCH = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
"""Tokens at the end of the text that vLLM's ngram looks for; 2 is our least as well."""


@dataclass(frozen=True)
class VllmArm:
    """vLLM, with or without its draft, whichever its engine has. Its noise is its own: seeds per request slow it."""

    name: str
    engine: Engine
    sampling: Sampling
    eos: Sequence[int]

    def run(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], max_new_tokens: int, seed: int) -> Sample:
        """One call of the worker."""
        answer = self.engine.call(
            {
                "prompts": [list(prompt) for prompt in prompts],
                "max_new_tokens": max_new_tokens,
                "sampling": asdict(self.sampling),
                "eos": list(self.eos),
                "timed": True,
            }
        )
        return as_sample(answer, self.eos, max_new_tokens)


def as_sample(answer: Mapping[str, Any], eos: Sequence[int], max_new_tokens: int) -> Sample:
    """The worker's answer; the first arrival is the step after which every row has a token."""
    found = WorkerTexts.model_validate(answer)
    new = [emitted(ids, eos, max_new_tokens) for ids in found.new_ids]
    so_far = [0] * len(new)
    first_s, first_tokens = found.seconds, sum(map(len, new))
    for at, counts in found.arrivals:
        so_far = [before + count for before, count in zip(so_far, counts, strict=True)]
        if all(so_far):
            first_s, first_tokens = at, sum(min(count, len(ids)) for count, ids in zip(so_far, new, strict=True))
            break
    return Sample(new, found.seconds, first_s, first_tokens, [at for at, _ in found.arrivals], [])


LEFT_TO_ENGINES = 0.8
"""Of a GPU's memory that our models have left free; the rest is for our keys and values."""


@dataclass(frozen=True)
class Engines:
    """Arm name -> engine."""

    started: dict[str, Engine] = field(default_factory=dict)

    @property
    def version(self) -> str | None:
        """vLLM's version, where it runs."""
        return next((engine.version for engine in self.started.values()), None)

    def arms(self, sampling: Sampling, eos: Sequence[int]) -> dict[str, Arm]:
        """Name -> arm."""
        return {name: VllmArm(name, engine, sampling, eos) for name, engine in self.started.items()}


@contextmanager
def started(python: str | None, settings: Mapping[str, dict[str, Any]], folder: RunFolder) -> Iterator[Engines]:
    """An engine for each first line, by arm name; RunError where one does not start. Their words go to logs in the
    run's folder."""
    with ExitStack() as stack:
        engines = {}
        memory = _share_of_a_card(len(settings))
        for name, first_line in settings.items():
            log.info("starting %s, which compiles its model at first", name)
            words = folder.file(f"{name.replace(', ', '-').replace(' ', '-')}.log")
            engines[name] = stack.enter_context(Engine(str(python), WORKER, first_line | {"options": memory}, words))
        yield Engines(engines)


def _share_of_a_card(engines: int) -> dict[str, float]:
    """What vLLM is told to take of a GPU's memory: alone it takes 92 %, and here several start beside each other and
    beside our own models."""
    if not torch.cuda.is_available():
        return {}
    free, whole = torch.cuda.mem_get_info()
    return {"gpu_memory_utilization": round(LEFT_TO_ENGINES * free / whole / max(1, engines), 3)}


def worker_settings(
    target: str, dtype: str, max_length: int, max_rows: int, seed: int, speculation: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The worker's first line; `max_length` is of the longest prompt and its continuation in tokens."""
    drafted = 0 if speculation is None else speculation["num_speculative_tokens"]
    return first_line(target, dtype, max_length + drafted, max_rows, seed, speculation)


def drafting_with_lookup(num_draft_tokens: int) -> dict[str, Any]:
    """vLLM's speculative_config for its prompt lookup."""
    return {"method": "ngram", "num_speculative_tokens": num_draft_tokens, **_LOOKUP_MATCH}
