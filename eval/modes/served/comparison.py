"""Accepted tokens in the engine and in our decoder, on the same prompts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import numpy as np

from decode.common.errors import InputError
from decode.common.progress import progress
from decode.drafters.base import Drafter
from eval.modes.served.counting import Pair, Texts
from eval.modes.served.engine.client import complete
from eval.modes.served.engine.metrics import Counters
from eval.modes.served.engine.server import Server
from eval.modes.served.faults.other_texts import other_texts
from eval.results.statistics import bootstrap, ratio_of_sums

Verdict = Literal["equal", "within intervals", "parted"]
_EARLY = 4
"""Tokens at the beginning of a text, where texts of one model part by rounding in few prompts at most."""


def ask(
    server: Server, prompts: Texts, new_tokens: int, temperature: float, seed: int, k: int, label: str
) -> dict[str, Any]:
    """{"texts", "counters"} by prompt. One is asked after another, and the counters are read in between: so it is known
    which prompt they are of. A seed is given where tokens are drawn."""
    texts, each = [], []
    with progress(len(prompts), "prompts", label) as bar:
        before = server.counters()
        for row, prompt in enumerate(prompts):
            drawn = seed + row if temperature else None
            texts += complete(server, [prompt], new_tokens, temperature, drawn, 1).texts
            new = server.counters_since(before)
            each.append(first_places(new, k))
            before += new
            bar.update(1)
    return {"texts": texts, "counters": [asdict(one) for one in each]}


def first_places(counters: Counters, k: int) -> Counters:
    """Of drafts of k tokens, where the engine counts more places."""
    assert not any(counters.accepted[k:]), (counters, k)
    return Counters(counters.drafts, counters.drafted, counters.accepted[:k])


def ours(
    pair: Pair, drafter: Drafter, prompts: Texts, texts: Texts, temperature: float, seed: int, k: int
) -> list[Counters]:
    """Counters of our decoder by prompt, drafting as the engine does. Greedily: along the texts that the engine wrote,
    so that what is compared are drafts even where rounding made a text part from ours. Drawn: along texts that our
    target drew for itself."""
    limit = len(texts[0])
    if temperature:
        written = pair.write(prompts, limit + k, temperature, seed)
    else:
        written = extended(pair, prompts, texts, k)
    return pair.counters_along(drafter, prompts, written, limit, k)


def extended(pair: Pair, prompts: Texts, texts: Texts, k: int) -> list[list[int]]:
    """Greedy texts with k tokens more: the last round reaches beyond what was asked for."""
    begun = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
    more = pair.write(begun, k, 0.0, 0)
    return [[*text, *behind] for text, behind in zip(texts, more, strict=True)]


def check_texts(pair: Pair, prompts: Texts, texts: Texts, engine: str) -> int:
    """How many of the engine's greedy texts are the target's own; InputError where they are another model's."""
    own = pair.write(prompts, len(texts[0]), 0.0, 0)
    early = sum(list(a[:_EARLY]) == list(b[:_EARLY]) for a, b in zip(texts, own, strict=True))
    if early * 2 < len(own):
        raise InputError(
            f"of {len(own)} greedy texts that {engine} wrote, {early} begin as the target's own do: it serves another "
            f"model, revision or precision than target.path names, so nothing can be compared. The first text begins "
            f"{list(texts[0][:8])} there and {own[0][:8]} here; {other_texts(pair.target, prompts, texts)}. Serve the "
            "same model, or give its target.path, target.revision and target.dtype"
        )
    return sum(list(a) == list(b) for a, b in zip(texts, own, strict=True))


def judge(engine: Sequence[Counters], own: Sequence[Counters], temperature: float, dtype: str, seed: int) -> Verdict:
    """Whether both draft alike. Greedily in float32 all counters are equal; else rounding or chance makes them differ,
    and intervals over prompts have to overlap at every position."""
    if temperature == 0 and list(engine) == list(own):
        return "equal"
    if temperature == 0 and dtype == "float32":
        return "parted"
    pairs = zip(intervals(engine, seed), intervals(own, seed), strict=True)
    return "within intervals" if all(_overlap(a, b) for a, b in pairs) else "parted"


def intervals(counters: Sequence[Counters], seed: int) -> list[list[float] | None]:
    """95% intervals over prompts of acceptance by position; None where some resamples do not reach it."""
    found = []
    reached = [(one.drafts, *one.accepted) for one in counters]
    for place in range(len(counters[0].accepted)):
        columns = np.array([[each[place + 1], each[place]] for each in reached], dtype=float)
        found.append(_interval(columns, seed))
    return found


def _interval(columns: np.ndarray, seed: int) -> list[float] | None:  # (prompts, 2)
    if not columns[:, 1].any():
        return None
    if columns[:, 1].all() and np.ptp(columns[:, 0] / columns[:, 1]) == 0:  # every resample says the same
        return [float(columns[0, 0] / columns[0, 1])] * 2
    with np.errstate(invalid="ignore", divide="ignore"), warnings.catch_warnings(action="ignore"):
        ci95 = bootstrap(columns, ratio_of_sums, seed).ci95
    return None if ci95 is None or not np.isfinite(ci95).all() else list(ci95)


def total(counters: Sequence[Counters]) -> Counters:
    """Over all prompts."""
    return sum(counters[1:], counters[0])


def counters_of(kept: Sequence[Mapping[str, Any]]) -> list[Counters]:
    """As `ask` keeps them."""
    return [Counters(one["drafts"], one["drafted"], tuple(one["accepted"])) for one in kept]


def _overlap(a: Sequence[float] | None, b: Sequence[float] | None) -> bool:
    return a is None or b is None or (a[0] <= b[1] and b[0] <= a[1])
