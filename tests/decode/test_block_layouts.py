"""The two layouts of a block, and its mask: the logits of every slot by a computation of their own, in both faces."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.common.errors import ConfigError
from decode.drafters.dspark import DSparkDraft
from decode.loop import Loop
from decode.models.hidden_states import Taps
from decode.requests import Request
from decode.trees.tree_plans import chain
from tests.decode.test_dspark import PROMPTS, TAPS, batch_of, draft_of, logits_after, proposals, target

pytestmark = pytest.mark.usefixtures("uncaptured")

TEXT = [5, 9, 2, 7, 1, 3, 3, 8, 30, 12]
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {"layout": "fill_in", "markov_rank": 0, "confidence": False},
    "dspark-fill-in": {"layout": "fill_in", "mask_token": 60},
    "dspark": {},
    "dspark-mask-token": {"mask_token": 60},
}


def by_hand(draft: DSparkDraft, model: PreTrainedModel, ids: list[int], place: int) -> Tensor:
    """(N, V) logits about the tokens behind ids[place], by the saved tensors alone, one slot after another."""
    config, weights = draft.config, draft.state_dict()
    embedding, head = model.get_parameter("model.embed_tokens.weight"), model.get_parameter("lm_head.weight")
    with Taps(model, TAPS) as taps:
        model(torch.tensor([ids]))
    context = normed(taps.stacked()[0, :place].flatten(1) @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    mask = weights["mask.weight"][0] if config.mask_token is None else embedding[config.mask_token]
    count = config.depth + (config.layout == "fill_in")
    x = torch.stack([embedding[ids[place]], *[mask] * (count - 1)])
    positions = torch.arange(place + count)
    for layer in range(config.layers):
        own = {name.removeprefix(f"layers.{layer}."): tensor for name, tensor in weights.items()}
        heard = normed(x, own["input_layernorm.weight"])
        x = x + attended(heard, torch.cat([context, heard]), positions, own)
        heard = normed(x, own["post_attention_layernorm.weight"])
        gate, up = heard @ own["mlp.gate_proj.weight"].T, heard @ own["mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ own["mlp.down_proj.weight"].T
    drafts = {"anchor": range(count), "fill_in": range(1, count)}[config.layout]
    logits = normed(x, weights["norm.weight"])[list(drafts)] @ head.T
    if config.markov_rank:
        before = ids[place : place + config.depth]
        logits = logits + weights["markov_in.weight"][before] @ weights["markov_out.weight"].T
    return logits


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def attended(x: Tensor, seen: Tensor, positions: Tensor, own: dict[str, Tensor]) -> Tensor:
    """x (S, d) the block, which all of seen (T, d) is visible to: 4 heads of 8 channels over 2 of keys and values."""

    def heads(made_from: Tensor, name: str) -> Tensor:
        return (made_from @ own[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, 8)).transpose(0, 1)

    queries = turned(normed(heads(x, "q"), own["self_attn.q_norm.weight"]), positions[-len(x) :])
    keys = turned(normed(heads(seen, "k"), own["self_attn.k_norm.weight"]), positions).repeat_interleave(2, 0)
    weights = (queries @ keys.transpose(1, 2) / math.sqrt(8)).softmax(-1)
    mixed = weights @ heads(seen, "v").repeat_interleave(2, 0)
    return mixed.transpose(0, 1).flatten(1) @ own["self_attn.o_proj.weight"].T


def turned(x: Tensor, positions: Tensor) -> Tensor:
    angles = positions[:, None].double() * 1e4 ** -(torch.arange(4).double() / 4)
    first, second = x[..., :4], x[..., 4:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@pytest.mark.parametrize("kind", KINDS)
def test_slots_draft_what_a_computation_by_hand_says(kind: str) -> None:
    model = target()
    draft = draft_of(model, **KINDS[kind])
    for place in (1, 4):
        want = by_hand(draft, model, TEXT, place)
        have = logits_after(draft, batch_of(model, TEXT), place)
        torch.testing.assert_close(have, want, rtol=0, atol=1e-5)  # rotary tables are of single precision


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_draft_the_same_by_hand(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round drafts from p of the last committed token, with hidden states of those before it: as engines do, whose
    first draft follows the token that the prompt gave."""
    model = target()
    draft = draft_of(model, **KINDS[kind])
    seen = proposals(draft, monkeypatch)
    Loop(model, draft, Request([PROMPTS[0]], 8, shape=chain(4), verifier="rejection")).run()
    known = [(ids[0], tree) for ids, tree in seen if tree.log_q is not None]
    for ids, tree in known:
        drafted = tree.tokens[0, 1:].tolist()
        assert tree.log_q is not None
        want = by_hand(draft, model, ids + drafted, len(ids) - 1)[: len(drafted)].log_softmax(-1)
        torch.testing.assert_close(tree.log_q[0, : len(drafted)], want, rtol=0, atol=1e-5)
    assert len({len(ids) for ids, _ in known}) > 2


def test_a_block_of_either_layout_drafts_as_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """`depth` of them: a fill-in block is a slot longer, and its anchor's own slot is never trained or asked."""
    model, widths = target(), []
    for layout in ("anchor", "fill_in"):
        draft = draft_of(model, layout=layout)
        draft.norm.register_forward_hook(lambda module, given, made: widths.append(made.shape[1]))
        seen = proposals(draft, monkeypatch)
        Loop(model, draft, Request([PROMPTS[0]], 8, shape=chain(6))).run()
        assert max(tree.num_nodes - 1 for _, tree in seen) == draft.config.depth == 4
        assert len(list(draft.unroll(batch_of(model, TEXT)))) == 4
    blocks = len(TEXT)
    assert set(widths) == {4, 5, 4 * blocks, 5 * blocks}


def test_the_slot_of_a_fill_in_anchor_reaches_no_loss_of_its_own() -> None:
    """What the last norm makes of it goes nowhere; of every other slot it does."""
    model = target()
    draft, made = draft_of(model, layout="fill_in").requires_grad_(True), []
    draft.norm.register_forward_hook(lambda module, given, out: made.append(out))
    batch = batch_of(model, TEXT)
    loss = sum(step.head(step.hidden).log_softmax(-1)[..., 0].sum() for step in draft.unroll(batch))
    assert isinstance(loss, Tensor)
    (gradient,) = torch.autograd.grad(loss, made)
    reached = gradient.unflatten(1, (-1, 5)).abs().sum(-1)[0] > 0
    assert reached.tolist() == [[False, True, True, True, True]] * len(TEXT)


def test_a_mask_of_the_vocabulary_is_the_targets_row_and_no_weight_of_the_head() -> None:
    model = target()
    learned, row = draft_of(model), draft_of(model, mask_token=60)
    assert set(learned.state_dict()) - set(row.state_dict()) == {"mask.weight"}
    row.load_state_dict(learned.state_dict(), strict=False)
    learned.mask.weight.copy_(model.get_parameter("model.embed_tokens.weight")[60:61])
    batch = batch_of(model, TEXT)
    assert torch.equal(logits_after(learned, batch, 2), logits_after(row, batch, 2))


@pytest.mark.parametrize("layout", ["anchor", "fill_in"])
def test_a_mask_that_is_no_row_is_refused(layout: str) -> None:
    with pytest.raises(ConfigError, match="mask_token=64, and the target's embedding, .* has the rows 0 to 63"):
        draft_of(target(), mask_token=64, layout=layout)
