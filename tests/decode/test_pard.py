"""PARD: what its pass drafts is what training judges, whatever was accepted before, and no text changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decode import generate, load_drafter
from decode.common.errors import InputError
from decode.drafters.base import Batch
from decode.drafters.lm import LMDraft
from decode.drafters.pard import Masks, PardDraft, lm_draft, masks_in, set_masks
from decode.loop import Loop
from decode.requests import Request
from decode.sampling.warp import Sampling
from decode.trees.tree_plans import chain
from tests.tiers import by_default
from tests.tiny import save_tiny_target, tiny_llama

MASK, DEPTH = 63, 4
ASKED: dict[str, Any] = {"max_new_tokens": 40, "seed": 3, "eos_token_id": ()}


@pytest.fixture
def model() -> Any:
    return tiny_llama(dtype=torch.float64).requires_grad_(False)


def pard(seed: int = 3, **changes: Any) -> PardDraft:
    """Random weights of one layer, over the vocabulary of `model`."""
    own = tiny_llama(num_layers=1, seed=seed, dtype=torch.float64).requires_grad_(False)
    set_masks(own.config, replace(Masks(MASK, DEPTH), **changes))
    draft = lm_draft(own)
    assert isinstance(draft, PardDraft)
    return draft.eval()


def by_hand(draft: PardDraft, text: list[int], depth: int = DEPTH) -> Tensor:  # (depth, V)
    """Logits of the text's last token and of the masks behind it, by transformers' own pass."""
    ids = torch.tensor([[*text, *[MASK] * (depth - 1)]])
    return draft.model(ids).logits[0, len(text) - 1 :]


def batch_of(rows: list[list[list[int]]], length: int) -> Batch:
    """Packed rows of texts, every token to be learned."""
    ids, positions = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length, dtype=torch.long)
    document = torch.full_like(ids, -1)
    for row, texts in enumerate(rows):
        start = 0
        for number, text in enumerate(texts):
            span = slice(start, start + len(text))
            ids[row, span], positions[row, span] = torch.tensor(text), torch.arange(len(text))
            document[row, span], start = number, span.stop
    return Batch(ids, positions, document, document >= 0)


def test_training_judges_what_a_pass_over_the_text_and_masks_says() -> None:
    """Two texts in one row, one in another: every anchor, as if its text ended there."""
    draft, texts = pard(), [[[5, 9, 2, 7, 11], [3, 1, 4, 6]], [[8, 8, 2, 30, 17, 40]]]
    draft.anchors = 12
    batch = batch_of(texts, 12)
    steps = list(draft.unroll(batch))
    assert len(steps) == DEPTH
    seen = 0
    for row, packed in enumerate(texts):
        for number, text in enumerate(packed):
            start = sum(map(len, packed[:number]))
            for end in range(1, len(text)):
                wanted = by_hand(draft, text[:end])
                for step, one in enumerate(steps):
                    flat = row * 12 + start + end - 1 + step
                    found = (one.target_rows[row] == flat) & one.valid[row]
                    at = (steps[0].target_rows[row] == row * 12 + start + end - 1).nonzero()[0]
                    assert bool(found[at]) == (end + step < len(text))
                    torch.testing.assert_close(one.head(one.hidden[row, at])[0], wanted[step])
                    seen += 1
    assert seen == DEPTH * (4 + 3 + 5)


def test_fewer_anchors_are_drawn_anew_in_training_and_evenly_spaced_else() -> None:
    draft, batch = pard(), batch_of([[list(range(40))]], 40)
    counts = [int(step.valid.sum()) for step in draft.unroll(batch)]
    assert counts[0] == 10
    assert counts == sorted(counts, reverse=True)
    once, again = ([step.target_rows.tolist() for step in draft.unroll(batch)] for _ in range(2))
    assert once == again
    drawn, anew = ([step.target_rows.tolist() for step in draft.train().unroll(batch)] for _ in range(2))
    assert drawn != anew


@pytest.mark.usefixtures("uncaptured")
def test_a_pass_drafts_what_training_judges(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one token and of several, whatever was accepted: the likeliest tokens of every place."""
    draft, seen, propose = pard(), list[tuple[list[list[int]], list[list[int]]]](), PardDraft.propose

    def noted(self: PardDraft, context: Any) -> Any:
        tree = propose(self, context)
        texts = [context.ids[row, :length].tolist() for row, length in enumerate(context.lengths)]
        seen.append((texts, tree.tokens[:, 1:].tolist()))
        return tree

    monkeypatch.setattr(PardDraft, "propose", noted)
    prompts = [[5], [7, 3], [5, 9, 2, 7, 11, 3, 2, 9]]
    Loop(model, draft, Request(prompts, 24, shape=chain(DEPTH), sampling=Sampling(0), seed=1)).run()
    assert len(seen) > 8
    for texts, drafted in seen:
        for text, tokens in zip(texts, drafted, strict=True):
            assert tokens == by_hand(draft, text).argmax(-1).tolist()


def test_captured_rounds_are_the_same(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, rounds = torch.tensor([[5, 6, 7], [9, 3, 1]]), []
    for after in (2, 10**9):
        monkeypatch.setattr("decode.forward.runner.CAPTURE_AFTER", after)
        rounds.append(generate(model, pard(), ids, num_draft_tokens=3, **ASKED).stats.rounds)
    assert rounds[0] == rounds[1]


@pytest.mark.parametrize("tree", by_default(1, ["2x2x1", "chain", "dynamic"]))
@pytest.mark.parametrize("verifier", by_default(1, ["coupled", "rejection", "block"]))
def test_no_text_changes(model: Any, verifier: str, tree: str) -> None:
    """The target drafts for itself too, one token of a pass in full: some are accepted."""
    ids = torch.randint(0, 20, (3, 6), generator=torch.Generator().manual_seed(0))
    own = tiny_llama(dtype=torch.float64).requires_grad_(False)
    set_masks(own.config, Masks(MASK, DEPTH))
    asked = ASKED | {"num_draft_tokens": 3, "tree": tree, "tree_nodes": 6, "audit": tree == "chain"}
    for draft in (pard(), lm_draft(own).eval()):
        for temperature in (0.0, 0.7):
            given = asked | {"temperature": temperature, "verifier": "greedy" if not temperature else verifier}
            if given["verifier"] == "block" and tree != "chain":
                continue
            out = generate(model, draft, ids, **given)
            if given["verifier"] in ("greedy", "coupled"):
                plain = generate(model, None, ids, temperature=temperature, **ASKED)
                assert torch.equal(out.sequences, plain.sequences)
    assert any(one.accepted for one in out.stats.rounds)


def test_no_more_tokens_are_drafted_than_it_was_trained_for(model: Any) -> None:
    ids = torch.tensor([[5, 6, 7]])
    for draft, most in ((pard(depth=2), 2), (pard(depth=None), 6)):
        rounds = generate(model, draft, ids, num_draft_tokens=6, **ASKED).stats.rounds
        assert max(one.drafted for one in rounds) == most


@pytest.mark.parametrize(("token", "depth"), [(64, 2), (-1, 2), (True, 2), (1, 0), (1, 1.5)])
def test_masks_that_cannot_be_are_refused(token: Any, depth: Any) -> None:
    config = tiny_llama().config
    config.pard_token, config.pard_depth = token, depth
    with pytest.raises(InputError, match="pard_token=.*Copy its folder again"):
        masks_in(config, "there")


def test_a_folder_says_how_it_drafts(tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path / "draft", num_layers=1, seed=2)
    target = tiny_llama(300, dtype=torch.float32)
    assert type(load_drafter(str(folder), target=target, check=False)) is LMDraft
    saved = LMDraft.from_pretrained(folder).model
    set_masks(saved.config, Masks(7, 3))
    saved.save_pretrained(folder)
    found = load_drafter(str(folder), target=target, check=False)
    with pytest.raises(InputError, match="pard"):  # a cascade spares passes that it does not make
        load_drafter("cascade", target=target, draft=str(folder), helper="ngram", check=False)
    assert isinstance(found, PardDraft)
    assert (found.masks, found.most_tokens) == (Masks(7, 3), 3)
