"""LiLiCorr: the lattice against its equations written out, who is drafted and who learns; shapes that cannot be."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.common.errors import ConfigError
from decode.drafters.candidate_lattice import CandidateLattice
from decode.drafters.lilicorr import LiLiCorrConfig, LiLiCorrDraft
from decode.loop import Loop
from decode.requests import Request
from decode.trees.tree_plans import chain
from tests.decode import test_families as families
from tests.decode.heads import DEPTH, batch_of, random_head
from tests.faults import Fault, check_caught, noticed_by
from tests.tiny import tiny_llama

pytestmark = pytest.mark.usefixtures("uncaptured")
TEXTS = [[5, 9, 2, 7, 11, 30, 2, 8, 14], [4, 4, 6, 3, 2, 60, 21, 8, 17]]
CANDIDATES = 5
LATTICE = "decode.drafters.candidate_lattice"


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_llama(num_layers=6, dtype=torch.float64).requires_grad_(False)


def head(target: PreTrainedModel, name: str = "lilicorr") -> LiLiCorrDraft:
    found = random_head(name, target)
    assert isinstance(found, LiLiCorrDraft)
    for weight in found.lilicorr.parameters():
        weight.data += 0.1 * torch.randn_like(weight)  # biases too
    return found


def by_hand(lattice: CandidateLattice, embedded: Tensor, log_q: Tensor, states: Tensor, before: Tensor) -> Any:
    """`CandidateLattice.forward` of one block, candidate by candidate; has its own attention and norms."""
    weights, heads = dict(lattice.named_parameters()), len(lattice.same_slot_bias)
    slots, count, width = *log_q.shape, lattice.out_head.in_features

    def through(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"] if f"{name}.weight" in weights else x

    def normed(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[f"{name}.weight"]

    def silu(x: Tensor) -> Tensor:
        return x / (1 + (-x).exp())

    places, rows = list(product(range(slots), range(count))), []
    for slot, rank in places:
        one = log_q[slot, rank]
        told = torch.stack(
            [one, one.exp(), one - log_q[slot].max(), one * 0 + rank / (count - 1), one * 0 + (rank == 0)]
        )
        told = (told - told.mean()) / (told.var(correction=0) + 1e-5).sqrt()
        told = told * weights["feature_norm.weight"] + weights["feature_norm.bias"]
        x = through(embedded[slot, rank], "token_proj") + through(states[slot], "pass_hidden_proj")
        x = x + through(silu(through(told, "feature_mlp.up_proj")), "feature_mlp.down_proj")
        rows.append(x + weights["slot_embedding"][0, 0, slot, 0] + weights["rank_embedding"][0, 0, 0, rank])
    x = torch.stack(rows)
    for name in (f"layers.{index}" for index in range(len(lattice.layers))):
        given = normed(x, f"{name}.attn_norm") @ weights[f"{name}.attn.in_proj_weight"].T
        q, k, v = (given + weights[f"{name}.attn.in_proj_bias"]).view(-1, 3, heads, width // heads).unbind(1)
        mixed = torch.zeros_like(q)
        for one, number in product(range(len(places)), range(heads)):
            scores = []
            for other, (slot, _) in enumerate(places):
                apart = places[one][0] - slot
                bias = weights["relative_slot_bias"][number, apart + DEPTH]
                bias = bias + (weights["same_slot_bias"][number] if apart == 0 else 0)
                scores.append(q[one, number] @ k[other, number] / (width // heads) ** 0.5 + bias)
            mixed[one, number] = torch.stack(scores).softmax(0) @ v[:, number]
        x = x + through(mixed.flatten(1), f"{name}.attn.out_proj")
        inner = silu(through(normed(x, f"{name}.mlp_norm"), f"{name}.mlp.up_proj"))
        x = x + through(inner, f"{name}.mlp.down_proj")
    x, text = normed(x, "output_norm"), normed(through(before, "context_proj"), "anchor_norm")
    factors = silu(through(torch.cat([x, text.expand_as(x), x * text], -1), "factor_input_proj"))
    comes, goes = (through(factors, name) for name in ("in_head", "out_head"))
    comes, goes = (one / one.norm(dim=-1, keepdim=True) for one in (comes, goes))
    begins = through(text, "anchor_out_head")
    comes, goes = comes.view(slots, count, -1), goes.view(slots, count, -1)
    pairs = [[[goes[s, b] @ comes[s + 1, c] for c in range(count)] for b in range(count)] for s in range(slots - 1)]
    return 3.0 * comes[0] @ (begins / begins.norm()), 3.0 * torch.tensor(pairs)


def test_a_lattice_is_its_equations_written_out(target: PreTrainedModel) -> None:
    lattice = head(target).lilicorr
    torch.manual_seed(1)
    shape = (DEPTH, CANDIDATES)
    embedded, states, before = (torch.randn(*one, 32, dtype=torch.float64) for one in (shape, shape[:1], ()))
    log_q = torch.randn(shape, dtype=torch.float64).sort(-1, descending=True).values - 2
    first, pairs = lattice(embedded[None], log_q[None], states[None], before[None])
    wanted_first, wanted_pairs = by_hand(lattice, embedded, log_q, states, before)
    torch.testing.assert_close(first[0], wanted_first)
    torch.testing.assert_close(pairs[0], wanted_pairs.to(pairs))
    alone = lattice(embedded[None], log_q[None], states[None], before[None], torch.zeros(1, dtype=torch.bool))
    nothing = lattice.context_proj.bias.clone()
    lattice.context_proj.bias.data.zero_()
    torch.testing.assert_close(alone[0], lattice(embedded[None], log_q[None], states[None], 0 * before[None])[0])
    lattice.context_proj.bias.data.copy_(nothing)


def test_candidates_share_out_what_they_have_together_by_their_scores(target: PreTrainedModel) -> None:
    """Behind a token that was no candidate all stays as DFlash has it, and its candidates are drafted by that."""
    draft = head(target)
    batch, seen = batch_of(target, draft, TEXTS), set()
    for depth, step in enumerate(draft.unroll(batch)):
        for row, slot in step.valid.nonzero().tolist():
            hidden = step.hidden[row, slot]
            state, scores, rows = hidden.split([draft.config.hidden_size, CANDIDATES, CANDIDATES])
            logits, learned, drafted = draft.unbiased(state), step.head(hidden), step.drafted(hidden)
            best = logits.topk(CANDIDATES).indices
            assert torch.equal(rows.long(), best)
            others = torch.ones_like(drafted, dtype=torch.bool).index_fill(0, best, False)
            assert drafted[others].isneginf().all()
            assert torch.equal(learned[others], logits[others])
            seen.add(is_told := bool(scores.any()))
            torch.testing.assert_close(learned.logsumexp(-1), logits.logsumexp(-1))
            shares = scores if is_told else logits[best]
            assert is_told or depth > 0
            torch.testing.assert_close(drafted.softmax(-1)[best], shares.softmax(-1))
            torch.testing.assert_close(learned[best].softmax(-1), shares.softmax(-1))
    assert seen == {True, False}


def test_nothing_but_candidates_is_drafted(target: PreTrainedModel) -> None:
    draft = head(target)
    propose, found = draft.propose, []

    def proposed(context: Any) -> Any:
        tree = propose(context)
        found.append(tree.log_q)
        return tree

    draft.propose = proposed  # type: ignore[method-assign]
    Loop(target, draft, Request(TEXTS, 12, shape=chain(DEPTH), verifier="rejection")).run()
    assert found
    assert {count for log_q in found for count in log_q.isfinite().sum(-1).flatten().tolist()} == {CANDIDATES}


def test_more_children_than_candidates(target: PreTrainedModel) -> None:
    """Nodes that are no candidates are read all the same, and none of them stands."""
    draft, request = head(target), Request(TEXTS, 12, shape=families.k_ary([7, 6, 2]))
    assert Loop(target, draft, request).run()[0] == Loop(target, None, request).run()[0]


def test_candidates_are_found_in_parts(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = head(target)
    whole = [step.hidden for step in draft.unroll(batch_of(target, draft, TEXTS))]
    monkeypatch.setattr("decode.drafters.lilicorr.MOST_ENTRIES", 7 * 64)
    torch.testing.assert_close([step.hidden for step in draft.unroll(batch_of(target, draft, TEXTS))], whole)


@pytest.mark.parametrize("name", ["lilicorr", "lilicorr-convolved"])
def test_every_weight_learns(target: PreTrainedModel, name: str) -> None:
    draft = head(target, name).requires_grad_(True).train()
    batch = batch_of(target, draft, torch.randint(3, 64, (6, 30)).tolist())  # some are candidates of their slots
    losses = [step.head(step.hidden).log_softmax(-1)[..., 3:9].square().sum() for step in draft.unroll(batch)]
    torch.stack(losses).sum().backward()
    still = [name for name, weight in draft.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert not still


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"candidates": 65}, "candidates=65 .* the draft knows 64 tokens"),
        ({"candidates": 9, "draft_vocab_size": 8}, "the draft knows 8 tokens"),
        ({"candidates": 1}, "candidates=1 and depth=4"),
        ({"depth": 1}, "candidates=5 and depth=1"),
        ({"lattice_heads": 3}, "lattice_heads=3 does not divide the lattice_width=16"),
        ({"conv_taps": 2}, "conv_taps=2 and conv_group=0"),
        ({"conv_taps": 2, "conv_group": 7}, "conv_group=7 of hidden_size=32"),
        ({"layout": "anchor"}, "layout=anchor"),
        ({"markov_rank": 4}, "markov_rank=4"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(target: PreTrainedModel, changes: dict[str, Any], words: str) -> None:
    config = head(target).config
    assert isinstance(config, LiLiCorrConfig)
    with pytest.raises(ConfigError, match=words):
        replace(config, **changes)


FAULTS = [
    *noticed_by(
        partial(families.test_it_drafts_what_it_is_trained_as, name="lilicorr", reduced=False),
        ("decode.drafters.lilicorr:LiLiCorrDraft.told", "features[:, -1:]", "features[:, -2:-1]"),
        ("decode.drafters.lilicorr:LiLiCorrDraft.joined", "blocks.anchors - 1", "blocks.anchors - 2"),
    ),
    *noticed_by(
        test_a_lattice_is_its_equations_written_out,
        (f"{LATTICE}:CandidateLattice._bias", "slot[:, None] - slot", "slot - slot[:, None]"),
        (f"{LATTICE}:CandidateLattice.forward", "goes[:, :-1] @ comes[:, 1:]", "goes[:, 1:] @ comes[:, :-1]"),
        (f"{LATTICE}:CandidateLattice.forward", "text * has_before[:, None]", "text"),
        (f"{LATTICE}:features_of", "log_q - log_q[..., :1]", "log_q"),
    ),
    *noticed_by(
        test_candidates_share_out_what_they_have_together_by_their_scores,
        ("decode.drafters.lilicorr:LiLiCorrDraft.biased", "scores.log_softmax(-1)", "scores"),
        ("decode.drafters.lilicorr:LiLiCorrDraft.drafted", "scores.where(is_known,", "scores.where(is_known | True,"),
    ),
]


@pytest.mark.slow  # they test the tests
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_is_noticed(fault: Fault, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    check_caught(fault, request, monkeypatch)
