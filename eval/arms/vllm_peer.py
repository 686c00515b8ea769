"""vLLM's CPU engine as an arm: a worker in an environment of its own (`distill.runtimes.engine_process`). Times are the
worker's own, from the call to the last token: the pipe to it is not counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from decode.sampling.warp import Sampling
from distill.runtimes.engine_process import Engine
from eval.arms.base import Sample, emitted


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
                "sampling": {
                    "temperature": self.sampling.temperature,
                    "top_k": self.sampling.top_k,
                    "top_p": self.sampling.top_p,
                    "min_p": self.sampling.min_p,
                },
                "eos": list(self.eos),
            }
        )
        return as_sample(answer, self.eos, max_new_tokens)


def as_sample(answer: dict[str, Any], eos: Sequence[int], max_new_tokens: int) -> Sample:
    """The worker's answer; the first arrival is the step after which every row has a token."""
    new = [emitted(ids, eos, max_new_tokens) for ids in answer["new_ids"]]
    so_far = [0] * len(new)
    first_s, first_tokens = answer["seconds"], sum(map(len, new))
    for at, counts in answer["arrivals"]:
        so_far = [before + count for before, count in zip(so_far, counts, strict=True)]
        if all(so_far):
            first_s, first_tokens = at, sum(min(count, len(ids)) for count, ids in zip(so_far, new, strict=True))
            break
    return Sample(new, answer["seconds"], first_s, first_tokens, [at for at, _ in answer["arrivals"]], [])
