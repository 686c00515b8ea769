"""What a call counted and what its passes cost, by hand; and the corners of the quantities that claims are made of."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from decode import stats as stats_module
from decode.acceptance import acceptance_by_position, expected_tau, greedy_agreement, overlap, tau, windows
from decode.autotune import timing
from decode.drafters.lm import LMDraft
from decode.forward.runner import Runner
from decode.forward.target import CachedModel
from decode.stats import Round, Stats, peak_memory
from tests.decode import checks
from tests.decode.heads import random_head
from tests.tiny import tiny_llama

ROUNDS = [Round(0, 3, 3, 4), Round(1, 3, 0, 1), Round(0, 3, 1, 2), Round(1, 1, 1, 1)]  # the last one was cut at the end


def test_counts_and_rates_of_a_call() -> None:
    stats = Stats(3, rounds=ROUNDS, arrival_s=[0.5, 1.0, 4.0], distances=[0.1, 0.3])
    assert (stats.num_tokens, stats.num_target_passes, stats.tau) == (8, 4, 2.0)
    assert (stats.ttft_s, stats.total_s, stats.tokens_per_s) == (0.5, 4.0, 2.0)
    assert stats.acceptance_by_position == [3 / 4, 1 / 2, 1.0]
    assert stats.distance == pytest.approx(0.2)


def test_a_call_that_emitted_nothing_has_no_rates() -> None:
    stats = Stats(2)
    assert (stats.tau, stats.tokens_per_s, stats.ttft_s, stats.total_s, stats.distance) == (0, 0, 0, 0, None)
    assert all(math.isnan(value) for value in stats.acceptance_by_position)
    assert tau(0, 0) == 0


def test_a_phase_adds_up_over_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 3.0, 10.0, 10.5])
    stats = Stats(1, _began=0.0)
    monkeypatch.setattr(stats_module.time, "perf_counter", lambda: next(times))
    for _ in range(2):
        with stats.phase("round"):
            pass
    assert stats.seconds["round"] == 2.5
    assert sum(stats.seconds.values()) == 2.5


def test_arrivals_are_seconds_from_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.5, 12.0])
    stats = Stats(1, _began=10.0)
    monkeypatch.setattr(stats_module.time, "perf_counter", lambda: next(times))
    stats.arrive()
    stats.arrive()
    assert stats.arrival_s == [0.5, 2.0]


@pytest.mark.parametrize(("platform", "size"), [("linux", 3 * 1024), ("darwin", 3)])
def test_peak_memory_is_in_bytes(monkeypatch: pytest.MonkeyPatch, platform: str, size: int) -> None:
    monkeypatch.setattr(stats_module.sys, "platform", platform)
    monkeypatch.setattr(stats_module.resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=3))
    assert peak_memory(torch.device("cpu")) == size


def test_a_position_counts_only_where_those_before_it_were_accepted_and_it_was_drafted() -> None:
    rounds = [Round(0, 4, 4, 5), Round(0, 4, 1, 2), Round(0, 2, 2, 3), Round(0, 0, 0, 1)]
    assert acceptance_by_position(rounds, 4) == [1.0, 2 / 3, 1.0, 1.0]
    assert acceptance_by_position(rounds, 2) == [1.0, 2 / 3]


def test_overlap_is_of_two_distributions_and_agreement_of_two_argmaxes() -> None:
    p, q = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]]), torch.tensor([[0.1, 0.1, 0.8], [0.2, 0.7, 0.1]])
    assert overlap(p.log(), q.log()).tolist() == pytest.approx([0.3, 0.9])
    assert overlap(p.log(), p.log()).tolist() == pytest.approx([1.0, 1.0])
    assert greedy_agreement(p, q).tolist() == [0.0, 1.0]


def test_windows_are_whole_runs_of_valid_positions() -> None:
    alpha = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]])
    valid = torch.tensor([[True, True, False, True], [False, True, True, True]])
    assert windows(alpha, valid, 2).tolist() == alpha.new_tensor([[0.1, 0.2], [0.6, 0.7], [0.7, 0.8]]).tolist()
    assert windows(alpha, valid, 4).shape == (0, 4)
    assert windows(alpha, valid, 5).shape == (0, 5)
    assert expected_tau(torch.tensor([[0.5, 0.4], [1.0, 0.0]])) == pytest.approx(1 + (0.5 + 0.2 + 1.0) / 2)
    assert math.isnan(expected_tau(torch.zeros(0, 3)))


VOCAB = checks.VOCAB


def ticking(monkeypatch: pytest.MonkeyPatch, seconds: float = 1.0) -> None:
    """A clock on which a pass of the target or the draft takes nothing, and a drafted token `seconds`."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    real = timing._proposal

    def proposal(drafter, asked):  # noqa: ANN001, ANN202
        propose = real(drafter, asked)

        def timed():  # noqa: ANN202
            tree = propose()
            now[0] += seconds * tree.max_depth
            return tree

        return timed

    monkeypatch.setattr(timing, "_proposal", proposal)


@pytest.mark.slow
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
