"""What folders of DFlash and DSpark heads share: a few Qwen3 layers over a block of tokens, which also see the target's
hidden states.

`fc` reads the hidden states of one token side by side, those of the earliest layer first: [layer 2, layer 5, ...], each
of the target's width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from decode.drafters.dspark import DSparkConfig
from train.export.layouts.base import Spec, ascending, decoder_fields, speculators_fields, token_maps
from train.export.source import Source


def shape(source: Source) -> DSparkConfig:
    """The head's, by the type it has here."""
    return cast(DSparkConfig, source.config)


def fields(source: Source, kind: str, mask_token_id: int | None, block_size: int) -> dict[str, Any]:
    """config.json: flat, as engines read a head of their own, and where the speculators library knows such a head, as
    the library nests it."""
    config, taps = shape(source), sorted(source.taps)
    layers = decoder_fields(source) | {
        "model_type": "qwen3",
        "num_hidden_layers": config.layers,
        "layer_types": ["full_attention"] * config.layers,
        "use_sliding_window": False,
        "sliding_window": None,
    }
    own = {
        "block_size": block_size,
        "mask_token_id": mask_token_id,
        "sample_from_anchor": config.layout == "anchor",
        "is_causal": False,
        "target_hidden_size": config.hidden_size,
        "num_target_layers": source.target.num_layers,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "use_aux_hidden_state": True,
        "num_aux_hidden_states": len(taps),
        # transformers counts hidden states from the embedding's on, the authors of DFlash layers
        "eagle_aux_hidden_state_layer_ids": taps,
        "target_layer_ids": [tap - 1 for tap in taps],
    }
    nested = ("mask_token_id", "target_layer_ids", "sample_from_anchor", "use_aux_hidden_state", "block_size")
    own["dflash_config"] = {name: own[name] for name in nested} | {"causal": False, "use_swa": False}
    if no_speculators(source) is None:
        # left out, the library takes layers for causal, and vLLM for not
        own |= {"aux_hidden_state_layer_ids": taps, "sliding_window_non_causal": True}
        own |= {"transformer_layer_config": layers, **speculators_fields(source, kind)}
    return layers | own


def no_speculators(source: Source) -> str | None:
    """Why the speculators library cannot read it; None where it can."""
    config = shape(source)
    if config.mask_token is None:
        return (
            "its mask is a learned vector, and the speculators library has the target's embedding alone; train with "
            "draft.head.mask_token=ID, the id of a token that no text holds"
        )
    if config.markov_rank and config.layout == "fill_in":
        return (
            "the speculators library counts in block_size the slots of a DSpark block, others the tokens that it "
            "drafts; train with draft.head.layout=anchor, where they are as many"
        )
    return None


def tensors(source: Source) -> dict[str, Tensor]:
    """The layers and what is around them, by names that are the same here and there; with a reduced vocabulary its rows
    of the output head and its ids."""
    own = {name: one for name, one in source.weights.items() if name.startswith(("layers.", "norm.", "hidden_norm."))}
    own["fc.weight"] = ascending(source.weights["fc.weight"], source.taps)
    maps = token_maps(source)
    return own | (maps | {"lm_head.weight": source.output_rows} if maps else {})


def manifest(written: Mapping[str, Any]) -> dict[str, Spec]:
    """Names and shapes of those tensors, by a config.json."""
    width, inner, head = written["hidden_size"], written["intermediate_size"], written["head_dim"]
    queries, keys = written["num_attention_heads"] * head, written["num_key_value_heads"] * head
    layer = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    each = {f"{name}.weight": size for name, size in layer.items()}
    if written.get("attention_bias"):
        each |= {f"{name}.bias": size[:1] for name, size in layer.items() if name.startswith("self_attn.") and size[1:]}
    specs = {
        f"layers.{index}.{name}": Spec(size)
        for index in range(written["num_hidden_layers"])
        for name, size in each.items()
    }
    read = num_states(written) * (written.get("target_hidden_size") or width)
    specs |= {name: Spec((width,)) for name in ("hidden_norm.weight", "norm.weight")}
    return specs | {"fc.weight": Spec((width, read))} | _vocabulary(written)


def num_tokens(written: Mapping[str, Any]) -> int:
    """Of the target. The last row of vocab_size may be one that the target does not have, for a learned mask
    (dspark.py); elsewhere it is taken for one where all others are drafted."""
    vocab, drafted = written["vocab_size"], written.get("draft_vocab_size")
    has_mask_row = drafted is not None and drafted == written.get("mask_token_id") == vocab - 1
    return written.get("target_vocab_size") or vocab - has_mask_row


def num_states(written: Mapping[str, Any]) -> int:
    """Hidden states that `fc` reads, wherever they are listed."""
    nested = written.get("dflash_config") or {}
    listed = nested.get("target_layer_ids") or written.get("target_layer_ids")
    return len(listed or written["aux_hidden_state_layer_ids"])


def _vocabulary(written: Mapping[str, Any]) -> dict[str, Spec]:
    width, vocab = written["hidden_size"], written["vocab_size"]
    drafted = written.get("draft_vocab_size") or vocab
    tokens = num_tokens(written)
    is_reduced = drafted < tokens
    specs = {
        "embed_tokens.weight": Spec((vocab, width), optional=vocab == tokens),
        "lm_head.weight": Spec((drafted, width), optional=not is_reduced),
    }
    if is_reduced:
        specs |= {"d2t": Spec((drafted,), "int64"), "t2d": Spec((tokens,), "bool", optional=True)}
    return specs
