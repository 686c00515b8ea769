"""Faults in how a draft is computed: keys of config.json that an engine does not read, and heads and slots of a block
that it takes otherwise."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from eval.modes.served.faults.reading import (
    ALL,
    BLOCKS,
    RECURSIVE,
    Hypothesis,
    Reading,
    Variants,
    random_like,
)

_EAGLE3 = frozenset({"eagle3"})
_ATTENDING = ALL - {"medusa"}
_THETAS = (1e4, 5e5, 1e6)
"""transformers' default, and those of Llama 3 and of Qwen."""
_MEDUSA, _LM = frozenset({"medusa"}), frozenset({"lm"})
_HEAD = r"^(blocks|lm_heads)\.(\d+)\."


def _flag(name: str, effect: str) -> Hypothesis:
    def variants(reading: Reading) -> Variants:
        now = bool(reading.fields.get(name, False))
        words = f"{name}={str(not now).lower()}, and the folder says {str(now).lower()}"
        yield words, reading.with_fields(**{name: not now})

    return Hypothesis(
        f"{name} is taken otherwise", _EAGLE3, variants, f"the engine does not read the key{effect}",
        f"Write {name} at the top of config.json and where it is nested; older engines do not know it",
    )  # fmt: skip


def _rope(reading: Reading) -> Variants:
    own = _rope_of(reading.fields)
    for theta in _THETAS:
        if theta != own.get("rope_theta"):
            changed = {"rope_theta": theta, "rope_parameters": {**own, "rope_theta": theta}}
            yield f"rope_theta={theta:g} for {own.get('rope_theta', 1e4):g}", reading.with_fields(**changed)
    if own.get("rope_type", "default") != "default":
        plain = {"rope_type": "default", "rope_theta": own.get("rope_theta", 1e4)}
        changed = {"rope_scaling": None, "rope_parameters": plain}
        yield f"no scaling for rope_type={own['rope_type']}", reading.with_fields(**changed)


def _rope_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    theta = {"rope_theta": fields["rope_theta"]} if "rope_theta" in fields else {}
    return {**theta, **(fields.get("rope_scaling") or {}), **(fields.get("rope_parameters") or {})}


def _halves(reading: Reading) -> Variants:
    names = reading.names(r"self_attn\.[qkv]_proj\.weight$" if reading.form == "eagle3" else r"(^|\.)fc\.weight$")
    swapped = reading.changed(names, lambda weight: torch.cat(weight.chunk(2, -1)[::-1], -1))
    yield "the state first, then the embedding", swapped


def _without_biases(reading: Reading) -> Variants:
    names = reading.names(r"^blocks\..*\.bias$")
    if any(reading.weights[name].any() for name in names):
        yield "those of the residual layers", reading.changed(names, torch.zeros_like)


def _other_order(reading: Reading) -> Variants:
    own = list(range(reading.depth or 1))
    for one in own[:-1]:
        swapped = [*own[:one], one + 1, one, *own[one + 2 :]]
        yield f"heads {one + 1} and {one + 2} swapped", _ordered(reading, swapped)
    if len(own) > 2:
        yield "the last one first", _ordered(reading, own[::-1])


def _ordered(reading: Reading, order: list[int]) -> Reading:
    """Head i is that of order[i]; a shared output head stays."""
    shared = reading.fields.get("original_lm_head")

    def source(name: str) -> str:
        if shared and name.startswith("lm_heads"):
            return name
        return re.sub(_HEAD, lambda match: f"{match[1]}.{order[int(match[2])]}.", name)

    return reading.with_weights({name: reading.weights[source(name)] for name in reading.weights})


def _lost_head(reading: Reading) -> Variants:
    for head in range(reading.depth or 0):
        names = reading.names(rf"^blocks\.{head}\.")
        yield f"head {head + 1}, zeros", reading.changed(names, torch.zeros_like)
        yield f"head {head + 1}, random", reading.changed(names, random_like)


def _more_layers(reading: Reading) -> Variants:
    """As many as the target has: vLLM adds up nothing, it takes the last key that holds `num` and `layers`."""
    own = len(reading.names(r"^blocks\.0\.layers\.\d+\.weight$"))
    generator, width, added = torch.Generator().manual_seed(0), reading.fields["hidden_size"], {}
    for head in range(reading.depth or 0):
        for layer in range(own, reading.num_layers):
            made = 2 * torch.rand(width, width, generator=generator) - 1  # as torch.nn.Linear begins
            added[f"blocks.{head}.layers.{layer}.weight"] = made / width**0.5
    yield f"{reading.num_layers} in place of {own}", reading.with_weights(added)


def _mask(reading: Reading) -> Variants:
    rows = reading.weights.get("embed_tokens.weight", reading.served.embedding)
    yield "the row of token 0", reading.with_served(mask=rows[:1])
    yield "zeros", reading.with_served(mask=torch.zeros_like(rows[:1]))
    token = reading.fields.get("mask_token_id")
    if isinstance(token, int) and 0 <= token < len(rows):
        yield (
            f"the row of token {token}, where the folder has one that was learned",
            reading.with_served(mask=rows[token : token + 1]),
        )


def _causal(reading: Reading) -> Variants:
    nested = reading.fields.get("dflash_config") or {}
    otherwise = not reading.fields.get("is_causal", nested.get("causal"))
    what = "each sees those before it alone" if otherwise else "each sees all others"
    yield what, reading.with_fields(dflash_config={**nested, "causal": otherwise}, is_causal=otherwise)


def _anchored(reading: Reading) -> Variants:
    now = bool(reading.fields.get("sample_from_anchor", True))
    yield f"sample_from_anchor={str(not now).lower()}", reading.with_fields(sample_from_anchor=not now)


def _plain_dflash(reading: Reading) -> Variants:
    """So vLLM's first runner, the only one without a GPU, drafts with a folder of DFlash2."""
    unchosen = reading.changed(reading.names(r"successor_codebook$"), torch.zeros_like)
    if reading.form == "lilicorr":
        told = reading.fields.get("dflash_config") or {}
        unchosen = reading.with_fields(dflash_config={**told, "lilicorr_enabled": False})
    yield "no choice among the candidates", unchosen
    kernels, moving = reading.names(r"_conv\.base_kernel$"), reading.names(r"_conv\.kernel_projection\.weight$")
    if kernels:
        for what, kept in (("no convolutions", reading), ("neither choice nor convolutions", unchosen)):
            yield what, kept.changed(kernels, _first_tap).changed(moving, torch.zeros_like)


def _first_tap(kernel: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(kernel).index_fill(1, torch.tensor([0]), 1.0)


def _untied(reading: Reading) -> Variants:
    if "lm_head.weight" not in reading.weights and reading.fields.get("tie_word_embeddings"):
        yield "an output head of its own, random", reading.with_fields(tie_word_embeddings=False)


LAYERS = (
    _flag(
        "norm_before_residual",
        ": vLLM takes it for true in folders of the speculators library, and others for false",
    ),
    _flag("norm_output", ", and leaves out a norm or feeds back the state before it"),
    Hypothesis(
        "another rotary base", _ATTENDING, _rope,
        "the engine reads rope_theta or rope_parameters where the folder says the other, or neither",
        "Write both, equal; python -m train.check compares them with the target's",
    ),
    Hypothesis(
        "embedding and state in the other order", RECURSIVE, _halves,
        "the layer reads [state; embedding]", "Swap the halves of the columns that read both",
    ),
)  # fmt: skip
OF_FORMS = (
    Hypothesis(
        "Medusa's biases are dropped", _MEDUSA, _without_biases,
        "without medusa_fc_bias=true vLLM builds residual layers without biases, and skips those of the folder",
        "Write medusa_fc_bias=true in config.json",
    ),
    Hypothesis(
        "Medusa heads out of order", _MEDUSA, _other_order,
        "a head drafts the token of another position", "Number the heads by the position that each drafts, from 0",
    ),
    Hypothesis(
        "a Medusa head that the engine did not load", _MEDUSA, _lost_head,
        "its position, and all behind it, draft random tokens", "Write every head, or ask for fewer draft tokens",
        is_random=True,
    ),
    Hypothesis(
        "Medusa heads of more layers than they have", _MEDUSA, _more_layers,
        "vLLM takes every key of config.json that holds num and layers for their number, and leaves the others random",
        "Leave keys such as num_target_layers out of config.json", is_random=True,
    ),
    Hypothesis(
        "another mask", BLOCKS, _mask,
        "slots that are not drafted yet begin from a row that the draft does not know",
        "Ship mask_embedding.pt, or train with draft.head.mask_token=ID",
    ),
    Hypothesis(
        "a causal block", BLOCKS, _causal,
        "slots of a block do not see those behind them", "Write dflash_config.causal=false and is_causal=false",
    ),
    Hypothesis(
        "slots of the block stand for other positions", frozenset({"dspark"}), _anchored,
        "the first slot drafts, or does not, against what was trained (vLLM issue 56792)",
        "Write sample_from_anchor as trained, true for draft.head.layout=anchor, at the top and where it is nested",
    ),
    Hypothesis(
        "a block drafted as DFlash's", frozenset({"dflash2", "lilicorr"}), _plain_dflash,
        "the engine knows the folder's blocks and not what chooses between their tokens",
        "Serve with an engine that loads this form, vLLM 0.32 with its second runner (on a GPU), or train draft=dflash",
    ),
    Hypothesis(
        "an untied output head", _LM, _untied,
        "the folder ties it to the embedding, and the engine leaves it random",
        "Write tie_word_embeddings=true, or ship lm_head.weight", is_random=True,
    ),
)  # fmt: skip
