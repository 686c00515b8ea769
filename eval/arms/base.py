"""What every arm of a timed run is: a way of continuing a batch of prompts, all giving the same kind of sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from decode.stats import Round
from eval.comparison_config import PLAIN

AUTOREGRESSIVE = "own autoregressive loop"
TRANSFORMERS = "transformers generate"
PLAIN_ARMS = (AUTOREGRESSIVE, TRANSFORMERS)
"""The two without a draft; the faster is the baseline."""
STATIC = "transformers static, compiled"
ASSISTED = "transformers assisted"
LOOKUP = "transformers prompt lookup"
EARLY_EXIT = "transformers early exit"
UNQUANTISED = "plain, unquantised target"
"""Our loop without a draft on the target as it was before target.quantization."""
VLLM = "vllm"
VLLM_LOOKUP = "vllm ngram"
"""vLLM's prompt lookup."""
OURS = "ours"


def our_name(setting: str) -> str:
    """Name of the arm of one of our settings."""
    return AUTOREGRESSIVE if setting == PLAIN else f"ours, {setting}"


def is_vllm(arm: str) -> bool:
    """Whether an arm of that name is vLLM's."""
    return arm.startswith(VLLM)


@dataclass(frozen=True)
class Sample:
    """One call: what it emitted and when. Times are seconds from the call, on the host, the device synchronised at
    the end."""

    new_ids: list[list[int]]
    """Emitted ids per prompt, nothing after the end token, nothing beyond the limit."""
    seconds: float
    """Whole call."""
    first_s: float
    """Until the first tokens arrived; the prompt is read by then."""
    first_tokens: int
    """Tokens that arrived then."""
    arrivals: list[float]
    """Every arrival; the tokens of one target pass arrive together."""
    rounds: list[Round]
    """Target passes of a speculative arm; [] where the arm does not tell."""
    peak_memory_bytes: int = 0
    joules: float | None = None
    """Of the whole call; None where no meter stood around it."""

    @property
    def tokens(self) -> int:
        """Emitted ids."""
        return sum(len(ids) for ids in self.new_ids)

    @property
    def decode_tokens(self) -> int:
        """Tokens after the first arrival."""
        return self.tokens - self.first_tokens

    @property
    def decode_s(self) -> float:
        """Seconds after the first arrival."""
        return self.seconds - self.first_s


class Arm(Protocol):
    """`name` is unique within a run."""

    @property
    def name(self) -> str: ...

    def run(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], max_new_tokens: int, seed: int) -> Sample:
        """Continue the prompts by at most max_new_tokens each."""
        ...


def emitted(ids: list[int], eos: Sequence[int], limit: int) -> list[int]:
    """The ids a user gets: up to the limit and up to the end token, which is one of them."""
    ids = ids[:limit]
    ends = [i for i, token in enumerate(ids) if token in eos]
    return ids[: ends[0] + 1] if ends else ids
