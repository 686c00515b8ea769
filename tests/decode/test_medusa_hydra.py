"""Medusa and Hydra: what they start from, what they read in a tree, and trees chosen by what each head is worth."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from decode.common.errors import ConfigError
from decode.drafters.base import Context
from decode.drafters.head_draft import HeadDraft
from decode.drafters.saved_head import HEADS
from decode.forward.runner import CAPTURE_AFTER
from decode.loop import Loop
from decode.models.output_head import ends_of
from decode.requests import Request
from decode.sampling.warp import Sampling
from decode.trees.tree import Tree, tree_depths
from decode.trees.tree_plans import Dynamic, Shape, Static, chain, k_ary
from tests.decode.heads import DEPTH, batch_of, random_head
from tests.tiers import by_default
from tests.tiny import tiny_llama

VOCAB = 64
REQUEST = Request([[5, 9, 2, 7], [1, 8], [4, 4, 6, 3, 2]], 30, Sampling(), seed=3)
SHAPES: dict[str, Shape] = {
    "k_ary": k_ary([2, 2, 1]),
    "static": Static((-1, 0, 0, 0, 2, 2, 3, 4, 6, 6)),
    "dynamic": Dynamic(DEPTH, 3, 12),
}
every_kind = pytest.mark.parametrize("kind", ["medusa", "hydra", "hydra-prefix"])


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_llama(VOCAB, dtype=torch.float64).requires_grad_(False)


def fresh(kind: str, model: PreTrainedModel) -> HeadDraft:
    """Heads of two residual layers as they are before training."""
    config = replace(random_head(kind, model).config, mlp_layers=2)  # type: ignore[call-arg]
    return HEADS[config.family][1](config, ends_of(model)).double()


def fit(draft: HeadDraft, model: PreTrainedModel, texts: list[list[int]]) -> HeadDraft:
    """The heads after a few steps on these texts."""
    optimizer, batch = torch.optim.Adam(draft.parameters(), lr=0.02), batch_of(model, draft, texts)
    for _ in range(40):
        loss = torch.zeros(())
        for step in draft.unroll(batch):
            tokens = batch.ids.flatten()[step.target_rows[step.valid] + 1]
            loss = loss + cross_entropy(step.head(step.hidden[step.valid]), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return draft.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def fitted(target: PreTrainedModel) -> HeadDraft:
    """Medusa's heads, fitted to what the target writes for REQUEST."""
    return fit(fresh("medusa", target), target, Loop(target, None, REQUEST).run()[0])


def distributions(draft: HeadDraft, model: PreTrainedModel, text: list[int]) -> list[Tensor]:
    """(T, V) logits of every head over one text, by the training face."""
    return [draft.logits(step.hidden)[0] for step in draft.unroll(batch_of(model, draft, [text]))]


@every_kind
def test_training_starts_at_the_targets_own_prediction(kind: str, target: PreTrainedModel) -> None:
    draft = fresh(kind, target)
    batch = batch_of(target, draft, [[5, 9, 2, 7, 3, 1, 1]])
    assert batch.features is not None
    for step in draft.unroll(batch):
        assert torch.equal(step.hidden, batch.features[:, :, 0])


@every_kind
def test_every_layer_of_every_head_learns_weights_of_its_own(kind: str, target: PreTrainedModel) -> None:
    before = fresh(kind, target).state_dict()
    after = fit(fresh(kind, target), target, [[5, 9, 2, 7, 3, 1, 1, 30, 2]]).state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    values = [tuple(weight.flatten()[:8].tolist()) for weight in after.values()]
    assert len(set(values)) == len(values)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_two_hidden_states_are_refused(kind: str, target: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match=rf"{kind} reads one hidden state.*\[1, -1\]"):
        replace(random_head(kind, target).config, taps=(1, -1))


@every_kind
def test_no_more_tokens_are_drafted_than_there_are_heads(kind: str, target: PreTrainedModel) -> None:
    draft = random_head(kind, target)
    stats = Loop(target, draft, replace(REQUEST, shape=chain(9))).run()[1]
    assert max(one.drafted for one in stats.rounds) == DEPTH


@every_kind
@pytest.mark.parametrize("shape", by_default(1, SHAPES))
def test_children_in_a_tree_are_the_best_after_their_own_path(
    kind: str, shape: str, target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the training face over the committed text and the path; ragged rows, captured rounds among them."""
    draft, seen = random_head(kind, target), []
    propose = draft.propose

    def noted(context: Context) -> Tree:
        tree = propose(context)
        seen.append(([context.ids[row, :length].tolist() for row, length in enumerate(context.lengths)], tree))
        return tree

    monkeypatch.setattr(draft, "propose", noted)
    Loop(target, draft, replace(REQUEST, shape=SHAPES[shape], sampling=Sampling(0))).run()
    for texts, tree in (*seen[:2], *seen[CAPTURE_AFTER + 1 : CAPTURE_AFTER + 3]):
        for text, tokens, parents in zip(texts, tree.tokens.tolist(), tree.parents_of_rows(), strict=True):
            depths = tree_depths(tuple(parents))
            for node in set(parents) - {-1}:
                path, at = [], node
                while at:
                    path, at = [tokens[at], *path], parents[at]
                distribution = distributions(draft, target, [*text, *path, 0])[depths[node]][len(text) - 2]
                children = [tokens[child] for child, parent in enumerate(parents) if parent == node]
                assert children == distribution.topk(len(children)).indices.tolist()
