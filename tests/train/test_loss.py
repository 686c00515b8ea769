"""What the loss module adds up, for families that unroll once and for those that unroll several steps."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
import torch
from torch import Tensor, nn

from decode.acceptance import overlap
from decode.drafters.base import Batch, Step
from decode.drafters.lm import LMDraft
from distill.objectives.config import ObjectiveConfig
from distill.objectives.scoring import Scores
from distill.objectives.target_distribution import Dense, FullRows
from tests.tiny import tiny_llama
from train.live_target import LiveTarget
from train.loss import DraftLoss, confidence_loss
from train.metric_sums import Sums


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
    agrees = (log_p.argmax(-1) == log_q.argmax(-1)).long()
    assert sums.greedy == int(agrees[rows].sum())
    assert sums.tau_greedy == sum(int(1 + agrees[b, t] + agrees[b, t] * agrees[b, t + 1]) for b, t in pairs)


def test_text_alone_has_no_acceptance() -> None:
    batch = packed_batch()
    module = DraftLoss(LMDraft(tiny_llama()), ObjectiveConfig(name="cross_entropy"), window=2)
    sums = Sums.from_tensor(module(batch)[1])
    means = sums.means()
    assert (sums.loss_count, sums.tokens) == (11, 14)
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


class Table(nn.Module):
    """Drafts every token from the same q, of which `logits` are the logs."""

    def __init__(self, q: list[float], vocab: list[int] | None = None) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(q).log())
        self.vocab = None if vocab is None else torch.tensor(vocab)

    def unroll(self, batch: Batch) -> Iterator[Step]:
        """One step."""
        rows = torch.arange(batch.ids.numel()).view_as(batch.ids)
        hidden, valid = torch.zeros(*batch.ids.shape, 1), batch.next_token_rows()
        yield Step(hidden, lambda states: self.logits.expand(len(states), -1), rows, valid, self.vocab)


def one_row(p: list[list[float]], unknown: int | None = None) -> Batch:
    """Texts of 3 and 4 tokens and one place of padding; `p` in turn is of the rows. The first text's second token
    is a prompt's; of one row p is not recorded where `unknown` says which."""
    document = torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1]])
    learned = torch.tensor([[False, False, True, False, True, True, True, False]])
    stored = torch.arange(8) % len(p)
    if unknown is not None:
        stored[unknown] = -1
    return Batch(
        torch.zeros_like(document), document, document, learned, target=FullRows(torch.tensor(p).log(), stored)
    )


def sums_and_gradient(module: DraftLoss, batch: Batch) -> tuple[float, Sums, list[float]]:
    loss, values = module(batch)
    loss.backward()
    assert isinstance(module.draft, Table)
    assert module.draft.logits.grad is not None
    return float(loss.detach()), Sums.from_tensor(values), module.draft.logits.grad.tolist()


class TableTwice(Table):
    """The same in steps of a head."""

    def unroll(self, batch: Batch) -> Iterator[Step]:
        (step,) = super().unroll(batch)
        yield step
        second = torch.zeros_like(step.valid)
        second[:, :-1] = step.valid[:, 1:] & step.valid[:, :-1]
        yield replace(step, target_rows=step.target_rows.roll(-1, 1), valid=second)


def test_on_policy_of_windows_and_of_steps() -> None:
    """Two texts of two and three learned tokens, each accepted with chance 1/2, in rounds of two: one begins at the
    first token of a text with chance 1, at the second with 1/2, and at the third with 1/4 + 1/2 * 1/2. A round's tokens
    count 1 and 1/2; where a text ends a round has one token."""
    batch = one_row([[0.5, 0.5]])
    batch.loss_mask[0, 1] = True
    config = ObjectiveConfig(name="cross_entropy", credit="on_policy")
    count = (1.5 + 0.5) + (1.5 * (1 + 0.5) + 0.5)
    for family, window in ((Table, 2), (TableTwice, None)):
        loss, sums, _ = sums_and_gradient(DraftLoss(family([0.25, 0.75]), config, window), batch)
        assert sums.loss_count == pytest.approx(count)
        assert loss == pytest.approx(5 * -math.log(0.25))


class TableAtSome(TableTwice):
    """Whose rounds begin at some tokens."""

    def unroll(self, batch: Batch) -> Iterator[Step]:
        return (replace(step, begins_everywhere=False) for step in super().unroll(batch))


def test_rounds_at_some_tokens_count_alike() -> None:
    """Three of two tokens, two of one."""
    batch = one_row([[0.5, 0.5]])
    batch.loss_mask[0, 1] = True
    module = DraftLoss(TableAtSome([0.25, 0.75]), ObjectiveConfig(credit="on_policy"), None)
    assert sums_and_gradient(module, batch)[1].loss_count == pytest.approx(3 * 1.5 + 2)


def test_a_row_by_hand() -> None:
    """p = (3/4, 1/4) and q = (1/2, 1/2): KL is 3/4 log 3/2 + 1/4 log 1/2, alpha 3/4, and a round of two tokens gives
    1 + 3/4 + 9/16. Four tokens are learned, of which three in a row begin two rounds."""
    loss, sums, gradient = sums_and_gradient(
        DraftLoss(Table([0.5, 0.5]), ObjectiveConfig(chunk_rows=3), 2), one_row([[0.75, 0.25]])
    )
    kl = 0.130812
    assert loss == pytest.approx(4 * kl, rel=1e-5)
    have = (sums.loss, sums.loss_count, sums.alpha, sums.alpha_count, sums.tau, sums.tau_count, sums.tokens)
    assert have == pytest.approx((4 * kl, 4, 4 * 0.75, 4, 2 * 2.3125, 2, 7), rel=1e-5)
    assert gradient == pytest.approx([4 * (0.5 - 0.75), 4 * (0.5 - 0.25)])


def test_a_head_of_one_token_has_rounds_of_one() -> None:
    """Four of them, of 1 + 3/4 tokens; no window is laid over its steps."""
    _, sums, _ = sums_and_gradient(DraftLoss(Table([0.5, 0.5]), ObjectiveConfig(), None), one_row([[0.75, 0.25]]))
    assert (sums.tau, sums.tau_count) == (4 * 1.75, 4)


def test_a_token_whose_p_is_not_recorded_ends_the_rounds_around_it() -> None:
    """The middle one of three: no round of two is left. The loss is that of the three others, for four."""
    loss, sums, _ = sums_and_gradient(
        DraftLoss(Table([0.5, 0.5]), ObjectiveConfig(), 2), one_row([[0.75, 0.25]], unknown=4)
    )
    assert (sums.loss_count, sums.alpha_count, sums.tau_count, sums.tau) == (3, 3, 0, 0.0)
    assert loss == pytest.approx(4 * 0.130812, rel=1e-5)


def test_rounds_weigh_a_draft_models_windows_by_credit() -> None:
    """Two windows of two tokens whose second counts half; the token that lies in no window counts nothing."""
    loss, sums, _ = sums_and_gradient(
        DraftLoss(Table([0.5, 0.5]), ObjectiveConfig(credit="decay", decay=0.5), 2), one_row([[0.75, 0.25], [0.5, 0.5]])
    )
    # rows 3, 4, 5 have p = (1/2, 1/2), (3/4, 1/4), (1/2, 1/2), and so the windows (0, kl) and (kl, 0)
    assert (sums.loss, sums.loss_count) == pytest.approx((1.5 * 0.130812, 3.0), rel=1e-5)
    assert loss == pytest.approx(4 * 0.5 * 0.130812, rel=1e-5)


def test_what_a_reduced_vocabulary_hides_counts_in_acceptance_alone() -> None:
    """Tokens 0 and 2 of three: the loss knows p given these; where token 1 is likeliest nothing is learned, and its
    share of p is never accepted."""
    p = [[0.5, 0.25, 0.25], [0.2, 0.6, 0.2]]
    module = DraftLoss(Table([0.5, 0.5], vocab=[0, 2]), ObjectiveConfig(), 2)
    _, sums, _ = sums_and_gradient(module, one_row(p))
    kl = 2 / 3 * math.log(4 / 3) + 1 / 3 * math.log(2 / 3)
    # learned rows 1, 3, 4, 5, of which row 4 alone has the first p: alpha 0.5 + 0.25, else 0.2 + 0.2
    assert (sums.loss, sums.loss_count) == pytest.approx((kl, 1.0), rel=1e-5)
    assert (sums.alpha, sums.alpha_count) == pytest.approx((0.75 + 3 * 0.4, 4.0), rel=1e-5)
    assert (sums.tau, sums.tau_count) == pytest.approx((2 + 0.4 + 0.4 * 0.75 + 0.75 + 0.75 * 0.4, 2.0), rel=1e-5)


def test_padding_alone_is_no_loss_and_no_gradient() -> None:
    """A rank whose rows have run out."""
    batch = one_row([[0.75, 0.25]])
    batch.document.fill_(-1)
    batch.loss_mask.fill_(False)
    for credit in ("none", "dpace"):
        module = DraftLoss(Table([0.5, 0.5]), ObjectiveConfig(credit=credit), 2)  # type: ignore[arg-type]
        loss, sums, gradient = sums_and_gradient(module, batch)
        assert (loss, gradient) == (0.0, [0.0, 0.0])
        assert sums == Sums()


def test_chances_that_were_estimated_above_one_are_one() -> None:
    """As sparse records may give them. With logit 2 and chances 1 and 0: log(1 + exp -2) and log(1 + exp 2); the third
    slot counts for nothing."""
    valid = torch.tensor([[True, True, False]])
    alpha, logits = torch.tensor([[1.5, -0.25, 0.5]]), torch.full((1, 3), 2.0, requires_grad=True)
    step = Step(torch.zeros(1, 3, 1), nn.Identity(), torch.zeros(1, 3, dtype=torch.long), valid, confidence=logits)
    total, count = confidence_loss([step], [Scores(torch.zeros(1, 3), alpha, alpha, alpha, valid, valid)])
    assert (float(total.detach()), count) == (pytest.approx(0.126928 + 2.126928, rel=1e-5), 2)
    total.backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == [pytest.approx([-0.119203, 0.880797, 0.0], rel=1e-5)]


def test_the_confidence_of_a_single_token_counts_whole() -> None:
    """It predicts 1/2, which costs log 2 whatever comes."""
    batch = one_row([[0.75, 0.25]])
    batch.loss_mask[0, 3:] = False
    confident = Table([0.5, 0.5])
    steps = confident.unroll
    confident.unroll = lambda batch: (replace(one, confidence=torch.zeros(1, 8)) for one in steps(batch))
    losses = [
        DraftLoss(confident, ObjectiveConfig(confidence_weight=weight), 2)(batch)[0].item() for weight in (0.0, 1.0)
    ]
    assert losses[1] - losses[0] == pytest.approx(math.log(2))


def test_confidence_that_nothing_can_be_compared_with_is_not_trained() -> None:
    batch = packed_batch()
    plain = DraftLoss(TwoSteps(), ObjectiveConfig(name="cross_entropy"), None)(batch)
    confident = DraftLoss(Confident(0.3), ObjectiveConfig(name="cross_entropy"), None)(batch)
    assert float(confident[0].detach()) == float(plain[0].detach())
    assert Sums.from_tensor(confident[1]).confidence_count == 0


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


ONE = Sums(6.0, 3.0, 2.0, 4.0, 9.0, 2.0, 10.0, 1.5, 6.0, 1.0, 5.0)


def test_each_sum_is_divided_by_its_own_count() -> None:
    means = {"loss": 2.0, "alpha": 0.5, "tau": 4.5, "alpha_greedy": 0.25, "tau_greedy": 2.5, "confidence_loss": 0.25}
    assert ONE.means() == means


def test_what_was_never_counted_has_no_mean() -> None:
    """Rather than 0, which would be a loss to be proud of."""
    assert Sums().tensor().tolist() == [0.0] * 11
    assert set(Sums(tokens=5.0).means().values()) == {None}


def test_the_mean_of_two_parts_is_over_all_that_they_counted() -> None:
    """1 and 3, from one slot and from three, are 2.5; the mean of the means would be 2."""
    both = Sums(loss=1.0, loss_count=1.0) + Sums(loss=9.0, loss_count=3.0)
    assert both.means()["loss"] == 2.5
    assert ONE + ONE == Sums(12.0, 6.0, 4.0, 8.0, 18.0, 4.0, 20.0, 3.0, 12.0, 2.0, 10.0)


def test_counts_travel_exactly_however_large() -> None:
    """A run reads more tokens than float32 can count."""
    many = Sums(tokens=2.0**24 + 1)
    again = Sums.from_tensor(many.tensor())
    assert again == many
    assert json.loads(json.dumps(asdict(again))) == asdict(many)  # as a checkpoint keeps them
    assert ONE.tensor().tolist() == [6.0, 3.0, 2.0, 4.0, 9.0, 2.0, 10.0, 1.5, 6.0, 1.0, 5.0]
    assert ONE.tensor(torch.device("meta")).device.type == "meta"
