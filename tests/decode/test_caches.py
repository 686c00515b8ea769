"""Caches: laid out for the slots in use, resumed from hidden states, and kept between calls over one growing text."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode import Conversation, generate
from decode.common.errors import ConfigError, InputError
from decode.drafters.base import Drafter
from decode.drafters.lm import LMDraft
from decode.forward.cache import SlotCache
from decode.forward.capture import capture
from decode.forward.resume import LowerPass, ResumedPass, layers_of, refuse_inseparable
from decode.forward.slot_stack import Shape, SlotStack, bucket, cheap_slots
from decode.forward.target import CachedModel
from decode.trees.tree import Tree, chain_parents
from tests.architectures import random_model
from tests.decode.checks import VOCAB, check_cache, ragged_prompts
from tests.decode.heads import VARIANTS, random_head
from tests.tiers import by_default
from tests.tiny import MODELS, tiny_llama


def test_sizes_are_two_a_doubling() -> None:
    sizes = [bucket(end) for end in range(1, 1000)]
    assert sorted(set(sizes)) == [64, 96, 128, 192, 256, 384, 512, 768, 1024]
    assert all(end <= size for end, size in enumerate(sizes, 1))


@pytest.mark.parametrize(
    ("weights", "slot", "rows", "slots"),
    [
        (538_000_000, 46_080, 1, 512),  # SmolLM2-135M in float32
        (538_000_000, 4 * 46_080, 4, 128),
        (538_000_000, 8 * 46_080, 8, 64),
        (16_000_000_000, 131_072, 1, 1024),  # an 8B model in bfloat16
        (16_000_000_000, 32 * 131_072, 32, 64),
        (100_000, 4096, 1, 64),
    ],
)
def test_few_rows_look_at_as_many_slots_as_cost_nothing(weights: int, slot: int, rows: int, slots: int) -> None:
    assert cheap_slots(weights, slot, rows) == slots


def test_a_runner_counts_its_weights_and_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.forward.slot_stack.FIRST_BUCKET", 8)
    model = MODELS["llama"]()
    runner = CachedModel(model, 1, 256)
    runner.visible(3)
    width = 2 * sum(layer.keys[0, :, 0].numel() for layer in runner.cache.slot_layers)  # type: ignore[index]
    weights = sum(one.numel() for one in model.parameters())
    assert runner.cache.num_slots == cheap_slots(weights, width, 1) > 8


def test_slots_in_use_lie_together_and_keep_what_they_hold() -> None:
    stack = SlotStack(3, Shape(2, 2, 4, torch.float32, torch.device("cpu")), 64)
    want = torch.randn(3, 2, 2, 64, 4)
    held = 0
    for slots in (8, 12, 64, 16, 24):
        stack.lay_out(slots)
        assert stack.view.is_contiguous()
        held = min(held, slots)
        assert torch.equal(stack.view[..., :held, :], want[..., :held, :])
        assert not stack.view[..., held:, :].any()
        stack.view[:] = want[..., :slots, :]
        held = slots


def test_a_long_row_that_has_left_is_no_longer_looked_at() -> None:
    model, tokens = MODELS["llama"](), torch.tensor([[5], [9]])
    runner = CachedModel(model, 2, 256)
    seen = []
    with torch.inference_mode():
        for start in (3, 70, 130, 100, 3):
            runner.chain(tokens, torch.tensor([[start], [2]]), start)
            seen.append(runner.cache.num_slots)
            assert all(layer.keys.is_contiguous() for layer in runner.cache.slot_layers)  # type: ignore[union-attr]
    assert seen == [64, 96, 192, 192, 64]


@pytest.mark.parametrize("name", by_default(1, ["gemma3", "llama"]))
def test_the_cache_is_that_of_a_fresh_prefill_however_often_it_has_grown(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode.forward.slot_stack.FIRST_BUCKET", 4)
    laid, lay_out = [], SlotCache.lay_out

    def noted(cache: SlotCache, slots: int) -> None:
        laid.append((cache, slots))
        lay_out(cache, slots)

    monkeypatch.setattr(SlotCache, "lay_out", noted)
    check_cache("tree", name)
    last = [slots for cache, slots in laid if cache is laid[-1][0]]
    assert sum(before < after for before, after in pairwise(last)) > 3


@pytest.mark.parametrize("tree", by_default(1, ["2x2", "chain"]))
@pytest.mark.parametrize("name", by_default(2, ["lm", "eagle3", *(name for name in VARIANTS if name != "eagle3")]))
def test_drafts_know_what_they_have_read_however_often_their_cache_has_grown(
    name: str, tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, mask = ragged_prompts(2)
    found = []
    for first in (256, 8):
        monkeypatch.setattr("decode.forward.slot_stack.FIRST_BUCKET", first)
        model = tiny_llama(num_layers=3, dtype=torch.float64).requires_grad_(False)
        near = tiny_llama(num_layers=3, dtype=torch.float64).requires_grad_(False)
        near.lm_head.weight.data += 0.1 * torch.randn(
            near.lm_head.weight.shape, generator=torch.Generator().manual_seed(0)
        )
        draft: Drafter = LMDraft(near) if name == "lm" else random_head(name, model)
        settings = {"num_draft_tokens": 2} if tree == "chain" else {"tree": tree}
        out = generate(model, draft, ids, mask, max_new_tokens=40, eos_token_id=(), seed=0, **settings)  # type: ignore[arg-type]
        found.append((out.sequences.tolist(), [vars(one) for one in out.stats.rounds]))
    assert found[0] == found[1]


PROMPTS = [[5, 9, 2, 7, 30, 4], [1, 8], [11, 60, 3, 3]]
STARTS = [5, 1, 3]
SHAPES = {"chain": chain_parents(5), "tree": (-1, 0, 0, 1, 1, 2, 3)}
SLOTS = 32


def prefilled(model: PreTrainedModel) -> CachedModel:
    runner = CachedModel(model, len(PROMPTS), SLOTS)
    ids = torch.tensor([row + [0] * (8 - len(row)) for row in PROMPTS])
    with torch.no_grad():
        runner.prefill(ids, [0] * len(PROMPTS), STARTS)
    runner.cache.hold(SLOTS)
    return runner


def nodes(parents: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs of a NodePass over a tree whose node 0 is each prompt's last token."""
    tokens = torch.randint(0, 64, (len(PROMPTS), len(parents)), generator=torch.Generator().manual_seed(seed))
    tokens[:, 0] = torch.tensor([row[-1] for row in PROMPTS])
    tree = Tree(tokens, parents)
    shape = (len(PROMPTS), -1)
    return tokens, torch.tensor(STARTS)[:, None], tree.depths.expand(*shape), tree.ancestors.expand(*shape, -1)


def held(runner: CachedModel) -> list[Tensor]:
    return [part for layer in runner.cache.slot_layers for part in (layer.keys, layer.values) if part is not None]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3", "gpt2", "gpt_neox"])
def test_lower_and_resumed_pass_are_the_whole_pass(name: str, shape: str) -> None:
    model, inputs = MODELS[name](), nodes(SHAPES[shape])
    for num_lower in range(1, len(layers_of(model))):
        whole, parted = prefilled(model), prefilled(model)
        with torch.inference_mode():
            (want,) = whole.node_pass(SLOTS)(*inputs)
            LowerPass(parted.node_pass(SLOTS), num_lower)(*inputs)
            (have,) = ResumedPass(parted.node_pass(SLOTS), num_lower)(*inputs)
        torch.testing.assert_close(have, want, rtol=0, atol=1e-12)
        for ours, theirs in zip(held(parted), held(whole), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_nodes_drafted_one_by_one_are_verified_together() -> None:
    """As a target drafts for itself: each lower pass sees the nodes before, the resumed one goes over them all, and no
    layer runs twice."""
    model, (tokens, starts, depths, above) = MODELS["mistral"](), nodes(SHAPES["tree"])
    whole, parted = prefilled(model), prefilled(model)
    read: list[tuple[int, int]] = []
    with torch.inference_mode():
        (want,) = whole.node_pass(SLOTS)(tokens, starts, depths, above)
        lower = LowerPass(parted.node_pass(SLOTS), 1)
        for node in range(tokens.shape[1]):
            here = slice(node, node + 1)
            lower(tokens[:, here], starts, depths[:, here], above[:, here, : node + 1])
        resumed = ResumedPass(parted.node_pass(SLOTS), 1)
        for index, layer in enumerate(cast(Any, layers_of(model))):
            layer.self_attn.q_proj.register_forward_pre_hook(
                lambda _, given, i=index: read.append((i, given[0].shape[1]))
            )
        (have,) = resumed(tokens, starts, depths, above)
    assert read == [(1, tokens.shape[1])]
    torch.testing.assert_close(have, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_lower_pass_gives_the_logits_of_a_model_that_ends_there(name: str) -> None:
    model: Any = MODELS[name]()
    inputs = nodes(SHAPES["chain"])
    with torch.inference_mode():
        (have,) = LowerPass(prefilled(model).node_pass(SLOTS), 1)(*inputs)
        del cast(nn.ModuleList, model.transformer.h if name == "gpt2" else model.model.layers)[1:]
        model.config.num_hidden_layers = 1
        for row, prompt in enumerate(PROMPTS):
            text = torch.tensor([[*prompt, *inputs[0][row, 1:].tolist()]])
            torch.testing.assert_close(have[row], model(text).logits[0, len(prompt) - 1 :], rtol=0, atol=1e-10)


def test_the_model_is_left_as_it_was_also_by_a_pass_that_fails() -> None:
    model = tiny_llama(num_layers=2, dtype=torch.float64)
    before = [dict(vars(layer)) for layer in layers_of(model)]
    lower, (tokens, starts, depths, above) = LowerPass(prefilled(model).node_pass(SLOTS), 1), nodes(SHAPES["chain"])
    with torch.inference_mode(), pytest.raises(IndexError):
        lower(tokens + 10_000, starts, depths, above)
    assert [dict(vars(layer)) for layer in layers_of(model)] == before


def test_both_halves_are_captured() -> None:
    """At other tokens the captures give what the passes give, each over a cache of its own."""
    model, first, other = (
        tiny_llama(num_layers=3).requires_grad_(False),
        nodes(SHAPES["tree"]),
        nodes(SHAPES["tree"], 1),
    )
    ours, plain = prefilled(model), prefilled(model)
    later = (first[0], first[1] + 1, *first[2:])
    made = [half(ours.node_pass(SLOTS), 2) for half in (LowerPass, ResumedPass)]
    captured = [capture(half, first, later, ours.packing) for half in made]
    with torch.inference_mode():
        have = [replay(*other)[0].clone() for replay in captured]
        want = [half(plain.node_pass(SLOTS), 2)(*other)[0] for half in (LowerPass, ResumedPass)]
    for one, that in zip(have, want, strict=True):
        torch.testing.assert_close(one, that, rtol=1e-4, atol=1e-4)


class Carries(nn.Module):
    """A layer that adds what the first layer has left beside the hidden states."""

    def __init__(self, layer: nn.Module, beside: list[Tensor]) -> None:
        super().__init__()
        self.layer, self.beside = layer, beside

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        """hidden_states (B, T, d) -> (B, T, d)."""
        self.beside.append(hidden_states)
        return self.layer(hidden_states + self.beside[0], *args, **kwargs)


def test_a_model_whose_layers_share_more_than_hidden_states_is_refused() -> None:
    beside: list[Tensor] = []
    model = tiny_llama(num_layers=2, dtype=torch.float64)
    for index, layer in enumerate(layers_of(model)):
        model.model.layers[index] = Carries(layer, beside)
    model.register_forward_pre_hook(lambda *_: beside.clear())
    with pytest.raises(InputError, match=r"cannot be parted behind layer 1: its logits differ by up to"):
        refuse_inseparable(model, layers_of(model), 1)


@pytest.mark.parametrize("num_lower", [0, 2])
def test_halves_without_layers_are_refused(num_lower: int) -> None:
    model = tiny_llama(num_layers=2)
    with pytest.raises(InputError, match=f"behind {num_lower} layers, and LlamaForCausalLM has 2.*Choose 1 to 1"):
        refuse_inseparable(model, layers_of(model), num_lower)


def test_a_model_without_a_list_of_layers_is_refused() -> None:
    model = random_model("gptj")
    model.config.n_layer = 7
    with pytest.raises(InputError, match="GPTJForCausalLM has 0 lists of 7 modules"):
        layers_of(model)


TOLD = [0, 1, 7, 120]
"""New tokens of each prompt; the last one outgrows the first cache, of 256 slots."""


def target(dtype: torch.dtype = torch.float64) -> Any:
    return tiny_llama(VOCAB, num_layers=3, dtype=dtype, max_position_embeddings=1024).requires_grad_(False)


def drafters(model: Any) -> dict[str, Any]:
    draft = tiny_llama(VOCAB, num_layers=1, seed=3, dtype=model.dtype, max_position_embeddings=1024)
    near = tiny_llama(VOCAB, num_layers=3, dtype=model.dtype, max_position_embeddings=1024)
    near.lm_head.weight.data += 0.1 * torch.randn_like(near.lm_head.weight)
    heads = {name: random_head(name, model) for name in ("eagle3", "medusa")}
    return {"none": None, "unlike": LMDraft(draft), "near": LMDraft(near), **heads}


def grown(ids: Tensor, new: int) -> Tensor:
    more = torch.randint(0, VOCAB, (1, new), generator=torch.Generator().manual_seed(new))
    return torch.cat([ids, more], 1)


@pytest.mark.parametrize(
    ("name", "tree", "dtype"),
    by_default(
        2,
        [
            ("eagle3", "2x2x1", torch.float64),
            ("none", "chain", torch.float32),
            ("near", "chain", torch.float64),
            ("near", "2x2x1", torch.float32),
            ("unlike", "dynamic", torch.float64),
            ("medusa", "chain", torch.float32),
            ("near", "2x2x1", torch.float64),
        ],
    ),
)
def test_each_turn_reads_what_is_new_and_writes_what_a_fresh_call_writes(name: str, tree: str, dtype: Any) -> None:
    model = target(dtype)
    drafter, conversation, ids = drafters(model)[name], Conversation(), torch.arange(90)[None] % VOCAB
    settings: dict[str, Any] = {"max_new_tokens": 24, "tree": tree, "num_draft_tokens": 3, "eos_token_id": (9, 23)}
    for turn, new in enumerate(TOLD):
        ids = grown(ids, new)
        out = generate(model, drafter, ids, seed=turn, conversation=conversation, **settings)
        fresh = generate(model, drafter, ids, seed=turn, **settings)
        assert torch.equal(out.sequences, fresh.sequences)
        assert out.stats.num_prefilled == (new if turn else 89)
        assert fresh.stats.num_prefilled == ids.shape[1] - 1
        assert conversation.ids == out.sequences[0].tolist()
        if name == "near" and not turn:
            assert any(0 < one.accepted < one.drafted for one in out.stats.rounds), "nothing was accepted in part"
        ids = out.sequences


@pytest.mark.usefixtures("uncaptured")
def test_a_prompt_that_parts_from_the_text_continues_from_what_both_share() -> None:
    model, conversation, ids = target(), Conversation(), torch.arange(20)[None]
    draft = drafters(model)["near"]
    call: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": (), "seed": 3}
    generate(model, draft, ids, conversation=conversation, **call)
    for changed in (12, 0):
        other = ids.clone()
        other[0, changed] = 63
        out = generate(model, draft, other, conversation=conversation, **call)
        assert torch.equal(out.sequences, generate(model, draft, other, **call).sequences)
        assert out.stats.num_prefilled == 19 - changed
    shorter = generate(model, draft, other[:, :5], conversation=conversation, **call)
    assert torch.equal(shorter.sequences, generate(model, draft, other[:, :5], **call).sequences)
    assert shorter.stats.num_prefilled == 0


def test_a_call_that_failed_leaves_what_it_did_not_write_over() -> None:
    model, conversation, ids = target(), Conversation(), torch.arange(20)[None]
    call: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": (), "seed": 3}
    generate(model, None, ids, conversation=conversation, **call)

    def fail(event: Any) -> None:
        raise RuntimeError("stopped by the caller")

    other = torch.cat([ids[:, :15], ids[:, :9]], 1)
    with pytest.raises(RuntimeError, match="stopped by the caller"):
        generate(model, None, other, conversation=conversation, observer=fail, **call)
    out = generate(model, None, ids, conversation=conversation, **call)
    assert torch.equal(out.sequences, generate(model, None, ids, **call).sequences)
    assert out.stats.num_prefilled == 19 - 15


@pytest.mark.usefixtures("uncaptured")
def test_other_calls_meanwhile_do_not_write_into_it() -> None:
    model, ids = target(), torch.arange(20)[None]
    both = (Conversation(), Conversation())
    call: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": (), "seed": 3}
    texts = [ids, ids + 20]
    for _ in range(3):
        for at, conversation in enumerate(both):
            want = generate(model, None, texts[at], **call).sequences
            texts[at] = generate(model, None, texts[at], conversation=conversation, **call).sequences
            assert torch.equal(texts[at], want)


def test_what_a_conversation_cannot_be_used_for_is_refused() -> None:
    model, ids = target(), torch.arange(9)[None]
    call: dict[str, Any] = {"max_new_tokens": 2, "seed": 0}
    begun, draft = Conversation(), LMDraft(tiny_llama(VOCAB, num_layers=1, dtype=torch.float64))
    generate(model, None, ids, conversation=begun, **call)

    def again(event: Any) -> None:
        generate(model, None, ids, conversation=begun, **call)

    refused: list[tuple[str, tuple[Any, Any, Tensor], dict[str, Any]]] = [
        ("one text, and 2 sequences", (model, None, ids.repeat(2, 1)), {}),
        ("one text, and 3 sequences", (model, None, ids), {"num_return_sequences": 3}),
        ("strict=True", (model, None, ids), {"strict": True}),
        ("of type list", (model, None, ids), {"conversation": [1]}),
        ("another model", (target(), None, ids), {}),
        ("another drafter", (model, draft, ids), {}),
        ("in use by another call", (model, None, ids), {"observer": again}),
    ]
    for words, (target_model, drafter, prompt), settings in refused:
        asked: dict[str, Any] = {"conversation": begun} | call | settings
        with pytest.raises(ConfigError, match=words):
            generate(target_model, drafter, prompt, **asked)
    model.lm_head.weight.data = model.lm_head.weight + 1
    with pytest.raises(ConfigError, match="changed since this conversation began"):
        generate(model, None, ids, conversation=begun, **call)


def test_a_copy_begins_empty_and_disturbs_nothing() -> None:
    """Two conversations over one cache wrote over each other's keys: the first one went on in another text."""
    model, conversation = tiny_llama(dtype=torch.float64), Conversation()
    ids = torch.tensor([[5, 9, 2, 7]])
    call: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": (), "seed": 0}
    begun = generate(model, None, ids, conversation=conversation, **call).sequences
    for branch in (copy.copy(conversation), copy.deepcopy(conversation)):
        generate(model, None, torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]]), conversation=branch, **call)
    longer = torch.cat([begun, ids], 1)
    went_on = generate(model, None, longer, conversation=conversation, **call)
    assert torch.equal(went_on.sequences, generate(model, None, longer, **call).sequences)
