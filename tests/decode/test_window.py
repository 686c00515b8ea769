"""Drafts that attend over a window with sinks: which tokens count, and that training and decoding agree on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode import generate, load_drafter
from decode.common.errors import InputError
from decode.config import ModelConfig
from decode.drafters.base import Batch, Context
from decode.drafters.eagle3 import Eagle3Draft
from decode.drafters.lm import LMDraft
from decode.forward.window import Window, own_window, set_window
from decode.loop import Loop
from decode.models.load import describe_model
from decode.requests import Request
from decode.trees.tree import Tree
from decode.trees.tree_plans import Shape, chain, k_ary
from tests.decode.heads import batch_of, random_head
from tests.tiers import by_default
from tests.tiny import tiny_llama

WINDOW = Window(3, 2)
RAGGED = [[5, 9, 2, 7, 30, 41, 3, 12], [1], [4, 4, 6, 3, 2]]
SHAPES: dict[str, Shape] = {"chain": chain(4), "tree": k_ary([3, 2, 1, 1])}
"""Their paths are longer than the window, so that drafted tokens leave it too."""


def windowed(num_layers: int = 2, window: Window = WINDOW, **fields: object) -> LMDraft:
    model = tiny_llama(num_layers=num_layers, seed=3, dtype=torch.float64, **fields)  # type: ignore[arg-type]
    set_window(model.config, window)
    return LMDraft(model.requires_grad_(False))


def batch_of_ids(texts: list[list[int]]) -> Batch:
    length = max(map(len, texts))
    ids, document = torch.zeros(len(texts), length, dtype=torch.long), torch.full((len(texts), length), -1)
    for row, text in enumerate(texts):
        ids[row, : len(text)], document[row, : len(text)] = torch.tensor(text), 0
    return Batch(ids, torch.arange(length).expand_as(ids), document, document >= 0)


def hidden(draft: LMDraft, ids: Tensor) -> Tensor:  # (T,) -> (T, d)
    return draft.hidden_states(batch_of_ids([ids.tolist()]))[0]


@pytest.mark.parametrize("window", [Window(1, 0), Window(3, 0), Window(3, 2), Window(1, 4), Window(50, 0)], ids=str)
def test_a_token_counts_where_it_is_a_sink_or_in_the_window(window: Window) -> None:
    """Of one layer, whose outputs depend on nothing further away: each token is changed in turn."""
    ids = torch.arange(1, 13)
    draft = windowed(1, window)
    before = hidden(draft, ids)
    for place in range(len(ids)):
        other = ids.clone()
        other[place] = 60
        changed = (hidden(draft, other) != before).any(-1)
        reads = [place <= at and (place < window.sinks or at - place < window.size) for at in range(len(ids))]
        assert changed.tolist() == reads, place


def test_each_document_of_a_packed_row_has_its_own_sinks() -> None:
    texts = [[5, 9, 2, 7, 11, 30, 2], [4, 4, 6, 3, 2, 60, 21, 8, 17]]
    draft = windowed()
    ids = torch.tensor([[token for text in texts for token in text]])
    positions = torch.tensor([[place for text in texts for place in range(len(text))]])
    document = torch.tensor([[number for number, text in enumerate(texts) for _ in text]])
    packed = draft.hidden_states(Batch(ids, positions, document, document >= 0))[0]
    alone = torch.cat([hidden(draft, torch.tensor(text)) for text in texts])
    torch.testing.assert_close(packed, alone)


@dataclass(frozen=True)
class Node:
    """A node of a drafted tree that has children, and the distribution that these were drawn from."""

    text: list[int]
    path: list[int]
    q: Tensor


def nodes_of(target: PreTrainedModel, draft: LMDraft | Eagle3Draft, shape: Shape) -> list[Node]:
    """Of all trees drafted for ragged prompts, some of which are accepted in part."""
    found: list[Node] = []
    propose = draft.propose

    def noted(context: Context) -> Tree:
        tree = propose(context)
        assert tree.log_q is not None
        assert isinstance(tree.parents, tuple)
        for row, length in enumerate(context.lengths.tolist()):
            for node in range(tree.num_nodes):
                if node in tree.parents:
                    above = tree.ancestors[0, node].nonzero()[1:, 0]
                    path = tree.tokens[row, above].tolist()
                    found.append(Node(context.ids[row, :length].tolist(), path, tree.log_q[row, node].exp()))
        return tree

    draft.propose = noted  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:  # what looks into proposals is not captured with them
        patch.setattr("decode.forward.runner.CAPTURE_AFTER", 10**9)
        Loop(target, draft, Request(RAGGED, 24, shape=shape, verifier="rejection")).run()
    draft.propose = propose  # type: ignore[method-assign]
    return found


def check_draft_model(shape: str) -> None:
    """Position by position, with caches, in batches of different lengths, behind siblings of trees."""
    draft = windowed()
    target = tiny_llama(seed=3, num_layers=2, dtype=torch.float64)  # a near relative, so that rounds differ in length
    found = nodes_of(target, draft, SHAPES[shape])
    assert {len(one.path) for one in found} == {0, 1, 2, 3}
    assert max(len(one.text) for one in found) > 20
    batch = batch_of_ids([one.text + one.path for one in found])
    (step,) = draft.unroll(batch)
    for row, one in enumerate(found):
        logits = step.head(step.hidden[row, len(one.text) + len(one.path) - 1])
        torch.testing.assert_close(logits.softmax(-1), one.q, rtol=1e-6, atol=1e-12)


def check_eagle3(shape: str) -> None:
    """The same of a head, whose steps of training are those of a round."""
    target = tiny_llama(num_layers=6, dtype=torch.float64).requires_grad_(False)
    draft = random_head("eagle3-window", target)
    assert isinstance(draft, Eagle3Draft)
    found = [one for one in nodes_of(target, draft, SHAPES[shape]) if len(one.text) > 1]
    assert {len(one.path) for one in found} == {0, 1, 2, 3}
    batch = batch_of(target, draft, [[*one.text, *one.path, 0] for one in found])
    for depth, step in enumerate(draft.unroll(batch)):
        for row, one in enumerate(found):
            if len(one.path) == depth:
                logits = step.head(step.hidden[row, len(one.text) - 2])
                torch.testing.assert_close(logits.softmax(-1), one.q, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("check", [check_draft_model, check_eagle3])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_draft_drafts_what_it_is_trained_as(check: Callable[[str], None], shape: str) -> None:
    check(shape)


@pytest.mark.parametrize("tree", by_default(1, ["3x2x1", "chain", "dynamic"]))
def test_the_text_is_the_targets(tree: str) -> None:
    """Captured passes and all; and the window matters: another one drafts otherwise."""
    target = tiny_llama(seed=3, num_layers=2, dtype=torch.float64)
    ids = torch.tensor([[5, 9, 2, 7, 30, 41, 3, 12]] * 2)
    settings = {"max_new_tokens": 60, "eos_token_id": (), "seed": 1}
    plain = generate(target, None, ids, **settings).sequences  # type: ignore[arg-type]
    accepted = []
    for window in (Window(60, 0), WINDOW, Window(1, 0)):
        out = generate(target, windowed(2, window), ids, tree=tree, num_draft_tokens=3, **settings)  # type: ignore[arg-type]
        assert torch.equal(out.sequences, plain)
        accepted.append(out.stats.tau)
    assert accepted[0] > accepted[1] > accepted[2]


def save(folder: Path, **edited: object) -> str:
    draft = windowed()
    draft.model.save_pretrained(folder)
    fields = json.loads((folder / "config.json").read_text()) | edited
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


def test_it_is_kept_in_config_json(tmp_path: Path) -> None:
    target = tiny_llama(dtype=torch.float64)
    drafter = load_drafter(save(tmp_path), target=target, check=False)
    assert isinstance(drafter, LMDraft)
    assert own_window(drafter.model.config) == WINDOW
    assert own_window(target.config) is None


@pytest.mark.parametrize(
    "edited",
    [{"draft_window": 0}, {"draft_sinks": -1}, {"draft_window": "8"}, {"draft_sinks": None}, {"draft_window": True}],
)
def test_edited_fields_are_refused_before_weights_are_read(tmp_path: Path, edited: dict[str, object]) -> None:
    path = save(tmp_path, **edited)
    with pytest.raises(InputError, match="draft_window=.*draft_sinks=.*whole number"):
        describe_model(ModelConfig(path=path), "draft")


def test_such_a_model_is_no_target(tmp_path: Path) -> None:
    """transformers and engines would run it without its window."""
    with pytest.raises(InputError, match="first 2 and last 3 positions"):
        describe_model(ModelConfig(path=save(tmp_path)))
