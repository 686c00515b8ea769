"""What the loss module adds up, for families that unroll once and for those that unroll several steps."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from decode.acceptance import overlap
from decode.drafters.base import Batch, Step
from decode.drafters.lm import LMDraft
from distill.config import ObjectiveConfig
from distill.distribution import Dense
from tests.tiny import tiny_llama
from train.live import LiveTarget
from train.loss import DraftLoss
from train.sums import Sums


def packed_batch() -> Batch:
    torch.manual_seed(0)
    document = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, -1, -1]])
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 4, 5, 0, 0]])
    return Batch(torch.randint(0, 64, (2, 8)), positions, document, document >= 0)


def test_sums_are_those_of_the_plain_formulas() -> None:
    batch, target, draft = packed_batch(), tiny_llama(seed=1), tiny_llama(seed=2)
    batch = LiveTarget(target)(batch)
    loss, values = DraftLoss(LMDraft(draft), ObjectiveConfig(chunk_rows=3), window=2)(batch)
    log_p, log_q = (_log_probs(model, batch) for model in (target, draft))
    rows = batch.next_token_rows()
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)[rows].sum()
    alpha = overlap(log_p, log_q)
    sums = Sums.from_tensor(values)
    torch.testing.assert_close(loss, kl, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.tensor(sums.alpha), alpha[rows].sum(), rtol=1e-4, atol=1e-4)
    assert (sums.loss_count, sums.alpha_count, sums.tokens) == (11, 11, 14)
    pairs = [(0, 0), (0, 1), (0, 2), (0, 5), (1, 0), (1, 1), (1, 2), (1, 3)]
    tau = sum(1 + alpha[b, t] + alpha[b, t] * alpha[b, t + 1] for b, t in pairs)
    assert sums.tau_count == len(pairs)
    torch.testing.assert_close(torch.tensor(sums.tau), tau, rtol=1e-4, atol=1e-4)


def test_text_alone_has_no_acceptance() -> None:
    batch = packed_batch()
    module = DraftLoss(LMDraft(tiny_llama()), ObjectiveConfig(name="cross_entropy"), window=2)
    means = Sums.from_tensor(module(batch)[1]).means()
    assert means["loss"] is not None
    assert means["alpha"] is None
    assert means["tau"] is None


class TwoSteps(nn.Module):
    """A family that drafts two tokens from one state."""

    def __init__(self) -> None:
        super().__init__()
        self.draft = LMDraft(tiny_llama(seed=2))

    def unroll(self, batch: Batch) -> Iterator[Step]:
        (step,) = self.draft.unroll(batch)
        yield step
        second = torch.zeros_like(step.valid)
        second[:, :-1] = step.valid[:, 1:]
        yield Step(step.hidden, step.head, step.target_rows.roll(-1, 1), second)


def test_steps_of_a_family_are_the_tokens_of_a_round() -> None:
    batch = packed_batch()
    batch = LiveTarget(tiny_llama(seed=1))(batch)
    module = DraftLoss(TwoSteps(), ObjectiveConfig(), window=4)
    loss, values = module(batch)
    sums = Sums.from_tensor(values)
    assert sums.loss_count == sums.alpha_count == 11 + 9
    assert float(loss.detach()) == pytest.approx(11 * sums.loss / 20, rel=1e-6)
    assert sums.tau_count == 9 - 1  # both steps valid: the second's last slot of a document has no valid first


def alphas_and_losses(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """(N, 2) alphas, losses and valid slots of both steps of `TwoSteps`, from whole logits."""
    target, draft = tiny_llama(seed=1), tiny_llama(seed=2)
    log_p, log_q = (_log_probs(model, batch) for model in (target, draft))
    ahead = log_p.roll(-1, 1)
    losses = [(p.exp() * (p - log_q)).sum(-1) for p in (log_p, ahead)]
    alphas = [overlap(p, log_q) for p in (log_p, ahead)]
    first = batch.next_token_rows()
    second = torch.zeros_like(first)
    second[:, :-1] = first[:, 1:]
    return tuple(torch.stack(pair, -1).flatten(0, 1) for pair in (alphas, losses, [first, second]))  # type: ignore


@pytest.mark.parametrize("credit", ["none", "decay", "dpace", "first_failure"])
def test_credit_weighs_the_steps_of_a_round(credit: str) -> None:
    """The loss is the weighted mean over slots, times the batch's learned tokens (11)."""
    batch = LiveTarget(tiny_llama(seed=1))(packed_batch())
    loss, _ = DraftLoss(TwoSteps(), ObjectiveConfig(credit=credit, decay=0.5), None)(batch)  # type: ignore[arg-type]
    alpha, losses, valid = alphas_and_losses(batch)
    chances = (1 + alpha) / 2 * valid
    whole = chances[:, 0] * chances[:, 1]
    weights = {
        "none": torch.ones_like(alpha),
        "decay": torch.tensor([1.0, 0.5]).expand_as(alpha),
        "dpace": torch.stack([chances[:, 0] + whole, whole], -1),
        "first_failure": torch.stack([torch.ones_like(whole), alpha[:, 0] * valid[:, 0]], -1),
    }[credit] * valid
    assert float(loss.detach()) == pytest.approx(float(11 * (weights * losses).sum() / weights.sum()), rel=1e-4)


def test_credit_of_a_draft_model_is_over_windows() -> None:
    batch = LiveTarget(tiny_llama(seed=1))(packed_batch())
    config = ObjectiveConfig(name="tv", credit="e2e_tv")
    loss, values = DraftLoss(LMDraft(tiny_llama(seed=2)), config, window=2)(batch)
    alpha = alphas_and_losses(batch)[0][:, 0].view(2, 8)
    pairs = [(0, 0), (0, 1), (0, 2), (0, 5), (1, 0), (1, 1), (1, 2), (1, 3)]
    lost = [1 - (alpha[b, t] + alpha[b, t] * alpha[b, t + 1]) / 2 for b, t in pairs]
    assert float(loss.detach()) == pytest.approx(float(11 * torch.stack(lost).mean()), rel=1e-4)
    sums = Sums.from_tensor(values)
    assert sums.tau / sums.tau_count == pytest.approx(1 + 2 * (1 - sums.loss / sums.loss_count), rel=1e-4)


class Confident(TwoSteps):
    """It says how likely its tokens are to be accepted: always the same."""

    def __init__(self, logit: float) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.tensor(logit))

    def unroll(self, batch: Batch) -> Iterator[Step]:
        for step in super().unroll(batch):
            yield replace(step, confidence=self.logit.expand(step.valid.shape))


def test_predicted_acceptance_is_fitted_to_the_true_one() -> None:
    batch = LiveTarget(tiny_llama(seed=1))(packed_batch())
    alpha, _, valid = alphas_and_losses(batch)
    alpha = alpha[valid]
    chance = torch.tensor(0.3).sigmoid()
    expected = -(alpha * chance.log() + (1 - alpha) * (1 - chance).log()).mean()
    module = DraftLoss(Confident(0.3), ObjectiveConfig(confidence_weight=2.0), None)
    loss, values = module(batch)
    plain, _ = DraftLoss(TwoSteps(), ObjectiveConfig(), None)(batch)
    means = Sums.from_tensor(values).means()
    assert means["confidence_loss"] == pytest.approx(float(expected), rel=1e-4)
    assert float((loss - plain).detach()) == pytest.approx(11 * 2 * float(expected), rel=1e-3)
    assert means["loss"] == pytest.approx(float(plain.detach()) / 11, rel=1e-4)  # the objective alone
    loss.backward()
    assert isinstance(module.draft, Confident)
    assert module.draft.logit.grad is not None
    assert float(module.draft.logit.grad) == pytest.approx(22 * float(chance - alpha.mean()), rel=1e-3)


def test_mixed_precision_of_the_draft_leaves_p_alone() -> None:
    batch = packed_batch()
    rows, numbers = LiveTarget(tiny_llama(seed=1))(batch).target, torch.arange(6)
    assert rows is not None
    with torch.autocast("cpu", torch.bfloat16):
        inside = rows.chunk(numbers)
    outside = rows.chunk(numbers)
    assert isinstance(inside, Dense)
    assert isinstance(outside, Dense)
    assert torch.equal(inside.log_p, outside.log_p)


def _log_probs(model: nn.Module, batch: Batch) -> Tensor:
    (step,) = LMDraft(model).unroll(batch)  # type: ignore[arg-type]
    return step.head(step.hidden).detach().log_softmax(-1)
