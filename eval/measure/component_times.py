"""What one draft token and one target pass cost alone, and the speedup that these promise at a given tau."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from transformers import PreTrainedModel

from decode.acceptance import predicted_speedup
from decode.autotune.timing import Costs, measure
from decode.config import SamplingConfig
from decode.drafters.base import drafted_depth
from decode.trees.tree_plans import chain
from eval.results.schema import ComponentTimes


def is_plain_chain(settings: SamplingConfig) -> bool:
    """Whether component times predict the speedup of these settings: k tokens a round, always."""
    return settings.tree == "chain" and not settings.adaptive


def promised_speedup(costs: ComponentTimes, tau: float) -> float:
    """tau * t_target(1) / (k * t_draft + t_target(k + 1))."""
    return predicted_speedup(tau, costs.num_draft_tokens, costs.t_target_1_s, costs.t_draft_s, costs.t_target_k1_s)


@dataclass
class CostMeter:
    """Collects component times in pieces spread over the timed run, so that they see the same machine as the arms."""

    model: PreTrainedModel
    drafters: Mapping[str, Any]
    draft_lengths: Mapping[str, Sequence[int]]
    """Drafter -> the k it is timed at."""
    context: int
    """Mean context of the run in tokens."""
    batch_size: int
    repeats: int
    _pieces: dict[str, list[Costs]] = field(default_factory=dict)

    def sample(self) -> None:
        """One piece: every drafter's passes, `repeats` forwards of each, interleaved."""
        for name, lengths in self.draft_lengths.items():
            sizes = [1, *(self._drafted(name, k) + 1 for k in lengths)]
            piece = measure(self.model, self.drafters[name], self.context, sizes, self.batch_size, self.repeats)
            self._pieces.setdefault(name, []).append(piece)

    def result(self) -> dict[tuple[str, int], ComponentTimes]:
        """(drafter, k) -> medians over the pieces; a target pass of one size is the same for all drafters, so it is
        pooled."""
        by_size: dict[int, list[float]] = {}
        for piece in (one for pieces in self._pieces.values() for one in pieces):
            for size, seconds in piece.t_target.items():
                by_size.setdefault(size, []).append(seconds)
        target = {size: median(seconds) for size, seconds in by_size.items()}
        found = {}
        for name, k in ((name, k) for name, lengths in self.draft_lengths.items() for k in lengths):
            drafted, t_draft = self._drafted(name, k), median(one.t_draft for one in self._pieces[name])
            found[name, k] = ComponentTimes(
                num_draft_tokens=drafted,
                t_target_1_s=target[1],
                t_target_k1_s=target[drafted + 1],
                t_draft_s=t_draft,
            )
        return found

    def _drafted(self, name: str, k: int) -> int:
        """Tokens of a round that is asked for k."""
        return drafted_depth(self.drafters[name], chain(k))
