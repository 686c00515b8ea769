"""What is warmed up before arms are timed: every cache that a timed call may use, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from decode.common.typed_config import build
from decode.config import SamplingConfig
from eval.arms.ours import OurArm
from eval.config import EvalConfig
from eval.measure.cells import Cell
from eval.modes.compare.drafters import Drafters, LoadedDrafters
from eval.prompts.kinds import TextPrompts
from eval.prompts.prompt import Prompt
from tests.eval.compare.tiny_comparison import make_models, values

CELL = Cell(2, 0.0, "edit")
DRAFTER, LATER = object(), object()


def prompts(*lengths: int) -> list[Prompt]:
    return [Prompt(str(number), "edit", (7,) * length, document="m") for number, length in enumerate(lengths)]


def loaded_in(tmp_path: Path) -> LoadedDrafters:
    make_models(tmp_path)
    cfg = build(EvalConfig, {**values(tmp_path), "drafts": {}})
    texts = {"edit": TextPrompts(prompts(50, 200, 60, 80, 300, 40), prompts(249, 249))}
    nothing = cast(Any, None)
    return LoadedDrafters(Drafters(cfg), nothing, nothing, {"ngram": DRAFTER}, nothing, texts)


def arm(drafter: object, **settings: Any) -> OurArm:
    return OurArm("ours", cast(Any, None), cast(Any, drafter), vars(SamplingConfig(num_draft_tokens=4, **settings)))


def test_every_cache_that_batches_use_is_rehearsed_over_all_its_lengths(tmp_path: Path) -> None:
    """Batches of two prompts: of 200, 80 and 300 tokens with 6 new ones, and of 249 with 4, whose drafts alone reach
    beyond 256 slots."""
    loaded = loaded_in(tmp_path)
    small, large = sorted(loaded._calls(arm(DRAFTER), 2), key=lambda one: one.end)
    assert (len(small.shortest), small.end) == (80, 206)
    assert (len(large.shortest), large.end) == (249, 306)
    plain, long = sorted(loaded._calls(arm(None), 2), key=lambda one: one.end)
    assert (len(plain.shortest), plain.end) == (80, 253)
    assert (len(long.shortest), long.end) == (300, 306)


def test_what_shares_captures_is_rehearsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = loaded_in(tmp_path)
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(OurArm, "capture_ahead", lambda self, rows, tokens: made.append((len(rows), len(rows[0]))))
    for one in (arm(DRAFTER), arm(LATER), arm(DRAFTER, temperature=1.0)):
        loaded._capture(one, CELL)
    assert made == [(2, 80), (2, 249)]
    for other in (arm(DRAFTER, verifier="rejection"), arm(DRAFTER, strict=True), arm(DRAFTER, adaptive=True)):
        loaded._capture(other, CELL)
    assert len(made) == 8
    loaded._capture(arm(LATER, adaptive=True), CELL)  # whose clock is its own
    assert len(made) == 10
