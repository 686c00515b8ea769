"""Rounds and accepted tokens by hand, and which faults count as explanations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eval.modes.served.engine.metrics import Counters, total
from eval.modes.served.faults.counting import Texts, count
from eval.modes.served.faults.faults import alike, distance
from train.check.agreement import accepted, rounds_of

IDS = torch.tensor([9, 9, 1, 2, 3, 4, 5, 6, 7])


class Scripted:
    """Drafts the true tokens but for the second one behind place 4."""

    depth, taps = None, ()

    def drafting(self) -> Any:
        def drafted(ids: Tensor, features: Tensor, places: Tensor, steps: int) -> Tensor:
            found = torch.stack([ids[places + 1 + step] for step in range(steps)])
            found[1, places == 4] = 0
            return found

        return drafted


def test_a_token_counts_only_where_those_before_it_are_right() -> None:
    drafted = torch.tensor([[3, 0, 5], [4, 5, 6]])  # steps, places
    assert accepted(drafted, IDS, torch.tensor([3, 4, 5])) == [2, 0, 2]


def test_a_round_begins_behind_the_targets_own_token() -> None:
    assert rounds_of([2, 9, 9, 1, 9, 0]) == [2, 1, 0]


def test_rounds_begin_behind_the_first_new_token_and_before_the_limit() -> None:
    texts = Texts(None, [IDS], [2], 4, 2)  # type: ignore[arg-type]
    assert count(Scripted(), texts) == [Counters(1, 2, (1, 1))]  # type: ignore[arg-type]  # of places 2, 3, 4
    texts = Texts(None, [IDS], [2], 5, 2)  # type: ignore[arg-type]
    assert count(Scripted(), texts) == [Counters(2, 4, (2, 2))]  # type: ignore[arg-type]
    texts = Texts(None, [IDS], [3], 4, 2)  # type: ignore[arg-type]
    assert count(Scripted(), texts) == [Counters(1, 2, (1, 1))]  # type: ignore[arg-type]


def test_counters_are_compared_prompt_by_prompt() -> None:
    one, other = Counters(4, 12, (3, 2, 1)), Counters(5, 15, (3, 1, 1))
    assert distance([one, other], [one, other]) == 0
    assert distance([one, other], [other, one]) == 4
    assert total([one, other]) == Counters(9, 27, (6, 3, 2))


def test_shares_are_alike_as_far_as_chance_goes() -> None:
    assert alike(Counters(400, 1200, (64, 2, 0)), Counters(410, 1230, (58, 1, 0)))
    assert not alike(Counters(400, 1200, (64, 2, 0)), Counters(400, 1200, (120, 2, 0)))
    assert not alike(Counters(400, 1200, (200, 150, 90)), Counters(400, 1200, (200, 150, 20)))
