"""The adaptive draft length of a batch that nobody waits for: it ends with its slowest row."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping

import pytest

from decode import generate
from decode.autotune.budget import Budget
from decode.autotune.experience import Experience
from decode.autotune.fallback import Fallback
from decode.drafters.lm import LMDraft
from decode.stats import Round
from decode.trees.tree_plans import chain
from tests.decode import checks
from tests.decode.simulated import line
from tests.tiers import by_default
from tests.tiny import tiny_llama

DEPTH = 8
TOKENS = 80
Choose = Callable[[Mapping[int, int]], int]
Learn = Callable[[list[Round], float | None, int], None]


def batch_seconds(accepts: list[float], seconds: Callable[[int], float], choose: Choose, learn: Learn) -> float:
    """Of a call whose rows accept every token with a chance of their own."""
    rng, done, spent = random.Random(str(accepts)), [0] * len(accepts), 0.0
    while min(done) < TOKENS:
        left = {row: TOKENS - have for row, have in enumerate(done) if have < TOKENS}
        depth, rounds = choose(left), []
        for row in left:
            accepted = 0
            while accepted < depth and rng.random() < accepts[row]:
                accepted += 1
            emitted = min(accepted + 1, left[row])
            done[row] += emitted
            rounds.append(Round(row, depth, accepted, emitted))
        spent += seconds(depth)
        learn(rounds, seconds(depth), depth)
    return spent


def adaptive_seconds(
    experience: Experience, accepts: list[float], seconds: Callable[[int], float], waits: bool = False
) -> float:
    budget = Budget(DEPTH, experience=experience)

    def choose(left: Mapping[int, int]) -> int:
        budget.running({} if waits else left)
        return budget.next_shape(chain(DEPTH), max(left.values())).depth

    return batch_seconds(accepts, seconds, choose, budget.learn)


def fixed_seconds(depth: int, accepts: list[float], seconds: Callable[[int], float]) -> float:
    return batch_seconds(
        accepts, seconds, lambda left: depth if max(left.values()) > 1 else 0, lambda rounds, seconds, depth: None
    )


@pytest.mark.parametrize("rows", by_default(1, [4, 8]))
@pytest.mark.parametrize("spread", [(1.2, 0.9), (6.0, 2.5), None], ids=["as greedy", "as sampled", "alike"])
def test_batches_of_different_rows_end_about_as_early_as_at_the_best_fixed_depth(
    spread: tuple[float, float] | None, rows: int
) -> None:
    """And never much later than plain batches; by tokens a second they end much later."""
    rng, seconds, experience = random.Random(1), line(0.13 if rows == 4 else 0.2, 0.1), Experience(DEPTH)
    calls = [
        [rng.betavariate(*spread) * 0.97 if spread else 0.7 + rng.random() / 1e3 for _ in range(rows)]
        for _ in range(50)
    ]
    fixed = [sum(fixed_seconds(depth, call, seconds) for call in calls) for depth in range(DEPTH + 1)]
    ours = sum(adaptive_seconds(experience, call, seconds) for call in calls)
    assert ours < fixed[0] / 0.95
    assert ours < min(fixed) / 0.93
    if spread == (1.2, 0.9):  # by tokens a second, as where requests wait
        others = Experience(DEPTH)
        assert sum(adaptive_seconds(others, call, seconds, waits=True) for call in calls) > fixed[0] / 0.9


def choice(accepts: list[float], left: Mapping[int, int]) -> int:
    """What is drafted once the rows' acceptance is known well."""
    budget = Budget(DEPTH)
    for depth in (*range(DEPTH + 1), *range(DEPTH + 1)):
        budget.experience.clock.learn(depth, line(0.15, 0.1)(depth))
    rng = random.Random(0)
    for _ in range(300):
        budget.running(dict.fromkeys(range(len(accepts)), 1000))
        rounds = []
        for row, accept in enumerate(accepts):
            accepted = 0
            while accepted < 4 and rng.random() < accept:
                accepted += 1
            rounds.append(Round(row, 4, accepted, accepted + 1))
        budget.learn(rounds, None, 4)
    budget.running(left)
    budget.experience.fallback = Fallback()  # what the rounds above lost is not asked about
    return budget.next_shape(chain(DEPTH), 1000).depth


def test_the_row_that_ends_last_decides() -> None:
    """The same rows, and what differs is how far each has to go, or that others wait."""
    accepts = [0.95, 0.95, 0.95, 0.05]
    even = dict.fromkeys(range(4), 50)
    assert choice(accepts, even) == 0
    assert choice(accepts, {**even, 3: 2}) >= 3  # it will have ended long before the others
    assert choice(accepts, {3: 50}) == 0  # the others have ended
    assert choice(accepts, {}) >= 3  # its place will be taken, so tokens a second count
    assert choice([0.95] * 4, even) >= 3


@pytest.mark.parametrize("batch_size", [3, 2])
def test_a_call_says_how_far_its_rows_have_to_go(batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round, and nothing of them while a request waits."""
    model, told, real = tiny_llama(checks.VOCAB), [], Budget.running

    def running(self: Budget, left: Mapping[int, int]) -> None:
        told.append(dict(left))
        real(self, left)

    monkeypatch.setattr(Budget, "running", running)
    ids, mask = checks.ragged_prompts(3)
    settings = {"num_draft_tokens": 2, "adaptive": True, "max_new_tokens": 12, "batch_size": batch_size}
    out = generate(model, LMDraft(model), ids, mask, eos_token_id=(), seed=0, **settings)
    assert told[0] == ({0: 12, 1: 12, 2: 12} if batch_size == 3 else {})
    known = [one for one in told if one]
    assert all(left[row] >= 1 for left in known for row in left)
    for before, after in itertools.pairwise(known):
        assert after.keys() <= before.keys()
        assert all(after[row] < before[row] for row in after)
    emitted = sum(one.emitted for one in out.stats.rounds)
    assert emitted == 36
