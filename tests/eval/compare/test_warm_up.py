"""What is warmed up before arms are timed: every cache that a timed call may use, once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decode.common.typed_config import build
from decode.sampling.config import SamplingConfig
from eval.arms.ours import OurArm
from eval.config import EvalConfig
from eval.measure.cells import Cell
from eval.measure.timed_run import first_to_capture, sharing_captures
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


def test_captures_are_made_from_the_shortest_batch_to_the_end_of_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of two prompts: of 200, 80 and 300 tokens."""
    assert len(first_to_capture(prompts(50, 200, 60, 80, 300, 40), 2)) == 80
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "eval.arms.ours.warm_up", lambda model, drafter, ids, tokens, **settings: made.append((ids.shape[1], tokens))
    )
    one = replace(arm(DRAFTER), model=cast(Any, SimpleNamespace(device="cpu")))
    one.capture_ahead([(7,) * 80] * 2, 6)
    for longest, rows in ((306, 2), (10**6, 64)):  # and no more than 16,384 tokens of all rows
        with sharing_captures(longest, rows):
            one.capture_ahead([(7,) * 80] * 2, 6)
    assert made == [(80, 6), (80, 226), (80, 176)]


def test_what_shares_captures_is_rehearsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = loaded_in(tmp_path)
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(OurArm, "capture_ahead", lambda self, rows, tokens: made.append((len(rows), len(rows[0]))))
    for one in (arm(DRAFTER), arm(LATER), arm(DRAFTER, temperature=1.0)):
        loaded._capture(one, CELL)
    assert made == [(2, 80)]
    for other in (arm(DRAFTER, verifier="rejection"), arm(DRAFTER, strict=True), arm(DRAFTER, adaptive=True)):
        loaded._capture(other, CELL)
    assert len(made) == 4
    loaded._capture(arm(LATER, adaptive=True), CELL)  # whose clock is its own
    assert len(made) == 5
