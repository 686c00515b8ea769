"""What the loss module adds up, for families that unroll once and for those that unroll several steps."""

from collections.abc import Iterator

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
    assert float(loss.detach()) == pytest.approx(sums.loss, rel=1e-6)
    assert sums.loss_count == 11
    assert sums.alpha_count == 11 + 9
    assert sums.tau_count == 9 - 1  # both steps valid: the second's last slot of a document has no valid first


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
