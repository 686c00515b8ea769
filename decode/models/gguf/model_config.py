"""The configuration of a model in a GGUF file, from its metadata.

transformers reads some of it: scaled rope, soft caps and the width of a head get lost there without a word, and another
model would be computed than the one that was saved. So every key of the architecture is either read here or refused.
What no key says is as llama.cpp has it, which is what such files are made for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from decode.common.errors import InputError
from decode.models.checkpoint_files import CONFIG
from decode.models.gguf.file import FREQUENCIES, GgufFile

FOLDER = "Give the folder of the model in transformers format"
FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""Our architectures have all of these."""
IGNORED = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")
"""Said by the tensors, or of no effect."""
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose scores are scaled by the width over the number of heads."""
LOCAL_ROPE = 10000.0
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What the models of Llama 3.1 to 3.3 share; the file holds what comes of it."""


class Keys:
    """Metadata of one architecture, which knows what was asked for."""

    def __init__(self, file: GgufFile, role: str) -> None:
        self.file, self.where, self.known = file, f"{role}.path={file.path}", set[str](IGNORED)

    def get(self, name: str, default: Any = None) -> Any:
        """The value; of a list that repeats one, that one. InputError for a number that is none, or infinite."""
        self.known.add(name)
        found = self.file.metadata.get(f"{self.file.architecture}.{name}", default)
        found = found[0] if isinstance(found, list) and len(set(found)) == 1 else found
        if isinstance(found, float) and not math.isfinite(found):
            raise InputError(
                f"{self.where}: {self.file.architecture}.{name} is {found}, and it should be a finite number: all that "
                f"the model computes would be NaN. Fetch the file again. {FOLDER}"
            )
        return found

    def need(self, name: str, default: Any = None) -> Any:
        """The same; InputError where it is no positive number."""
        found = self.get(name, default)
        if not isinstance(found, int | float) or found <= 0:
            raise InputError(
                f"{self.where}: {self.file.architecture}.{name} is {found!r}, and it should be one positive number for "
                f"all layers: no model could be built. Fetch the file again. {FOLDER}"
            )
        return found

    def expect(self, name: str, value: Any) -> None:
        """InputError where it is there and another."""
        found = self.get(name, value)
        if found != value:
            raise InputError(
                f"{self.where}: {self.file.architecture}.{name} is {found!r}, and models of this architecture are "
                f"computed here with {value!r}: its distributions would be others. {FOLDER}"
            )

    def refuse_rest(self) -> None:
        """InputError for keys that nobody asked for."""
        prefix = f"{self.file.architecture}."
        rest = [key for key in self.file.metadata if key.startswith(prefix) and key[len(prefix) :] not in self.known]
        if rest:
            raise InputError(
                f"{self.where} says {', '.join(f'{key}={self.file.metadata[key]!r:.40}' for key in rest[:4])}, which "
                f"is not known here: another model would be computed. {FOLDER}"
            )


def gguf_config(file: GgufFile, role: str) -> PretrainedConfig:
    """What config.json would say; InputError for an architecture or a key that is not known here."""
    keys = Keys(file, role)
    if file.architecture not in ARCHITECTURES:
        raise InputError(
            f"{role}.path={file.path} is of the architecture {file.architecture}, and of GGUF files are read here "
            f"{', '.join(sorted(ARCHITECTURES))}. {FOLDER}"
        )
    build = ARCHITECTURES[file.architecture]
    fields = _shared(keys) | build(keys)
    keys.refuse_rest()
    CONFIG.parse(json.dumps(fields).encode(), file.path)
    config = AutoConfig.for_model(**fields)
    config.name_or_path = str(file.path)
    config.dtype = getattr(torch, file.dtype)
    return config


def _shared(keys: Keys) -> dict[str, Any]:
    """Fields that all architectures have."""
    fields = {ours: keys.need(theirs) for theirs, ours in FIELDS.items()}
    heads, width = fields["num_attention_heads"], fields["hidden_size"]
    head_dim = keys.get("attention.key_length") or keys.get("rope.dimension_count") or width // heads
    keys.expect("attention.value_length", head_dim)
    keys.expect("rope.dimension_count", head_dim)
    keys.expect("attention.causal", True)
    keys.expect("expert_count", 0)
    keys.get("expert_used_count")
    names = keys.file.tensors
    rows = names["token_embd.weight"].shape[0] if "token_embd.weight" in names else 0
    return {
        **fields,
        **_tokens(keys, rows),
        "head_dim": head_dim,
        "num_key_value_heads": keys.need("attention.head_count_kv", heads),
        "vocab_size": rows,
        "tie_word_embeddings": "output.weight" not in names,
        "rope_parameters": _rope(keys),
    }


def _tokens(keys: Keys, rows: int) -> dict[str, Any]:
    """Special tokens: llama.cpp ends a text at the end of a turn, too."""
    known = keys.file.metadata
    entries = known.get("tokenizer.ggml.tokens", 0)
    if entries > rows:
        raise InputError(
            f"{keys.where} names {entries} tokens, and its embedding (token_embd.weight) has {rows} rows: the last "
            "tokens would have none. Fetch the file again"
        )
    ends = [known[f"tokenizer.ggml.{name}"] for name in ENDS if f"tokenizer.ggml.{name}" in known]
    ends = list(dict.fromkeys(ends))
    special = {"bos_token_id": known.get("tokenizer.ggml.bos_token_id"), "pad_token_id": keys.file.padding}
    return special | {"eos_token_id": ends if len(ends) > 1 else next(iter(ends), None)}


def _rope(keys: Keys) -> dict[str, Any]:
    """Rotary positions as transformers calls them."""
    kind, theta = keys.get("rope.scaling.type", "none"), keys.need("rope.freq_base", 10000.0)
    factor, before = keys.get("rope.scaling.factor"), keys.get("rope.scaling.original_context_length")
    plain = {"rope_type": "default", "rope_theta": theta}
    if kind == "none":
        return plain
    if kind == "linear" and factor:
        return plain | {"rope_type": "linear", "factor": keys.need("rope.scaling.factor")}
    if kind == "yarn" and factor and before:
        factor = keys.need("rope.scaling.factor")
        return plain | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": before}
    raise InputError(
        f"{keys.where} scales its rotary positions by {kind} with factor={factor} and "
        f"original_context_length={before}, which is not known here. {FOLDER}"
    )


def _llama(keys: Keys) -> dict[str, Any]:
    names = keys.file.tensors
    biased = {"attention_bias": "blk.0.attn_q.bias" in names, "mlp_bias": "blk.0.ffn_up.bias" in names}
    factors = keys.file.values(FREQUENCIES)
    own = {"model_type": "llama", **biased}
    return own if factors is None else own | {"rope_parameters": _llama3_rope(keys, factors)}


def _llama3_rope(keys: Keys, factors: torch.Tensor) -> dict[str, Any]:
    """The rope whose frequencies are divided by these factors, which is that of Llama 3.1 to 3.3; else InputError."""
    head_dim = 2 * len(factors)
    parameters = {
        "rope_type": "llama3",
        **LLAMA3,
        "factor": float(factors.max()),
        "rope_theta": _rope(keys)["rope_theta"],
    }
    asked = AutoConfig.for_model("llama", head_dim=head_dim, rope_parameters=parameters)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](asked, torch.device("cpu"))
    plain = parameters["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim)
    if not torch.allclose(plain / scaled, factors, rtol=1e-3):
        raise InputError(
            f"{keys.where} divides the frequencies of its rotary positions by other factors ({FREQUENCIES}) than Llama "
            f"3.1 does ({LLAMA3}). {FOLDER}"
        )
    return parameters


def _gemma(keys: Keys) -> dict[str, Any]:
    layers, heads = keys.need("block_count"), keys.need("attention.head_count")
    head_dim = keys.get("attention.key_length") or 256
    is_largest = layers == LARGEST_GEMMA[keys.file.architecture]
    return {
        "head_dim": head_dim,
        "query_pre_attn_scalar": keys.need("embedding_length") // heads if is_largest else head_dim,
        "sliding_window": keys.get("attention.sliding_window") or 4096,
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
    }


def _gemma2(keys: Keys) -> dict[str, Any]:
    caps = {"final_logit_softcapping": 30.0, "attn_logit_softcapping": keys.get("attn_logit_softcapping", 50.0)}
    own = {name: value for name, value in _gemma(keys).items() if value is not None}
    return {"model_type": "gemma2", **caps, **own}


def _gemma3(keys: Keys) -> dict[str, Any]:
    """Five layers with a window, then one of all tokens, whose rope alone is scaled."""
    local = {"rope_type": "default", "rope_theta": keys.need("rope.freq_base_swa", LOCAL_ROPE)}
    every = keys.need("attention.sliding_window_pattern", 6) if keys.get("attention.sliding_window") else 1
    layers = range(1, keys.need("block_count") + 1)
    return _gemma(keys) | {
        "model_type": "gemma3_text",
        "layer_types": ["sliding_attention" if layer % every else "full_attention" for layer in layers],
        "rope_parameters": {"sliding_attention": local, "full_attention": _rope(keys)},
    }


def _named(model_type: str) -> Callable[[Keys], dict[str, Any]]:
    return lambda keys: {"model_type": model_type}


ARCHITECTURES: dict[str, Callable[[Keys], dict[str, Any]]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "llama": _llama,
    "qwen2": _named("qwen2"),
    "qwen3": _named("qwen3"),
}
"""As llama.cpp calls it -> the fields that are its own; each is tested against what llama.cpp's converter makes of a
model of transformers."""
