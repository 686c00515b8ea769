"""Objectives and credits against formulas written out by hand, and the chunked evaluation against the plain one."""

import math
import re
from collections import defaultdict
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.common.compose import compose
from decode.common.errors import ConfigError
from decode.common.typed_config import build
from decode.drafters.base import Batch, Step
from distill.objectives.config import ObjectiveConfig
from distill.objectives.credits import (
    Rounds,
    chances_begun,
    constant_decay,
    credited,
    dpace,
    first_failure,
    none,
    on_policy,
)
from distill.objectives.lesson import Lesson
from distill.objectives.objective import TERMS, Objective, build_objective, lk_weights, warm_up_of
from distill.objectives.row_losses import acceptance, acceptance_of, forward_kl, tv
from distill.objectives.scoring import Scores, score
from distill.objectives.target_distribution import Dense, FullRows, Sparse, SparseRows
from train.config import TrainConfig

R, V = 5, 7


@pytest.fixture
def distributions() -> tuple[Tensor, Tensor, Tensor]:
    """(draft logits, log p, next ids) in fp64."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(R, V, generator=generator, dtype=torch.float64)
    log_p = (2 * torch.randn(R, V, generator=generator, dtype=torch.float64)).log_softmax(-1)
    return logits.requires_grad_(), log_p, torch.randint(V, (R,), generator=generator)


def values(name: str, p: Tensor, q: Tensor, next_ids: Tensor) -> Tensor:
    """Each loss as its definition says, row by row."""
    m = 0.3 * p + 0.7 * q
    return {
        "cross_entropy": -q[torch.arange(R), next_ids].log(),
        "forward_kl": (p * (p / q).log()).sum(-1),
        "tv": (p - q).abs().sum(-1) / 2,
        "neg_log_alpha": -(1 - (p - q).abs().sum(-1) / 2).log(),
        "reverse_kl": (q * (q / p).log()).sum(-1),
        "jsd": 0.3 * (p * (p / m).log()).sum(-1) + 0.7 * (q * (q / m).log()).sum(-1),
    }[name]


@pytest.mark.parametrize("name", list(TERMS))
def test_dense_losses_equal_their_definitions(name: str, distributions: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, log_p, next_ids = distributions
    (term,) = build_objective(ObjectiveConfig(name=name, beta=0.3)).terms  # type: ignore[arg-type]
    loss = term.fn(logits.log_softmax(-1), Dense(log_p), next_ids)
    p, q = log_p.exp(), logits.softmax(-1)
    assert torch.allclose(loss, values(name, p, q, next_ids), atol=1e-12)
    assert torch.allclose(acceptance(q.log(), Dense(log_p)), torch.minimum(p, q).sum(-1), atol=1e-12)


@pytest.mark.parametrize("name", list(TERMS))
def test_gradients_equal_finite_differences(name: str, distributions: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, log_p, next_ids = distributions
    fn = TERMS[name].fn
    assert torch.autograd.gradcheck(lambda z: fn(z.log_softmax(-1), Dense(log_p), next_ids), (logits,))


def test_sparse_forward_kl_pulls_towards_the_estimate(distributions: tuple[Tensor, Tensor, Tensor]) -> None:
    """d/dz_j = (sum_i p_hat_i) q_j - p_hat_j, with a token that stands twice."""
    logits, log_p, next_ids = distributions
    ids = torch.tensor([[0, 3, 5, 5]]).expand(R, -1)
    weight = torch.tensor([[0.5, 0.2, 0.1, 0.1]], dtype=torch.float64).expand(R, -1)
    loss = forward_kl(logits.log_softmax(-1), Sparse(ids, log_p.gather(-1, ids), weight), next_ids)
    loss.sum().backward()
    estimate = torch.zeros(R, V, dtype=torch.float64).scatter_add_(-1, ids, weight)
    assert logits.grad is not None
    assert torch.allclose(logits.grad, 0.9 * logits.detach().softmax(-1) - estimate, atol=1e-12)


def test_sparse_tv_gradient_is_that_of_the_acceptance_estimate(distributions: tuple[Tensor, Tensor, Tensor]) -> None:
    """d/dz_j of -alpha_hat = -(w_j - q_j sum w) with w_i = p_hat_i / p_i * q_i where q_i <= p_i."""
    logits, log_p, next_ids = distributions
    ids = torch.tensor([[0, 3, 5]]).expand(R, -1)
    weight = torch.tensor([[0.5, 0.2, 0.1]], dtype=torch.float64).expand(R, -1)
    p_kept = log_p.gather(-1, ids)
    loss = tv(logits.log_softmax(-1), Sparse(ids, p_kept, weight), next_ids)
    loss.sum().backward()
    q = logits.detach().softmax(-1)
    q_kept = q.gather(-1, ids)
    w = weight / p_kept.exp() * q_kept * (q_kept <= p_kept.exp())
    full = torch.zeros(R, V, dtype=torch.float64).scatter_add_(-1, ids, w)
    assert logits.grad is not None
    assert torch.allclose(logits.grad, -(full - q * w.sum(-1, keepdim=True)), atol=1e-12)


def test_sparse_losses_are_those_of_each_row() -> None:
    """p keeps 0.5 of token 0 and 0.2 of token 2; q is 1/4 everywhere in the first row, and p itself in the second."""
    p = torch.tensor([[0.5, 0.2], [0.5, 0.2]])
    distribution = Sparse(torch.tensor([[0, 2], [0, 2]]), p.log(), p)
    log_q = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.5, 0.1, 0.2, 0.2]]).log()
    nothing = torch.zeros(2, dtype=torch.long)
    kl = 0.5 * math.log(2) + 0.2 * math.log(0.8)
    assert forward_kl(log_q, distribution, nothing).tolist() == pytest.approx([kl, 0.0], abs=1e-6)
    assert acceptance(log_q, distribution).tolist() == pytest.approx([0.25 + 0.2, 0.7], abs=1e-6)
    assert tv(log_q, distribution, nothing).tolist() == pytest.approx([0.55, 0.3], abs=1e-6)


def test_zero_probabilities_give_no_nan() -> None:
    log_p = torch.tensor([[0.0, float("-inf"), float("-inf")]])
    logits = torch.tensor([[1.0, -90.0, 0.5]], requires_grad=True)
    for name, term in TERMS.items():
        loss = term.fn(logits.log_softmax(-1), Dense(log_p), torch.zeros(1, dtype=torch.long))
        (gradient,) = torch.autograd.grad(loss.sum(), logits)
        assert torch.isfinite(loss).all(), name
        assert torch.isfinite(gradient).all(), name


def make_step(batch_rows: int = 3, width: int = 6) -> tuple[Step, Batch, Tensor]:
    """A step over random hidden states with some slots masked, dense p stored for every row, and the head's weight."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(batch_rows, width, 4, generator=generator).requires_grad_()
    weight = torch.randn(V, 4, generator=generator).requires_grad_()
    ids = torch.randint(V, (batch_rows, width), generator=generator)
    mask = torch.rand(batch_rows, width, generator=generator) > 0.3
    log_p = torch.randn(batch_rows * width, V, generator=generator).log_softmax(-1)
    rows = torch.arange(batch_rows * width)
    positions = torch.arange(width).expand(batch_rows, -1)
    batch = Batch(ids, positions, torch.zeros_like(ids), mask, target=FullRows(log_p, rows))
    step = Step(hidden, lambda h: h @ weight.T, rows.view(batch_rows, width), batch.next_token_rows())
    return step, batch, weight


def config(name: str, **fields: Any) -> ObjectiveConfig:
    return ObjectiveConfig(name=name, **fields)  # type: ignore[arg-type]


def scored(step: Step, batch: Batch, name: str, chunk_rows: int) -> Scores:
    (scores,) = score([step], batch, build_objective(config(name)), chunk_rows)
    return scores


@pytest.mark.parametrize("name", [*TERMS, "lk_hybrid", "mixture"])
@pytest.mark.parametrize("chunk_rows", [1, 4, 100])
def test_chunked_equals_plain(name: str, chunk_rows: int) -> None:
    step, batch, weight = make_step()
    objective = build_objective(config(name))
    scores = scored(step, batch, name, chunk_rows)
    gradients = torch.autograd.grad(scores.loss.sum(), [step.hidden, weight])
    logits = step.head(step.hidden).flatten(0, 1)[:-1]
    valid = step.valid.flatten()[:-1]
    assert batch.target is not None
    distribution = batch.target.chunk(torch.arange(len(logits)))
    log_q = logits.log_softmax(-1)
    loss, accepted = objective.loss(log_q, Lesson.on(None, distribution, batch.ids.flatten()[1:]))
    assert accepted is not None
    plain = loss[valid].sum()
    assert torch.allclose(scores.loss.flatten()[:-1][valid], loss[valid], atol=1e-5)
    for ours, theirs in zip(gradients, torch.autograd.grad(plain, [step.hidden, weight]), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert scores.alpha is not None
    assert not scores.alpha.requires_grad
    assert scores.greedy is not None
    assert torch.allclose(scores.alpha.flatten()[:-1][valid], accepted[valid, 0], atol=1e-6)
    assert torch.equal(scores.greedy.flatten()[:-1][valid], accepted[valid, 1])
    assert torch.equal(scores.valid, step.valid)
    assert torch.equal(scores.learned, step.valid)
    assert not any(rows[~step.valid].any() for rows in (scores.alpha, scores.loss))


def test_chunked_never_makes_more_rows_of_logits_than_asked() -> None:
    step, batch, _ = make_step()
    head, seen = step.head, []
    step.head = lambda hidden: seen.append(len(hidden)) or head(hidden)
    scored(step, batch, "forward_kl", 4).loss.sum().backward()
    assert max(seen) <= 4
    assert len(seen) == 5 + 4  # 18 rows
    assert sum(seen) > int(step.valid.sum())  # all chunks but the last are made again


def test_a_batch_without_anything_to_learn_costs_nothing() -> None:
    step, batch, weight = make_step()
    step.valid = torch.zeros_like(step.valid)
    scores = scored(step, batch, "forward_kl", 4)
    (gradient,) = torch.autograd.grad(scores.loss.sum(), [step.hidden])
    assert scores.alpha is not None
    assert not any(rows.any() for rows in (scores.loss, scores.alpha, scores.valid))
    assert not gradient.any()


def test_text_alone_gives_cross_entropy_and_no_acceptance() -> None:
    step, batch, _ = make_step()
    batch.target = None
    scores = scored(step, batch, "cross_entropy", 4)
    assert scores.alpha is None
    q = step.head(step.hidden).detach().softmax(-1)
    for row, column in step.valid.nonzero().tolist():
        said = -math.log(q[row, column, batch.ids[row, column + 1]])
        assert float(scores.loss[row, column].detach()) == pytest.approx(said, abs=1e-5)


def test_losses_are_made_in_float32_from_what_a_head_in_bfloat16_gives() -> None:
    """log q in bfloat16 has errors of a per cent of p."""
    step, batch, weight = make_step()
    step.head = lambda hidden: (hidden @ weight.T).bfloat16()
    found = scored(step, batch, "cross_entropy", 4).loss.detach()
    logits = (step.hidden @ weight.T).bfloat16().double().detach()
    for row, column in step.valid.nonzero().tolist():
        said = -float(logits[row, column].log_softmax(-1)[batch.ids[row, column + 1]])
        assert float(found[row, column]) == pytest.approx(said, abs=1e-5)


def test_logits_of_the_last_chunk_stay_and_those_of_the_others_are_made_again() -> None:
    step, batch, _ = make_step()  # 18 slots: chunks of 6 end with the slots, and three calls serve them
    step.valid = torch.ones_like(step.valid).index_fill(1, torch.tensor([5]), False)
    head, seen = step.head, []
    step.head = lambda hidden: seen.append(len(hidden)) or head(hidden)
    loss = scored(step, batch, "forward_kl", 6).loss.sum()
    assert seen == [5, 5, 5]
    loss.backward()
    assert seen[3:] == [5, 5]


@pytest.mark.parametrize("name", [*TERMS, "lk_hybrid", "mixture"])
@pytest.mark.parametrize("chunk_rows", [4, 100])
@pytest.mark.parametrize("learns", [False, True])
def test_a_head_is_run_once_and_p_made_once_for_all_steps(name: str, chunk_rows: int, learns: bool) -> None:
    """The same losses and gradients as where all is made again: of a frozen head for what slots count, whatever it is;
    of one that learns where all count alike."""
    step, batch, weight = make_step()
    later = replace(step, hidden=(2 * step.hidden).detach().requires_grad_(), target_rows=step.target_rows.roll(-1, 1))
    later.valid = step.valid.clone()
    later.valid[:, -2:] = False
    counts = torch.rand(2, *step.valid.shape, generator=torch.Generator().manual_seed(3))
    counts = torch.full_like(counts, 0.3) if learns else counts
    assert isinstance(batch.target, FullRows)
    found = {}
    for at_once in (False, True):
        head, target = CountedHead(weight, learns), CountedRows(batch.target)
        learned = [head.weight] if learns else []
        steps = [replace(one, head=head, head_weights=tuple(learned) if at_once else None) for one in (step, later)]
        scores = score(steps, replace(batch, target=target), build_objective(config(name)), chunk_rows, learns)
        total = torch.stack([(each * one.loss).sum() for each, one in zip(counts, scores, strict=True)]).sum()
        gradients = torch.autograd.grad(total, [step.hidden, later.hidden, *learned])
        values = ([one.loss for one in scores], [one.alpha for one in scores], gradients)
        found[at_once] = (*values, head.rows, target.rows)
    for ours, theirs in zip(found[True][:3], found[False][:3], strict=True):
        torch.testing.assert_close(list(ours), list(theirs), rtol=1e-5, atol=1e-6)
    slots = int(step.valid.sum() + later.valid.sum())
    assert found[True][3] == slots
    if name != "cross_entropy":
        rows = set(step.target_rows[step.valid].tolist()) | set(later.target_rows[later.valid].tolist())
        assert found[True][4] == len(rows) < slots <= found[False][4]


class CountedHead:
    """Notes how many rows of logits it makes."""

    def __init__(self, weight: Tensor, learns: bool) -> None:
        self.weight, self.rows = weight.detach().requires_grad_(learns), 0

    def __call__(self, hidden: Tensor) -> Tensor:
        self.rows += len(hidden)
        return hidden @ self.weight.T


class CountedRows(FullRows):
    """Notes how many rows of p are made."""

    def __init__(self, source: FullRows) -> None:
        super().__init__(source.log_p, source.row_index)
        self.rows = 0

    def _read(self, stored: Tensor, device: torch.device) -> Dense:
        self.rows += len(stored)
        found = super()._read(stored, device)
        assert isinstance(found, Dense)
        return found


def test_a_head_learns_by_its_own_gradients_where_slots_count_differently() -> None:
    """What is `alike` cannot be known before the losses are, so that a plain caller has each slot's own."""
    step, batch, weight = make_step()
    step.head_weights = (weight,)
    counts = torch.rand(step.valid.shape, generator=torch.Generator().manual_seed(3))
    objective = build_objective(config("forward_kl"))
    (scores,) = score([step], batch, objective, 4)
    wanted = torch.autograd.grad((counts * scores.loss).sum(), weight)
    step.head_weights = None
    (scores,) = score([step], batch, objective, 4)
    torch.testing.assert_close(torch.autograd.grad((counts * scores.loss).sum(), weight), wanted)


@pytest.mark.parametrize("name", [*TERMS, "lk_hybrid", "mixture"])
def test_a_loss_inside_autocast_is_that_outside(name: str) -> None:
    """Autocast makes some sums in bfloat16: a KL of 0.06 became one of sixteenths."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 500, generator=generator)
    log_p = (logits + 0.1 * torch.randn(3, 500, generator=generator)).log_softmax(-1)
    lesson = Lesson.on(None, Dense(log_p), torch.tensor([1, 2, 3]))
    plain = build_objective(config(name)).loss(logits.log_softmax(-1), lesson)
    with torch.autocast("cpu", torch.bfloat16):
        inside = build_objective(config(name)).loss(logits.log_softmax(-1), lesson)
    torch.testing.assert_close(inside, plain, rtol=0, atol=0)


def test_validation_makes_no_gradient() -> None:
    step, batch, _ = make_step()
    step.head_weights = ()
    with torch.no_grad():
        scores = scored(step, batch, "forward_kl", 4)
    assert not scores.loss.requires_grad
    assert scores.loss.any()


def test_acceptance_losses_by_hand() -> None:
    """p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2): alpha = 3/4, TV = 1/4, KL = log(2) / 4."""
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.25, 0.5]])
    lesson = Lesson.on(None, Dense(p.log()), torch.tensor([2]))

    def said(name: str, **fields: Any) -> float:
        return float(build_objective(config(name, **fields)).loss(q.log(), lesson)[0])

    share, kl = math.exp(-2 * 0.75), 0.25 * math.log(2)
    assert said("neg_log_alpha") == pytest.approx(-math.log(0.75))
    assert said("lk_hybrid", eta=2.0) == pytest.approx(share * kl + (1 - share) * 0.25)
    assert said("mixture") == pytest.approx(0.1 * math.log(2) + 0.9 * 0.25)


def test_neg_log_alpha_of_a_sparse_p() -> None:
    """-log of the same estimate as acceptance, and TV's gradient divided by it."""
    sparse = Sparse(torch.tensor([[0, 2, 0]]), torch.tensor([[0.5, 0.25, 1.0]]).log(), torch.tensor([[0.5, 0.5, 0.0]]))
    logits = torch.tensor([[0.1, 0.7, -0.4]], requires_grad=True)
    alpha = acceptance(logits.log_softmax(-1), sparse)
    loss = TERMS["neg_log_alpha"].fn(logits.log_softmax(-1), sparse, torch.tensor([0]))
    torch.testing.assert_close(loss, -alpha.log())
    (ours,) = torch.autograd.grad(loss.sum(), logits)
    tv_loss = TERMS["tv"].fn(logits.log_softmax(-1), sparse, torch.tensor([0]))
    (theirs,) = torch.autograd.grad(tv_loss.sum(), logits)
    torch.testing.assert_close(ours, theirs / alpha.detach())


def test_lk_leans_on_kl_where_little_is_accepted() -> None:
    kl, tv = lk_weights(torch.tensor([0.0, 0.5, 1.2]), eta=3.0)
    torch.testing.assert_close(kl, torch.tensor([1.0, math.exp(-1.5), math.exp(-3.0)]))
    torch.testing.assert_close(kl + tv, torch.ones(3))


def test_a_mixture_needs_what_its_terms_need() -> None:
    with pytest.raises(ConfigError, match=r"0.5 tv \+ 0.5 jsd needs p on the draft's support"):
        Objective("0.5 tv + 0.5 jsd", (TERMS["tv"], TERMS["jsd"]), lambda alpha: (0.5, 0.5)).check_source(False)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"name": "tv", "terms": {"tv": 1.0}}, "they are the terms of objective=mixture"),
        ({"name": "mixture", "terms": {"tv": 1.0, "forward_kl": -0.5}}, "not above 0, {'forward_kl': -0.5}"),
        ({"warm_up": "forward_kl", "switch_at": 1.0}, "an acceptance that a draft never crosses"),
        ({"name": "tv", "credit": "e2e_tv", "warm_up": "forward_kl"}, "as a run of its own"),
    ],
)
def test_what_no_objective_can_be_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        ObjectiveConfig(**fields)


def test_a_slot_without_a_record_is_not_valid() -> None:
    """Heads look further than one token, and so at rows that nobody recorded."""
    step, batch, _ = make_step()
    index = torch.arange(18).where(torch.arange(18) != 1, -1)
    assert batch.target is not None
    batch.target = FullRows(batch.target.log_p, index)
    step.valid = torch.ones_like(step.valid)
    step.valid[:, -1] = False
    step.target_rows = step.target_rows.where(step.valid, 1000)  # rows of slots that do not count lie anywhere
    scores = scored(step, batch, "forward_kl", 4)
    assert not scores.valid[0, 1]
    assert int(scores.valid.sum()) == int(step.valid.sum()) - 1


@pytest.mark.parametrize(("name", "sparse", "told"), [("jsd", True, "sparse"), ("forward_kl", None, "none is at hand")])
def test_an_objective_says_what_it_lacks(name: str, sparse: bool | None, told: str) -> None:
    step, batch, _ = make_step()
    ids = torch.zeros(18, 1, dtype=torch.long)
    one = torch.ones(18, 1)
    batch.target = SparseRows(ids, one.log(), one, torch.arange(18)) if sparse else None
    with pytest.raises(ConfigError, match=told):
        scored(step, batch, name, 4)


def test_settings_of_a_term_hold_wherever_it_stands() -> None:
    """In a mixture and in a warm-up too."""
    lesson = Lesson.on(None, Dense(torch.tensor([[0.5, 0.25, 0.25]]).log()), torch.tensor([2]))
    log_q = torch.tensor([[0.25, 0.25, 0.5]]).log()
    alone = build_objective(config("jsd", beta=0.9)).loss(log_q, lesson)[0]
    mixed = build_objective(config("mixture", terms={"jsd": 2.0}, beta=0.9)).loss(log_q, lesson)[0]
    warm = warm_up_of(config("tv", warm_up="jsd", beta=0.9))
    assert warm is not None
    torch.testing.assert_close(mixed, 2 * alone)
    torch.testing.assert_close(warm.loss(log_q, lesson)[0], alone)


def test_a_mixture_on_the_command_line_is_what_is_said_and_nothing_else() -> None:
    """Not merged with the weights of the YAML file."""
    overrides = ["output_dir=x", "records=r", "target.path=t", "objective=mixture"]
    found = compose("train", TrainConfig, [*overrides, "objective.terms={forward_kl: 0.5, tv: 0.5}"])
    assert found is not None
    assert found["objective"]["terms"] == {"forward_kl": 0.5, "tv": 0.5}
    default = compose("train", TrainConfig, overrides)
    assert default is not None
    assert build(TrainConfig, default).objective.terms == {"cross_entropy": 0.1, "tv": 0.9}


def test_a_row_without_mass_on_the_draft_vocabulary_teaches_no_overlap() -> None:
    """-log of nothing would be 10,000 nats, in every mean that is logged."""
    sparse = Sparse(torch.tensor([[0, 2], [5, 6]]), torch.full((2, 2), 0.5).log(), torch.full((2, 2), 0.5))
    lesson = Lesson.on(torch.tensor([0, 1, 2]), sparse, torch.tensor([0, 5]))
    objective = build_objective(config("neg_log_alpha"))
    loss, _ = objective.loss(torch.full((2, 3), 1 / 3).log(), lesson)
    assert objective.learned(lesson).tolist() == [True, False]
    assert float(loss[1]) == 0.0 < float(loss[0]) < 2.0


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


VOCABULARY, DEPTH, LENGTH = 3, 2, 4
Prefix = tuple[int, ...]


def tables(seed: int) -> dict[Prefix, Tensor]:
    """A distribution of the next token after every beginning of a text."""
    generator = torch.Generator().manual_seed(seed)
    every = [prefix for length in range(LENGTH) for prefix in product(range(VOCABULARY), repeat=length)]
    return {
        prefix: (1.5 * torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)).softmax(-1)
        for prefix in every
    }


def tried_by_decoding(p: dict[Prefix, Tensor], q: dict[Prefix, Tensor]) -> dict[tuple[Prefix, int], float]:
    """(text before a token, its place in a round) -> the chance that decoding writes that text and drafts the token
    there, over all that drafts, verdicts and corrections may be."""
    tried: dict[tuple[Prefix, int], float] = defaultdict(float)

    def begin(text: Prefix, chance: float) -> None:
        accepted = [(text, chance)]
        for place in range(DEPTH):
            further = []
            for before, weight in accepted:
                if len(before) == LENGTH:
                    continue
                tried[before, place] += weight
                kept = torch.minimum(p[before], q[before])
                further += [((*before, token), weight * float(kept[token])) for token in range(VOCABULARY)]
                for token, left in enumerate((p[before] - kept).tolist()):
                    begin((*before, token), weight * left)  # the correction ends the round
            accepted = further
        for before, weight in accepted:
            for token in range(VOCABULARY) if len(before) < LENGTH else ():
                begin((*before, token), weight * float(p[before][token]))

    begin((), 1.0)
    return tried


def test_on_policy_counts_a_token_as_often_as_decoding_tries_it() -> None:
    """Exactly, for every text of four tokens: rounds of two, verified by rejection."""
    p, q = tables(1), tables(2)
    tried, seen = tried_by_decoding(p, q), 0
    for text in product(range(VOCABULARY), repeat=LENGTH):
        before = [text[:place] for place in range(LENGTH)]
        rows = [(p[one].log()[None], q[one].log()[None], torch.tensor([text[len(one)]])) for one in before]
        here = torch.cat([acceptance_of(log_q, Dense(log_p), token) for log_p, log_q, token in rows])
        each = [1.0, *(float(p[one][text[len(one)]]) for one in before[:-1])]
        written = torch.tensor(each, dtype=torch.float64).cumprod(0)
        places = torch.arange(LENGTH)[:, None] + torch.arange(DEPTH)
        valid, chances = places < LENGTH, here[places.clamp(max=LENGTH - 1)]
        begun = chances_begun(chances[None], valid[None])[0]
        weights = on_policy(Rounds(chances, None, valid, valid, chances, begun), 1.0)
        for start, place in valid.nonzero().tolist():
            found = float(written[start + place] * weights[start, place])
            assert found == pytest.approx(tried[text[: start + place], place], rel=1e-12)
            seen += 1
    assert seen == VOCABULARY**LENGTH * 7


def test_a_round_begins_where_a_text_does_and_never_behind_its_end() -> None:
    """Two texts in a row, and padding; nothing of the first reaches the second."""
    valid = torch.tensor([[[True, True], [True, False], [False, False], [True, True], [True, False], [False, False]]])
    here = torch.full((1, 6, 2), 0.5)
    begun = chances_begun(here, valid)
    assert begun.tolist() == [[1.0, 0.5, 0.0, 1.0, 0.5, 0.0]]
    weights = on_policy(Rounds(here[0], None, valid[0], valid[0], here[0], begun[0]), 1.0)
    assert weights.tolist() == [[1.0, 0.5], [0.5, 0.0], [0.0, 0.0], [1.0, 0.5], [0.5, 0.0], [0.0, 0.0]]


def test_the_chance_of_the_texts_own_token_has_alpha_as_its_mean(distributions: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, log_p, _ = distributions
    log_q = logits.detach().log_softmax(-1)
    chances = torch.stack([acceptance_of(log_q, Dense(log_p), torch.full((R,), token)) for token in range(V)], -1)
    assert torch.allclose((log_p.exp() * chances).sum(-1), acceptance(log_q, Dense(log_p)))
    kept = Sparse(torch.tensor([[0, 2]] * R), log_p[:, [0, 2]], torch.tensor([[0.5, 0.0]] * R))
    assert torch.equal(acceptance_of(log_q, kept, torch.zeros(R, dtype=torch.long)), chances[:, 0])
    p, q = log_p.exp(), log_q.exp()
    for unknown in (2, 3):  # of no weight, and not kept: as all tokens but 0 are together
        found = acceptance_of(log_q, kept, torch.full((R,), unknown))
        assert torch.allclose(found, ((1 - q[:, 0]) / (1 - p[:, 0])).clamp(max=1))
    twice = Sparse(torch.tensor([[0, 2, 2]] * R), log_p[:, [0, 2, 2]], torch.tensor([[0.5, 0.2, 0.2]] * R))
    found = acceptance_of(log_q, twice, torch.full((R,), 3))
    assert torch.allclose(found, ((1 - q[:, [0, 2]].sum(-1)) / (1 - p[:, [0, 2]].sum(-1))).clamp(max=1))


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
