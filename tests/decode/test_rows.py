"""Rows of a batch: short, ended or filled again beside others; no text depends on them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from decode import generate
from decode.autotune.budget import Budget
from decode.common.errors import ConfigError
from decode.drafters import head_draft, lm
from decode.drafters.base import Context
from decode.drafters.drafting import DraftRound
from decode.drafters.lm import LMDraft
from decode.forward import runner, target
from decode.loop import Loop
from decode.requests import Request
from decode.rounds.flights import bounds_of
from decode.rounds.rows import RequestState, Rows
from decode.sampling.warp import Sampling
from decode.stats import Round as Counted
from decode.trees.tree import Tree
from decode.trees.tree_plans import Shape, chain, k_ary
from tests.decode.checks import VOCAB, ragged_prompts
from tests.decode.heads import VARIANTS, random_head
from tests.tiers import by_default
from tests.tiny import tiny_llama


def test_waiting_requests_take_the_rows_of_finished_ones_in_order() -> None:
    requests = [RequestState(2, [index, 7], 4) for index in range(5)]
    rows = Rows(requests, 2)
    assert rows.refill() == []
    requests[1].reason = "eos"
    assert rows.refill() == [1]
    assert rows.seated == [0, 2]
    requests[0].reason = requests[2].reason = "length"
    assert rows.refill() == [0, 1]
    assert rows.seated == [3, 4]


def test_the_host_looks_at_all_rows_a_few_times_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each row: of 512 rows that was two thirds of a recording's time."""
    looks, all_rows = [], Rows.current.fget
    assert all_rows is not None

    def noted(rows: Rows) -> list[RequestState]:
        looks.append(rows)
        return all_rows(rows)

    monkeypatch.setattr(Rows, "current", property(noted))
    rows = Rows([RequestState(1, [index], 4) for index in range(512)], 512)
    launched: Any = SimpleNamespace(seated=rows.seated, depth=3)
    assert bounds_of(rows, [launched]) == (2, 5, 2)
    assert len(looks) < 5
    looks.clear()
    Loop(tiny_llama(VOCAB), None, Request([[index % VOCAB] for index in range(64)], 8)).run()
    assert 0 < len(looks) < 8 * 10


@pytest.mark.parametrize("batch_size", by_default(1, [2, 1, 3]))
@pytest.mark.parametrize("drafted", [False, True])
def test_text_does_not_depend_on_how_many_rows_there_are(batch_size: int, drafted: bool) -> None:
    """Requests end at different tokens (each has its own end token), so rows are refilled at different rounds."""
    model = tiny_llama(VOCAB, dtype=torch.float64)
    drafter = LMDraft(tiny_llama(VOCAB, num_layers=1, seed=3, dtype=torch.float64)) if drafted else None
    ids, mask = ragged_prompts(7)
    settings = {"max_new_tokens": 24, "num_draft_tokens": 3, "eos_token_id": list(range(6))}
    whole = generate(model, None, ids, mask, **settings, seed=0)  # type: ignore[arg-type]
    events = []
    out = generate(model, drafter, ids, mask, batch_size=batch_size, observer=events.append, **settings, seed=0)  # type: ignore[arg-type]
    assert torch.equal(out.sequences, whole.sequences)
    assert out.stats.finish_reasons == whole.stats.finish_reasons
    assert len(set(out.lengths.tolist())) > 3
    for row in range(7):
        emitted = [token for event in events if event.row == row for token in event.tokens]
        prompt = int(mask[row].sum())
        assert len(emitted) == int(out.lengths[row]) - prompt


def test_a_long_prompt_is_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No mask is larger than a chunk by the tokens before it, and the text is transformers' own."""
    model = tiny_llama(VOCAB, num_layers=1, max_position_embeddings=8200)
    ids = torch.randint(0, VOCAB, (1, 8000), generator=torch.Generator().manual_seed(0))
    sizes = []
    real = target.layer_masks

    def counted(config, visible, *rest):  # noqa: ANN001, ANN002, ANN202
        sizes.append(visible.numel())
        return real(config, visible, *rest)

    monkeypatch.setattr(target, "layer_masks", counted)
    ours = generate(model, None, ids, max_new_tokens=8, temperature=0, eos_token_id=(), seed=0)
    assert max(sizes) <= runner.PREFILL_CHUNK * 8000
    theirs = model.generate(ids, do_sample=False, max_new_tokens=8)  # type: ignore[operator]
    assert torch.equal(ours.sequences, theirs)


def test_captures_follow_the_weights() -> None:
    """Packed weights are copies: after a training step they would be stale."""
    model = tiny_llama(VOCAB)
    ids, _ = ragged_prompts(1)
    generate(model, None, ids, max_new_tokens=20, temperature=0, eos_token_id=(), seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.5)
    ours = generate(model, None, ids, max_new_tokens=20, temperature=0, eos_token_id=(), seed=0)
    theirs = model.generate(ids, do_sample=False, max_new_tokens=20)  # type: ignore[operator]
    assert torch.equal(ours.sequences, theirs)


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_of_nothing_is_refused(batch_size: int) -> None:
    model = tiny_llama(VOCAB)
    with pytest.raises(ConfigError, match="batch_size"):
        generate(model, None, ragged_prompts(1)[0], batch_size=batch_size)


uncaptured = pytest.mark.usefixtures("uncaptured")
PROMPTS = [[9], [5, 9, 2, 7, 11, 30], [4, 4]]
"""The first one ends with its first token, so that it stays a row of two."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama(dtype=torch.float64).requires_grad_(False)


def draft_of(model: PreTrainedModel, name: str) -> Any:
    if name == "lm":
        return LMDraft(tiny_llama(num_layers=1, seed=3, dtype=torch.float64))
    return random_head(name, model)


def request_of(model: PreTrainedModel, shape: Shape, **settings: Any) -> Request:
    request = Request(PROMPTS, 14, Sampling(0.0), shape=shape, **settings)
    first = Loop(model, None, replace(request, max_new_tokens=1)).run()[0][0][-1]
    return replace(request, eos_ids=frozenset([first]))


def noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], object]]:
    """(lengths, width of the first pass) of every round that is drafted from here on."""
    found: list[tuple[list[int], object]] = []
    for module in (lm, head_draft):
        propose = module.propose

        def noting(drafting: DraftRound, context: Context, propose: Any = propose) -> Tree:
            found.append((context.lengths.tolist(), drafting.key[0]))
            return propose(drafting, context)

        monkeypatch.setattr(module, "propose", noting)
    return found


@uncaptured
@pytest.mark.parametrize("shape", [chain(3), k_ary([2, 1, 1])], ids=["chain", "tree"])
@pytest.mark.parametrize("name", by_default(4, ["lm", *VARIANTS]))
def test_the_first_pass_of_a_round_is_as_wide_whatever_rows_there_are(
    model: PreTrainedModel, name: str, shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of two tokens that had ended narrowed it for good: other captures, and the rest read one by one."""
    draft, request = draft_of(model, name), request_of(model, shape)
    plain = Loop(model, None, request).run()[0]
    assert len(plain[0]) == 2
    assert len(plain[1]) > 8
    rounds = noted(monkeypatch)
    assert Loop(model, draft, request).run()[0] == plain
    assert any(2 in lengths for lengths, _ in rounds)
    assert {width for _, width in rounds} == {2 if name == "lm" and shape == chain(3) else 4}


@uncaptured
@pytest.mark.parametrize("capture_after", [10**9, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", [chain(4), k_ary([2, 1, 1, 1])], ids=["chain", "tree"])
def test_a_perfect_draft_is_accepted_beside_short_rows(
    model: PreTrainedModel, shape: Shape, capture_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read in place of tokens that a short row does not have is never seen, captured or not."""
    monkeypatch.setattr("decode.forward.runner.CAPTURE_AFTER", capture_after)
    new = 45 if capture_after < 10 else 16
    request = replace(request_of(model, shape), max_new_tokens=new, eos_ids=frozenset())
    out, stats = Loop(model, LMDraft(model), request).run()
    assert out == Loop(model, None, request).run()[0]
    assert all(one.accepted == one.drafted for one in stats.rounds)


@uncaptured
@pytest.mark.parametrize("name", by_default(6, VARIANTS))
def test_a_short_row_is_drafted_for_as_if_it_stood_alone(
    model: PreTrainedModel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = random_head(name, model)
    request = replace(
        request_of(model, chain(3)), max_new_tokens=8, verifier="rejection", sampling=Sampling(), rows=[3]
    )
    seen: list[list[list[int]]] = []
    propose = type(head).propose

    def noting(self: Any, context: Context) -> Tree:
        tree = propose(self, context)
        seen[-1].append([*context.ids[-1, : context.lengths[-1]].tolist(), *tree.tokens[-1, 1:].tolist()])
        return tree

    monkeypatch.setattr(type(head), "propose", noting)
    for prompts, rows in (([PROMPTS[2]], [3]), ([PROMPTS[1], PROMPTS[2]], [1, 3])):
        seen.append([])
        Loop(model, head, replace(request, prompts=prompts, rows=rows, eos_ids=frozenset())).run()
    alone, beside = seen
    assert alone == beside[: len(alone)]


@uncaptured
def test_rows_that_have_ended_have_no_say_in_how_far_a_round_goes(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(model, draft_of(model, "dspark"), request_of(model, chain(3), adaptive=True, confidence=True))
    asked = []

    def takes(self: Budget, confidence: list[float], drafted: int) -> bool:
        asked.append((len(confidence), len(loop.rows.running)))
        return drafted < 2

    monkeypatch.setattr(Budget, "next_shape", lambda self, shape, left: shape.cut(left - 1))
    monkeypatch.setattr(Budget, "takes", takes)
    loop.run()
    assert {running for _, running in asked} >= {2}
    assert all(rows == running for rows, running in asked)


@uncaptured
def test_a_row_that_has_ended_does_not_keep_a_draft_going_past_its_context(model: PreTrainedModel) -> None:
    draft = LMDraft(tiny_llama(num_layers=1, seed=3, dtype=torch.float64, max_position_embeddings=10))
    request = request_of(model, chain(2))
    loop = Loop(model, draft, request)
    out, stats = loop.run()
    assert out == Loop(model, None, request).run()[0]
    assert any(one.drafted for one in stats.rounds)
    assert {one.drafted for one in stats.rounds[-4:]} == {0}


@uncaptured
def test_a_budget_learns_from_what_was_drafted() -> None:
    """Of eight levels asked for the draft gave three: the seconds are those of three."""
    budget = Budget(8)
    for _ in range(3):
        budget.next_shape(chain(8), 100)
        budget.learn([Counted(0, 0, 0, 1)], 1.0, 0)
    assert budget.next_shape(chain(8), 100).depth == 4
    budget.learn([Counted(0, 3, 3, 4)], 1.3, 3)
    assert budget.experience.clock.knows(3)
    assert not budget.experience.clock.knows(4)


@uncaptured
@pytest.mark.parametrize("name", ["medusa", "hydra", "dspark"])
@pytest.mark.parametrize("shape", [chain(8), k_ary([2, 1, 1, 1, 1, 1])], ids=["chain", "tree"])
def test_a_budget_asks_a_head_for_no_more_than_it_has(
    model: PreTrainedModel, name: str, shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = property(lambda self: True, lambda self, value: None)
    monkeypatch.setattr("decode.forward.runner.Runner.replayed", timed, raising=False)
    request = replace(request_of(model, shape, adaptive=True), max_new_tokens=24)
    loop = Loop(model, random_head(name, model), request)
    assert loop.budget is not None
    assert len(loop.budget.acceptance.tried) == 4
    assert loop.run()[0] == Loop(model, None, request).run()[0]
    assert 0 < max(loop.budget.experience.clock._times) <= 4
