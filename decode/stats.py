"""What a generation call counts and times: rounds, arrivals and seconds by phase."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch.autograd import profiler
from torch.profiler import record_function

from decode.acceptance import acceptance_by_position, tau

PHASES = ("prefill", "round", "host")


@dataclass(frozen=True)
class Round:
    """One target pass of one row; all counts are tokens."""

    row: int
    """Index of the request."""
    drafted: int
    """Draft tokens proposed; of a tree its levels."""
    accepted: int
    """Draft tokens that the verifier accepted."""
    emitted: int
    """Tokens that the text grew by, correction or bonus included; what was cut at the end does not count."""
    context: int | None = None
    """Tokens of the row before the pass, prompt included; None where nobody knows."""
    ahead: bool | None = None
    """Whether its drafts were made during the pass before; None without `overlap`, and without drafts."""


@dataclass
class Stats:
    """Counts of one call. Phases are host times: on an accelerator `round` is the launch, and the wait for it shows in
    `host`, where results are read."""

    num_draft_tokens: int
    """k, draft tokens on the longest path of a round."""
    rounds: list[Round] = field(default_factory=list)
    """Every target pass of every row, in order."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """Phase -> seconds: prefill, round (draft, target, verdict and commit as one unit), host (what came of it)."""
    arrival_s: list[float] = field(default_factory=list)
    """Seconds from the call to each burst of tokens; one burst per target pass of the batch."""
    finish_reasons: list[str] = field(default_factory=list)
    """Per row: length, eos or stop."""
    distances: list[float] = field(default_factory=list)
    """Per emitted token: TV distance between p and the distribution it came from, where a lossy rule measured it."""
    num_prefilled: int = 0
    """Prompt tokens that the target read; of a conversation, those that it had not read before."""
    peak_memory_bytes: int = 0
    """Of the CUDA allocator; on a CPU of the whole process."""
    _began: float = field(default_factory=time.perf_counter)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to a phase, and mark it where torch.profiler runs."""
        began = time.perf_counter()
        with record_function(name) if profiler._is_profiler_enabled else nullcontext():
            yield
        self.seconds[name] += time.perf_counter() - began

    def arrive(self) -> None:
        """Note that tokens reached the host."""
        self.arrival_s.append(time.perf_counter() - self._began)

    def finish(self, reasons: list[str], device: torch.device) -> None:
        """Close the books."""
        self.finish_reasons = reasons
        self.peak_memory_bytes = peak_memory(device)

    @property
    def num_tokens(self) -> int:
        """Tokens emitted, all rows."""
        return sum(one.emitted for one in self.rounds)

    @property
    def num_target_passes(self) -> int:
        """Target passes, counted per row: tau of a batch is then that of its rows."""
        return len(self.rounds)

    @property
    def tau(self) -> float:
        """Tokens emitted per target pass."""
        return tau(self.num_tokens, self.num_target_passes)

    @property
    def acceptance_by_position(self) -> list[float]:
        """P(i-th draft token accepted | those before it were)."""
        return acceptance_by_position(self.rounds, self.num_draft_tokens)

    @property
    def ahead_share(self) -> float | None:
        """Of the target passes with drafts, the share whose drafts were made during the pass before; None without
        `overlap`."""
        told = [one.ahead for one in self.rounds if one.ahead is not None]
        return sum(told) / len(told) if told else None

    @property
    def distance(self) -> float | None:
        """Mean TV distance from the target's distribution over the emitted tokens; None for rules that keep it."""
        return sum(self.distances) / len(self.distances) if self.distances else None

    @property
    def total_s(self) -> float:
        """Seconds from the call to the last token."""
        return self.arrival_s[-1] if self.arrival_s else 0.0

    @property
    def ttft_s(self) -> float:
        """Seconds from the call to the first tokens."""
        return self.arrival_s[0] if self.arrival_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens emitted per second of the whole call, prefill included."""
        return self.num_tokens / self.total_s if self.total_s else 0.0


def peak_memory(device: torch.device) -> int:
    """Bytes: the allocator's peak on CUDA, the process's peak resident size elsewhere (kilobytes on Linux, bytes on
    macOS)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
