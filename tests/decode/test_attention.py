"""Ways to attend: the numbers of sdpa over copied keys, windows with sinks, and which models take which."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import FalconConfig, FalconForCausalLM, PreTrainedModel

from decode import generate, load_drafter
from decode.common.errors import InputError
from decode.config import ModelConfig
from decode.drafters.base import Batch, Context
from decode.drafters.eagle3 import Eagle3Draft
from decode.drafters.layers import Attention, Rotary, under
from decode.drafters.lm import LMDraft
from decode.forward.attention import WAYS, attending, layer_masks, long_way, products_are_faster, short_way
from decode.forward.window import Window, own_window, set_window
from decode.loop import Loop
from decode.models.describe import describe_model
from decode.requests import Request
from decode.trees.tree import Tree
from decode.trees.tree_plans import Shape, chain, k_ary
from tests.decode.heads import VARIANTS, batch_of, random_head
from tests.tiers import by_default
from tests.tiny import tiny_llama

ROWS, HEADS, TOKENS, SLOTS, SIZE = 2, 6, 3, 7, 4
MASKS = {
    "seen": torch.rand(ROWS, 1, TOKENS, SLOTS, generator=torch.Generator().manual_seed(0)) > 0.5,
    "added": torch.rand(ROWS, 1, TOKENS, SLOTS, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
    "of every head": torch.rand(
        ROWS, HEADS, TOKENS, SLOTS, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    ),
}
MASKS["seen"][..., 0] = True


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_numbers_of_copied_keys(way: str, mask: str, kv_heads: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(ROWS, HEADS, TOKENS, SIZE, dtype=torch.float64)
    key, value = torch.randn(2, ROWS, kv_heads, SLOTS, SIZE, dtype=torch.float64)
    copies = (one.repeat_interleave(HEADS // kv_heads, 1) for one in (key, value))
    want = scaled_dot_product_attention(query, *copies, attn_mask=MASKS[mask], scale=0.3).transpose(1, 2)
    have, _ = WAYS[way](nn.Module(), query, key, value, MASKS[mask], scaling=0.3)
    torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)


def test_grouped_queries_never_have_their_keys_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, grouped = (tiny_llama(num_heads=4, num_key_value_heads=heads) for heads in (4, 2))
    for faster in (False, True):
        monkeypatch.setattr("decode.forward.attention.products_are_faster", lambda dtype, faster=faster: faster)
        batch = "draftsmith_products" if faster else None
        assert (short_way(plain, 1), short_way(plain, 4), long_way(plain)) == (None, batch, None)
        assert short_way(grouped, 1) == long_way(grouped) == "draftsmith_folded"
        assert short_way(grouped, 4) == (batch or "draftsmith_folded")


def test_a_model_that_looks_for_the_name_of_its_attention_keeps_it() -> None:
    config = FalconConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, vocab_size=64)
    model = FalconForCausalLM(config).eval()
    assert short_way(model, 4) is long_way(model) is None


def test_a_process_measures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    products_are_faster.cache_clear()
    calls: list[None] = []
    real = WAYS["draftsmith_folded"]
    monkeypatch.setitem(WAYS, "draftsmith_folded", lambda *args: calls.append(None) or real(*args))
    first = products_are_faster(torch.float32)
    taken = len(calls)
    assert taken
    assert products_are_faster(torch.float32) == first
    assert len(calls) == taken


def test_a_failing_pass_leaves_the_model_its_own_attention() -> None:
    model = tiny_llama()
    with pytest.raises(ZeroDivisionError), attending(model, "draftsmith_folded"):
        raise ZeroDivisionError
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("is_training", [False, True])
def test_masks_are_numbers_where_every_layer_would_make_them(is_training: bool) -> None:
    """On a CPU, and where layers would keep them for the backward pass."""
    model = tiny_llama()
    seen, at = torch.ones(1, 2, 3, dtype=torch.bool), torch.arange(3)[None]
    made = layer_masks(model.config, seen, at[:, 1:], at, model.dtype)
    assert isinstance(made, Tensor)
    assert made.dtype == model.dtype
    with torch.set_grad_enabled(is_training):
        meta = layer_masks(model.config, seen.to("meta"), at[:, 1:].to("meta"), at.to("meta"), model.dtype)
    assert isinstance(meta, Tensor)
    assert meta.dtype == (model.dtype if is_training else torch.bool)


class Kernels(TorchFunctionMode):
    """A machine whose fast kernels take a mask or groups of queries, never both: with the pair CUDA falls back to one
    that writes down all scores in float32. Notes the shapes of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[torch.Size] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is scaled_dot_product_attention:
            assert given.get("attn_mask") is None or not given.get("enable_gqa"), "a mask and groups at once"
            self.keys.append(args[1].shape)
        return func(*args, **given)


@pytest.mark.parametrize("name", by_default(3, VARIANTS))
def test_no_head_asks_for_a_mask_and_groups_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.forward.runner.CAPTURE_AFTER", 10**9)
    target = tiny_llama(num_heads=4, num_key_value_heads=2).requires_grad_(False)
    head = random_head(name, target)
    text = list(range(40))
    with Kernels() as seen:
        for step in head.unroll(batch_of(target, head, [text])):
            step.head(step.hidden)
        generate(target, head, torch.tensor([text]), max_new_tokens=6, eos_token_id=(), seed=0)
    assert seen.keys


@pytest.mark.parametrize(("width", "copied"), [(1, False), (5, False), (16, False), (17, True), (100, True)])
def test_keys_are_copied_on_a_card_where_that_is_less_than_copies_of_the_mask(width: int, copied: bool) -> None:
    layer = Attention(32, 4, 2, 8, Rotary(8, {"rope_type": "default", "rope_theta": 1e4}, 256)).to("meta")
    x, positions = torch.empty(2, width, 32, device="meta"), torch.empty(2, width, dtype=torch.long, device="meta")
    visible = torch.empty(1, width, width, dtype=torch.bool, device="meta")
    with Kernels() as seen:
        layer(x, positions, lambda keys, values: under(keys, values, visible))
    assert seen.keys == [(2, 4 if copied else 2, width, 8)]


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
@pytest.mark.parametrize("shape", by_default(1, ["tree", "chain"]))
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
