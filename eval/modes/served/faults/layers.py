"""Faults in how a draft's layers are computed: keys of config.json that an engine does not read, tensors that it does
not find."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from eval.modes.served.faults.hypotheses import (
    ALL,
    HEADS,
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
_EPSILONS = (1e-6, 1e-5)
_GROUPS = {
    "fc": r"(^|\.)fc\.weight$",
    "queries, keys and values": r"[qkv]_proj\.weight$",
    "the projection behind attention": r"o_proj\.weight$",
    "gate_proj and up_proj": r"(gate|up)_proj\.weight$",
    "down_proj": r"down_proj\.weight$",
    "all layers, as where names have a prefix that is not known": r"(layers|blocks)\.",
}


def _flag(name: str, default: bool = False) -> Hypothesis:
    def variants(reading: Reading) -> Variants:
        now = bool(reading.fields.get(name, default))
        yield (
            f"{name}={str(not now).lower()}, and the folder says {str(now).lower()}",
            reading.with_fields(**{name: not now}),
        )

    guess = "vLLM takes it for true in folders of the speculators library, and others for false"
    return Hypothesis(
        f"{name} is taken otherwise", _EAGLE3, variants,
        f"the engine does not read the key: {guess}" if name == "norm_before_residual"
        else "the engine does not read the key, and leaves out a norm or feeds back the state before it",
        f"Write {name} at the top of config.json and where it is nested; older engines do not know it",
    )  # fmt: skip


def _without_norms(reading: Reading) -> Variants:
    for name in ("fc_norm", "norm_before_fc"):
        if reading.fields.get(name):
            yield f"{name} is left out", reading.with_fields(**{name: False})


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


def _epsilon(reading: Reading) -> Variants:
    for eps in _EPSILONS:
        if eps != reading.fields.get("rms_norm_eps"):
            yield f"rms_norm_eps={eps:g} for {reading.fields['rms_norm_eps']:g}", reading.with_fields(rms_norm_eps=eps)


def _halves(reading: Reading) -> Variants:
    names = reading.names(r"self_attn\.[qkv]_proj\.weight$" if reading.form == "eagle3" else r"(^|\.)fc\.weight$")
    swapped = {name: torch.cat(reading.weights[name].chunk(2, -1)[::-1], -1) for name in names}
    yield "the state first, then the embedding", reading.with_weights(swapped)


def _random(reading: Reading) -> Variants:
    for what, pattern in _GROUPS.items():
        names = [name for name in reading.names(pattern) if reading.weights[name].dim() > 1]
        if names:
            yield f"{what}, zeros", reading.with_weights(_made(reading, names, torch.zeros_like))
            yield f"{what}, random", reading.with_weights(_made(reading, names, random_like))
    matrices = [name for name in reading.weights if reading.weights[name].dim() > 1]
    yield "any of them, memory that holds no numbers", reading.with_weights(_made(reading, matrices[:1], _no_number))


def _no_number(weight: Tensor) -> Tensor:
    return torch.full_like(weight, torch.nan)


def _made(reading: Reading, names: list[str], new: Any) -> dict[str, Tensor]:
    return {name: new(reading.weights[name]) for name in names}


def _plain_norms(reading: Reading) -> Variants:
    for what, pattern in (
        ("of queries", r"q_norm\.weight$"),
        ("of keys", r"k_norm\.weight$"),
        ("of queries and keys", r"[qk]_norm\.weight$"),
        ("all", r"norm[\w.]*\.weight$"),
    ):
        names = reading.names(pattern)
        if names:
            yield f"{what}, ones", reading.with_weights(_made(reading, names, torch.ones_like))


def _precision(reading: Reading) -> Variants:
    for dtype in (torch.bfloat16, torch.float16):
        rounded = {name: weight.to(dtype).float() for name, weight in reading.weights.items()}
        if any(not torch.equal(rounded[name], weight) for name, weight in reading.weights.items()):
            yield str(dtype).removeprefix("torch."), reading.with_weights(rounded)


_MISSING = "vLLM and SGLang leave tensors random that they do not find, and SGLang skips names that it does not know"
LAYERS = (
    _flag("norm_before_residual"),
    _flag("norm_output"),
    Hypothesis(
        "the norms of EAGLE-3.1 are left out", _EAGLE3, _without_norms,
        "the engine is older than these norms, or reads their keys elsewhere",
        "Serve with vLLM 0.24 or SGLang 0.5.18 on, or train with draft.head.fc_norm=false draft.head.norm_output=false",
    ),
    Hypothesis(
        "another rotary base", _ATTENDING, _rope,
        "the engine reads rope_theta or rope_parameters where the folder says the other, or neither",
        "Write both, equal; python -m train.check compares them with the target's",
    ),
    Hypothesis(
        "another epsilon of the norms", ALL - {"medusa"}, _epsilon,
        "the engine takes its own default", "Write rms_norm_eps at the top of config.json and where it is nested",
    ),
    Hypothesis(
        "embedding and state in the other order", RECURSIVE, _halves,
        "the layer reads [state; embedding]", "Swap the halves of the columns that read both",
    ),
    Hypothesis(
        "weights that the engine did not load", HEADS | {"lm"}, _random, _MISSING,
        "Name the tensors as the engine does; python -m train.check format=ENGINE says which it would miss",
        is_random=True,
    ),
    Hypothesis(
        "weights of norms that the engine did not load", ALL - {"medusa"}, _plain_norms, _MISSING,
        "Name the tensors as the engine does; python -m train.check format=ENGINE says which it would miss",
    ),
    Hypothesis(
        "another precision", ALL, _precision,
        "the engine rounds the draft's weights; ties between tokens fall otherwise",
        "Serve in the precision that the draft was saved in (--dtype)", is_random=True,
    ),
)  # fmt: skip
