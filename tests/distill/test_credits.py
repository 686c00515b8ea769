"""Credit functions against their formulas written out by hand, and e2e-TV against the loss of a whole round."""

import pytest
import torch
from torch import Tensor

from decode.common.errors import ConfigError
from distill.config import ObjectiveConfig
from distill.objectives.credits import Rounds, constant_decay, credited, dpace, first_failure, none

ALPHA = torch.tensor([[0.9, 0.5, 0.4], [0.2, 1.3, 0.6]])  # 1.3: an estimate from sparse records, worth 1
WHOLE = torch.ones(2, 3, dtype=torch.bool)


def rounds(alpha: Tensor = ALPHA, valid: Tensor = WHOLE, loss: Tensor | None = None) -> Rounds:
    loss = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]]) if loss is None else loss
    return Rounds(loss * valid, alpha * valid, valid, valid)


def test_none_and_decay() -> None:
    assert torch.equal(none(rounds(), 0.5), torch.ones(2, 3))
    assert torch.equal(constant_decay(rounds(), 0.5), torch.tensor([[1.0, 0.5, 0.25]] * 2))


def test_dpace_adds_up_the_smoothed_chances_of_all_later_tokens() -> None:
    a, b, c = 0.95, 0.75, 0.7  # (alpha + 1) / 2
    first = [a + a * b + a * b * c, a * b + a * b * c, a * b * c]
    a, b, c = 0.6, 1.0, 0.8
    second = [a + a * b + a * b * c, a * b + a * b * c, a * b * c]
    assert torch.allclose(dpace(rounds(), 1.0), torch.tensor([first, second]))


def test_first_failure_counts_a_token_as_often_as_those_before_it_pass() -> None:
    expected = torch.tensor([[1.0, 0.9, 0.45], [1.0, 0.2, 0.2]])
    assert torch.allclose(first_failure(rounds(), 1.0), expected)


def test_first_failure_is_the_mean_over_drawn_failures() -> None:
    """Enumerated: every pattern of accepted and rejected tokens, with its chance, keeps the tokens up to its first
    rejection."""
    alpha, found = ALPHA[0].tolist(), torch.zeros(3)
    for pattern in range(8):
        accepted = [bool(pattern >> place & 1) for place in range(3)]
        chance = torch.tensor([a if yes else 1 - a for a, yes in zip(alpha, accepted, strict=True)]).prod()
        kept = next((place + 1 for place, yes in enumerate(accepted) if not yes), 3)
        found[:kept] += chance
    assert torch.allclose(first_failure(rounds(), 1.0)[0], found)


@pytest.mark.parametrize("credit", [dpace, first_failure])
def test_a_slot_that_is_not_valid_ends_its_round(credit) -> None:  # noqa: ANN001
    valid = torch.tensor([[True, False, True], [True, True, False]])
    weights = credit(rounds(valid=valid), 1.0)
    alone = credit(rounds(ALPHA[1:, :2], WHOLE[1:, :2], torch.ones(1, 2)), 1.0)
    assert not weights[0, 1:].any()
    assert torch.allclose(weights[1, :2], alone[0])


def test_the_mean_is_over_weights_of_learned_slots() -> None:
    learned = torch.tensor([[True, True, False], [True, True, True]])
    given = rounds()
    total, weight = credited(
        Rounds(given.loss, given.alpha, WHOLE, learned), ObjectiveConfig(credit="decay", decay=0.5)
    )
    assert float(total) == 1 + 1 + 8 + 8 + 8
    assert float(weight) == 1.5 + 1.75


def test_weights_carry_no_gradient() -> None:
    loss = torch.rand(2, 3).requires_grad_()
    config = ObjectiveConfig(credit="dpace")
    total, weight = credited(Rounds(loss, ALPHA, WHOLE, WHOLE), config)
    (gradient,) = torch.autograd.grad(total, loss)
    first, second = 0.95 * 0.75 * 0.7, 0.6 * 1.0 * 0.8  # the last token counts if all three are accepted
    assert gradient[:, 2].tolist() == pytest.approx([first, second])
    assert gradient[:, 0].tolist() == pytest.approx([0.95 + 0.95 * 0.75 + first, 0.6 + 0.6 + second])
    assert not weight.requires_grad


def test_e2e_tv_is_the_share_of_a_round_that_is_lost() -> None:
    tv = torch.tensor([[0.1, 0.5, 0.6], [0.8, 0.0, 0.4]], dtype=torch.float64, requires_grad=True)
    config = ObjectiveConfig(name="tv", credit="e2e_tv")

    def loss(tv: Tensor) -> Tensor:
        total, weight = credited(Rounds(tv, 1 - tv.detach(), WHOLE, WHOLE), config)
        return total / weight

    expected = [1 - (0.9 + 0.9 * 0.5 + 0.9 * 0.5 * 0.4) / 3, 1 - (0.2 + 0.2 + 0.2 * 0.6) / 3]
    assert float(loss(tv).detach()) == pytest.approx(sum(expected) / 2)
    assert torch.autograd.gradcheck(loss, (tv,))


def test_e2e_tv_of_a_cut_round_is_that_of_the_shorter_one() -> None:
    valid = torch.tensor([[True, True, False]])
    tv = torch.tensor([[0.1, 0.5, 0.0]])
    total, weight = credited(Rounds(tv, 1 - tv, valid, valid), ObjectiveConfig(name="tv", credit="e2e_tv"))
    assert float(total / weight) == pytest.approx(1 - (0.9 + 0.45) / 2)


def test_sums_are_in_the_precision_of_the_loss() -> None:
    """Weights are made as bool or float32."""
    loss = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    whole = torch.ones(1, 2, dtype=torch.bool)
    for config in (ObjectiveConfig(credit="dpace"), ObjectiveConfig(name="tv", credit="e2e_tv")):
        total, weight = credited(Rounds(loss, torch.ones(1, 2), whole, whole), config)
        assert total.dtype == weight.dtype == torch.float64


def test_e2e_tv_ends_a_round_at_a_slot_that_is_missing() -> None:
    """What stands behind the hole is drafted by nobody: neither its loss nor its weight counts."""
    valid = torch.tensor([[True, False, True], [True, True, True]])
    tv = torch.tensor([[0.1, 0.0, 0.2], [0.3, 0.0, 0.5]])
    total, weight = credited(Rounds(tv, 1 - tv, valid, valid), ObjectiveConfig(name="tv", credit="e2e_tv"))
    assert float(weight) == 1 + 3
    assert float(total) == pytest.approx(0.1 + 0.3 + 0.3 + (1 - 0.7 * 0.5))


def test_tokens_behind_a_missing_slot_earn_nothing_for_those_before_it() -> None:
    """alpha of a slot without a record is 0 in training; here it is 1, so that only `valid` can tell."""
    valid = torch.tensor([[True, False, True]])
    given = Rounds(torch.ones(1, 3), torch.tensor([[0.5, 1.0, 1.0]]), valid, valid)
    assert dpace(given, 1.0).tolist() == [[0.75, 0.0, 0.0]]
    assert first_failure(given, 1.0)[0, [0, 2]].tolist() == [1.0, 0.0]


def test_e2e_tv_asks_for_tv() -> None:
    with pytest.raises(ConfigError, match="objective=forward_kl is not a TV"):
        ObjectiveConfig(name="forward_kl", credit="e2e_tv")
