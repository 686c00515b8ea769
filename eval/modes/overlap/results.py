"""From simulated rounds to results.json: for each pair and link, each way at its best draft length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from eval.config import EvalConfig
from eval.modes.overlap.config import OverlapConfig
from eval.modes.overlap.pairs import Pair
from eval.modes.overlap.simulation import WAYS, Rounds
from eval.results.document import heading
from eval.results.statistics import bootstrap, ratio_of_ratios, ratio_of_sums

_BLOCKS = 100
"""Rounds are resampled in as many blocks."""
DEFINITIONS = {
    "speedup": "Tokens per second over those of the target without a draft, whose passes over one token are target_ms "
    "long: simulated, with an interval over blocks of rounds.",
    "k": "Draft tokens of a round; of overlap.draft_lengths the one with which this way is the fastest.",
    "foreseen": "Share of rounds whose verdict was as the draft assumed, so that the next draft was ready.",
    "ahead / in turn": "Speed with drafting ahead over that of drafting in turn, each at its best k.",
    "link": "Milliseconds from the draft's device to the target's, or back.",
}


def make_results(cfg: EvalConfig, every: Sequence[Pair], seconds: float) -> dict[str, Any]:
    """The content of results.json; everything is simulated here."""
    own = cfg.overlap
    settings = {name: getattr(own, name) for name in ("measured", "draft_lengths", "jitter", "rounds")}
    return {
        **heading(cfg, seconds),
        "target": {},
        "definitions": DEFINITIONS,
        "rows": [],
        "settings": settings,
        "pairs": [asdict(pair) | {"acceptance": list(pair.acceptance)} for pair in every],
        "simulated": list(simulated(own, every, cfg.seed)),
    }


def simulated(own: OverlapConfig, every: Sequence[Pair], seed: int) -> Iterator[dict[str, Any]]:
    """An entry for each pair and link."""
    for pair in every:
        for link_ms in own.links_ms:
            found = {way: _best(own, pair, way, link_ms, seed) for way in WAYS}
            ratio = bootstrap(
                np.concatenate([_blocks(found["ahead"][1]), _blocks(found["in turn"][1])], 1), ratio_of_ratios, seed
            )
            yield {
                "pair": pair.name,
                "link_ms": link_ms,
                "ways": {way: _entry(pair, k, rounds, seed) for way, (k, rounds) in found.items()},
                "ahead_over_in_turn": ratio.value,
                "ahead_over_in_turn_ci95": ratio.interval,
            }


def _best(own: OverlapConfig, pair: Pair, way: str, link_ms: float, seed: int) -> tuple[int, Rounds]:
    """The fastest draft length of a way, and its rounds."""
    each = {k: WAYS[way](pair, k, link_ms, own.jitter, own.rounds, seed) for k in own.draft_lengths}
    k = max(each, key=lambda length: each[length].tokens.sum() / each[length].milliseconds.sum())
    return k, each[k]


def _blocks(rounds: Rounds) -> np.ndarray:  # (blocks, 2)
    """Sums of tokens and milliseconds."""
    columns = np.stack([rounds.tokens, rounds.milliseconds], 1)
    return np.stack([block.sum(0) for block in np.array_split(columns, _BLOCKS)])


def _entry(pair: Pair, k: int, rounds: Rounds, seed: int) -> dict[str, Any]:
    blocks = _blocks(rounds)
    found = bootstrap(blocks * [pair.target_ms, 1], ratio_of_sums, seed, resamples=2_000)
    return {
        "num_draft_tokens": k,
        "tau": float(rounds.tokens.mean()),
        "foreseen": float(rounds.foreseen.mean()),
        "milliseconds_per_round": float(rounds.milliseconds.mean()),
        "speedup": found.value,
        "speedup_ci95": found.interval,
    }
