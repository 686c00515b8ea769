"""What is profiled: our decoder with a draft and without, called on a batch of prompts, and its bare passes alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from decode import generate
from decode.autotune.timing import measure
from decode.drafters.base import Drafter
from decode.stats import Stats
from decode.trees.tree_plans import parse
from eval.config import EvalConfig
from eval.inputs import settings_at
from eval.measure.continuations import left_padded
from eval.measure.operators import profiled

Group = Sequence[Sequence[int]]
"""Prompts that are decoded together."""
Classes = dict[str, float]
COST_REPEATS = 10


@dataclass(frozen=True)
class Call:
    """What one timed call took, as a whole and by phase."""

    seconds: float
    tokens: int
    rounds: int
    """Target passes of the batch."""
    phases: dict[str, float]
    """Seconds, by the names of `Stats.seconds`."""

    @classmethod
    def of(cls, stats: Stats, seconds: float) -> Call:
        """By what the decoder counted."""
        return cls(seconds, stats.num_tokens, len(stats.arrival_s), dict(stats.seconds))

    def ms_per_round(self) -> dict[str, float]:
        """By phase, reading prompts left out; `other` is what no phase holds: Python between them, set-up, output."""
        phases = {phase: seconds for phase, seconds in self.phases.items() if phase != "prefill"}
        phases["other"] = self.seconds - sum(self.phases.values())
        return {phase: 1e3 * seconds / self.rounds for phase, seconds in phases.items()}


@dataclass(frozen=True)
class Passes:
    """The bare passes of one full round."""

    context: int
    """Tokens in the cache: the mean of a call."""
    depth: int
    """Draft tokens one after another."""
    nodes: int
    """Tokens of the target's pass."""


@dataclass(frozen=True)
class Contestant:
    """One way to decode."""

    name: str
    """Unique within a run."""
    cfg: EvalConfig
    model: PreTrainedModel
    drafter: Drafter | None

    def call(self, group: Group) -> Call:
        """Continue the prompts, timed: synchronous on a CPU, and on a GPU the last read waits for all."""
        began = time.perf_counter()
        stats = self._generate(group)
        return Call.of(stats, time.perf_counter() - began)

    def operators(self, group: Group) -> tuple[dict[str, Classes], int]:
        """Seconds by phase and class of operator in one call under the profiler, and its rounds."""
        found: list[Stats] = []
        seconds = profiled(lambda: found.append(self._generate(group)), self.model.device.type == "cuda")
        return seconds, len(found[0].arrival_s)

    def floor(self, group: Group) -> dict[str, float]:
        """Milliseconds of the bare passes of one full round, timed alone at the mean context (see
        `decode.autotune.timing`)."""
        wanted = passes(self.cfg, self.drafter, group)
        costs = measure(self.model, self.drafter, wanted.context, [wanted.nodes], len(group), COST_REPEATS)
        bare = {"draft": 1e3 * wanted.depth * costs.t_draft} if wanted.depth else {}
        return bare | {"target": 1e3 * costs.t_target[wanted.nodes]}

    def _generate(self, group: Group) -> Stats:
        """No end token cuts it short."""
        ids, mask = left_padded(group, 0, self.model.device)
        asked: dict[str, Any] = dict(settings_at(self.cfg, self.cfg.temperatures[0]))
        asked |= {"max_new_tokens": self.cfg.profile.max_new_tokens, "attention_mask": mask, "seed": self.cfg.seed}
        return generate(self.model, self.drafter, ids, eos_token_id=(), stop_strings=(), **asked).stats


def passes(cfg: EvalConfig, drafter: Drafter | None, group: Group) -> Passes:
    """Those of a round with that draft."""
    context = sum(map(len, group)) // len(group) + cfg.profile.max_new_tokens // 2
    if drafter is None:
        return Passes(context, 0, 1)
    shape = parse(cfg.decode.tree, cfg.decode.num_draft_tokens, cfg.decode.tree_nodes)
    shape = shape.cut(drafter.drafted_depth(shape))
    return Passes(context, shape.depth, shape.num_nodes)
