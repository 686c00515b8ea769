"""A pass that resumes from hidden states in the cache gives what the whole pass gives: logits, keys and values."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.common.errors import InputError
from decode.forward.capture import capture
from decode.forward.resume import LowerPass, ResumedPass, layers_of, refuse_inseparable
from decode.forward.target import CachedModel
from decode.trees.tree import Tree, chain_parents
from tests.architectures import random_model
from tests.tiny import MODELS, tiny_llama

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
