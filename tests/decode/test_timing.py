"""What passes cost: timed as decoding runs them, and drafted tokens by how many were drafted."""

from __future__ import annotations

import pytest
import torch

from decode.autotune import timing
from decode.drafters.lm import LMDraft
from decode.forward.runner import Runner
from decode.forward.target import CachedModel
from tests.decode import checks
from tests.decode.heads import random_head
from tests.tiny import tiny_llama

VOCAB = checks.VOCAB


def ticking(monkeypatch: pytest.MonkeyPatch, seconds: float = 1.0) -> None:
    """A clock on which a pass of the target or the draft takes nothing, and a drafted token `seconds`."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    real = timing._proposal

    def proposal(drafter, request, wanted, plan):  # noqa: ANN001, ANN202
        propose = real(drafter, request, wanted, plan)

        def timed():  # noqa: ANN202
            tree = propose()
            now[0] += seconds * tree.max_depth
            return tree

        return timed

    monkeypatch.setattr(timing, "_proposal", proposal)


def test_a_draft_token_costs_what_it_costs_whatever_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(num_layers=6).requires_grad_(False)
    ticking(monkeypatch)
    for draft in (random_head("medusa", model), LMDraft(tiny_llama(num_layers=1))):
        assert timing.measure(model, draft, 20, [1, 9], repeats=2).t_draft == pytest.approx(1.0)


def test_bare_passes_are_timed_as_captures_from_the_first_repeat_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds are captured as a whole, so their parts run nowhere else: of ten repeats six were once uncaptured, a plain
    step took twice its time, and what a draft was predicted to bring was wrong."""
    model = tiny_llama(VOCAB)
    captured = []
    keep = Runner._keep
    monkeypatch.setattr(Runner, "_keep", lambda self, *given: (captured.append(given[0][0]), keep(self, *given)))
    costs = timing.measure(model, LMDraft(tiny_llama(VOCAB, num_layers=1, seed=3)), 20, [1, 4], repeats=1)
    assert sorted(captured) == ["chain", "straight", "straight"]
    assert set(costs.t_target) == {1, 4}


def test_passes_are_timed_on_a_text_that_does_not_repeat_itself() -> None:
    """On one that did, rounding decided, and passes of several tokens were timed uncaptured."""
    runner = CachedModel(tiny_llama(), 2, 64)
    text = torch.cat([timing._text(runner, 2, 0, 20), timing._text(runner, 2, 20, 9)], 1)
    assert text.shape == (2, 29)
    assert len(set(text[0].tolist())) == 29
    assert torch.equal(text[0], text[1])
