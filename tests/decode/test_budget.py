"""The adaptive draft length: it maximises tokens a second, gives up on hopeless text within its bound, and stays
exact."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from decode.autotune.budget import Budget
from decode.autotune.estimates import PRIOR, Acceptance, Calibration, monotone
from decode.autotune.experience import LONGEST_GAP
from decode.drafters.lm import LMDraft
from decode.stats import Round
from decode.trees.tree_plans import Dynamic, Shape, chain, k_ary
from tests.decode import checks
from tests.decode.simulated import Simulation, best_depth, line
from tests.tiers import by_default
from tests.tiny import tiny_llama


@pytest.mark.parametrize("step", by_default(1, [0.08, 0.2, 0.02, 0.5]))
@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.8, 0.95])
def test_the_depth_that_pays_best_is_chosen(alpha: float, step: float) -> None:
    """The rate that is reached is that of the best depth, but for what estimating costs where little can be won."""
    seconds = line(step, base=0.1)
    run = Simulation(seconds, lambda done, position: alpha).run(6000)
    best = best_depth([alpha] * 8, seconds)
    ideal = sum(alpha**i for i in range(best + 1)) / seconds(best)
    assert run.rate > (0.96 if ideal > 1.2 else 0.95) * ideal
    if ideal > 1.5:
        late = run.depths[len(run.depths) // 2 :]
        near = [k for k in range(9) if sum(alpha**i for i in range(k + 1)) / seconds(k) > 0.93 * ideal]
        assert sum(depth in near for depth in late) > 0.75 * len(late)


@pytest.mark.parametrize("accepts", [[0.9, 0.9, 0.9, 0.1, 0.1, 0.1, 0.1, 0.1], [1.0] * 8, [0.9, 0.5] + [0.3] * 6])
def test_exact_figures_give_the_best_depth_exactly(accepts: list[float]) -> None:
    """Estimates equal to the truth: the choice is the argmax itself."""
    for step in (0.01, 0.05, 0.1, 0.3):
        budget = Budget(8)
        budget.acceptance.tried, budget.acceptance.taken = [1e9] * 8, [1e9 * one for one in accepts]
        for depth in (*range(9), *range(9)):
            budget.experience.clock.learn(depth, line(step, 0.1)(depth))
        assert budget.next_shape(chain(8), 100).depth == best_depth(accepts, line(step, 0.1))
        assert budget.next_shape(chain(8), 1).depth == 0


@pytest.mark.parametrize("shape", [chain(8), chain(1), k_ary([3, 2, 2, 1]), Dynamic(6, 4, 24)], ids=str)
@pytest.mark.parametrize("alpha", [0.0, 0.05])
@pytest.mark.parametrize(("step", "base"), by_default(1, [(0.1, 0.1), (0.2, 0.2), (0.02, 0.05), (0.4, 0.3)]))
def test_hopeless_text_costs_at_most_five_per_cent(shape: Shape, alpha: float, step: float, base: float) -> None:
    """Probing included, against one second a token, the clock off by up to a tenth."""
    for seed, tokens in itertools.product(range(4), (128, 1000)):
        run = Simulation(line(step, base), lambda done, position: alpha, shape, jitter=0.1, seed=seed).run(tokens)
        plain = run.ends[-1] * 1.05 * 1.02  # the mean of the jitter, and of the hiccups
        assert run.spent < 1.05 * plain


def test_gaps_between_probes_double() -> None:
    """Up to the longest, unless more plain rounds are owed for what was lost."""
    run = Simulation(line(0.05, 0.05), lambda done, position: 0.0).run(600)
    probes = [at for at, depth in enumerate(run.depths) if depth]
    gaps = [after - before - 1 for before, after in itertools.pairwise(probes) if after - before > 1]
    assert all(later >= min(2 * gap, LONGEST_GAP) for gap, later in itertools.pairwise(gaps))
    assert gaps[-1] <= 2 * LONGEST_GAP


def test_a_clock_hiccup_is_nobodys_loss() -> None:
    """One round of a hundred times its length changes nothing for good."""
    budget, depths = Budget(4), []
    for at in range(200):
        depth = budget.next_shape(chain(4), 1000).depth
        depths.append(depth)
        budget.learn([Round(0, depth, depth, depth + 1)], line(0.1)(depth) * (100 if at == 60 else 1), depth)
    assert depths[10:].count(4) > 0.97 * len(depths[10:])
    assert set(depths[10:]) <= {3, 4}  # which is timed again now and then


@pytest.mark.parametrize("rows", [1, 8])
def test_drafting_resumes_where_the_text_becomes_draftable(rows: int) -> None:
    """Hopeless for 500 tokens, easy for 500, hopeless, easy: the easy ones are drafted within some hundred tokens."""
    run = Simulation(line(0.08, 0.1), lambda done, position: 0.9 * (done // 500 % 2)).run(2000, rows)
    depths = {half: [d for d, end in zip(run.depths, run.ends, strict=True) if end // 250 == half] for half in range(8)}
    for hopeless, easy in ((1, 3), (5, 7)):
        assert sum(depth == 0 for depth in depths[hopeless]) > 0.9 * len(depths[hopeless])
        assert sum(depth >= 4 for depth in depths[easy]) > 0.7 * len(depths[easy])


def test_rounds_that_were_not_captured_are_not_timed() -> None:
    """Their seconds say nothing of later rounds; the depths between those seen lie on a line."""
    budget = Budget(6)
    for at in range(40):
        depth = budget.next_shape(chain(6), 1000).depth
        budget.learn([Round(0, depth, depth, depth + 1)], None if at < 8 else 1 + depth, depth)
        assert not (at < 8 and depth)
    assert budget.experience.clock.seconds(6) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


def test_a_clock_that_was_wrong_about_plain_rounds_is_put_right() -> None:
    """The only plain rounds timed were disturbed: without measuring again, hopeless drafting would look cheap."""
    budget, spent = Budget(4), []
    for at in range(400):
        depth = budget.next_shape(chain(4), 1000).depth
        spent.append(line(0.2)(depth))
        budget.learn([Round(0, depth, 0, 1)], spent[-1] * (3 if at < 2 else 1), depth)
    assert sum(spent[100:]) < 1.05 * 300


def test_acceptance_is_drawn_towards_all_positions() -> None:
    """A position that was never reached is judged by the others, the prior decides where there is nothing."""
    acceptance = Acceptance([PRIOR] * 3)
    assert acceptance.estimates() == pytest.approx([0.7] * 3)
    for _ in range(400):
        acceptance.learn([Round(0, 3, 0, 1), Round(1, 3, 1, 2)])
    first, second, third = acceptance.estimates()
    assert first == pytest.approx(0.5, abs=0.02)
    assert second < 0.03
    assert 0.2 < third < 0.4
    assert acceptance.expected(3) == pytest.approx(
        [1, 1 + first, 1 + first + first * second, 1 + first + first * second + first * second * third]
    )


def test_confidence_is_calibrated_and_monotone() -> None:
    """A draft that is twice too sure of itself is read as such."""
    calibration, rng = Calibration(), random.Random(0)
    assert calibration(0.95) == pytest.approx(0.95)
    for _ in range(2000):
        sure = rng.random()
        calibration.learn([Round(0, 1, int(rng.random() < sure / 2), 1)], [[sure]])
    values = [calibration((i + 0.5) / 10) for i in range(10)]
    assert values == sorted(values)
    assert calibration(0.95) < 0.75
    assert calibration(0.05) < 0.2


@pytest.mark.parametrize("values", [[3.0, 1.0, 2.0], [1.0, 2.0, 3.0], [5.0, 4.0, 3.0, 9.0, 1.0]])
def test_monotone_is_the_closest_never_falling_sequence(values: list[float]) -> None:
    have = monotone(values, [1.0] * len(values))
    assert have == sorted(have)
    assert sum(have) == pytest.approx(sum(values))
    grid = itertools.combinations_with_replacement([x / 2 for x in range(2, 19)], len(values))
    least = min(sum((a - b) ** 2 for a, b in zip(one, values, strict=True)) for one in grid)
    assert sum((a - b) ** 2 for a, b in zip(have, values, strict=True)) <= least + 1e-9


@pytest.mark.parametrize("temperature", by_default(1, [1.0, 0.0]))
@pytest.mark.parametrize("tree", by_default(1, ["chain", "2x2x1", "dynamic"]))
def test_adaptive_output_is_that_of_autoregressive_decoding(tree: str, temperature: float) -> None:
    """With the clock of this very machine, whatever it says."""
    settings = {"max_new_tokens": 60, "num_draft_tokens": 4, "tree": tree, "adaptive": True, "temperature": temperature}
    model = tiny_llama(checks.VOCAB, dtype=torch.float64)
    for draft in (LMDraft(model), LMDraft(tiny_llama(checks.VOCAB, num_layers=1, seed=3, dtype=torch.float64))):
        checks.check_pathwise_equality(model, draft, 2, **settings)


@pytest.mark.parametrize("kind", ["oracle", "tree"])
def test_coupled_is_exact_whatever_the_budget_looks_at(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that knows the text to come, and drafts the more the less of it is right."""
    model, drafted = tiny_llama(checks.VOCAB, dtype=torch.float64), []

    def peeking(self: Budget, shape: Shape, left: int) -> Shape:
        depth = 4 - len(drafted) % 5  # the scripted draft is right for (round mod k + 1) tokens
        drafted.append(depth)
        self.depth = min(depth, left - 1)
        return shape.cut(self.depth)

    monkeypatch.setattr(Budget, "next_shape", peeking)
    checks.check_pathwise_equality(model, kind, 3, max_new_tokens=40, num_draft_tokens=4, adaptive=True)
    assert set(drafted) == {0, 1, 2, 3, 4}
