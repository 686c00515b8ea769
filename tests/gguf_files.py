"""Tiny models as GGUF files, written as llama.cpp's converter writes them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from gguf import (
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFEndian,
    GGUFValueType,
    GGUFWriter,
    TokenType,
    get_tensor_name_map,
    quantize,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.tiny import EOS, PAD

ARCHITECTURES = {"gemma3_text": "gemma3"}
"""transformers' name -> llama.cpp's, where they differ."""
CHATML = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
CUT_TEXT = (
    "It's 12345 items:\n\n1. A  2\t\tthing costs $1,999.50\r\n\n  22 are  DON'T's (x2) "
    "\u00b2\u0664 \u00e9t\u00e9s, 7's\n "
)
"""Text in which the ways of cutting differ."""


def crossing_tokenizer() -> PreTrainedTokenizerFast:
    """One of some 350 tokens that joins any two bytes side by side in CUT_TEXT, over the ends of words, too; a word of
    it is a token that no merges make."""
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    text = whole.pre_tokenize_str(CUT_TEXT)[0][0]
    pairs = [*dict.fromkeys(itertools.pairwise(text))]
    tokens = [EOS, PAD, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, pairs), "Ġcosts"]
    inside = Tokenizer(models.BPE(vocab={one: token for token, one in enumerate(tokens)}, merges=pairs))
    return PreTrainedTokenizerFast(tokenizer_object=inside, eos_token=EOS, pad_token=PAD)


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast | None = None,
    kind: str = "F32",
    endian: GGUFEndian = GGUFEndian.LITTLE,
    **metadata: Any,
) -> Path:
    """The model in `file`, its tables in blocks of `kind` where their rows fill them; `metadata` is added, or takes the
    place of what is there, its keys written with __ for dots."""
    config = model.config.get_text_config()
    name = ARCHITECTURES.get(config.model_type, config.model_type)
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(file, metadata.pop("architecture", name), endianess=endian)
    add_sizes(writer, config, name)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer, config.vocab_size)
    for key, value in metadata.items():
        add_value(writer, key.replace("__", "."), value)
    add_tensors(writer, model, name, GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add_sizes(writer: GGUFWriter, config: Any, name: str) -> None:
    """What config.json says."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_string(f"{name}.rope.scaling.type", rope["rope_type"])
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if name.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def add_tokenizer(writer: GGUFWriter, tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> None:
    """A byte-level one, its chat template with it."""
    inside = tokenizer.backend_tokenizer
    texts = {token: text for text, token in inside.get_vocab().items()}
    special = inside.get_added_tokens_decoder()
    tokens = [texts.get(token, f"[PAD{token}]") for token in range(vocab_size)]
    kinds = [TokenType.CONTROL if token in special else TokenType.NORMAL for token in range(vocab_size)]
    merges = inside.to_str()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(_merges(merges))
    writer.add_eos_token_id(cast(int, tokenizer.eos_token_id))
    writer.add_pad_token_id(cast(int, tokenizer.pad_token_id))
    writer.add_add_bos_token(False)
    if tokenizer.chat_template:
        writer.add_chat_template(str(tokenizer.chat_template))


def _merges(content: str) -> list[str]:
    import json

    pairs = json.loads(content)["model"]["merges"]
    return [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]


def add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    """Of the type that it has in Python, in place of one that is there."""
    writer.kv_data[0].pop(key, None)
    known = GGUFValueType
    kinds = {bool: known.BOOL, int: known.UINT32, float: known.FLOAT32, str: known.STRING, list: known.ARRAY}
    writer.add_key_value(key, value, kinds[type(value)])


def add_tensors(writer: GGUFWriter, model: PreTrainedModel, name: str, kind: GGMLQuantizationType) -> None:
    """Norms stay in float32, as everywhere."""
    config = model.config.get_text_config()
    known = get_tensor_name_map(
        next(one for one, its in MODEL_ARCH_NAMES.items() if its == name), config.num_hidden_layers
    )
    for ours, values in model.state_dict().items():
        if ours == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, suffix = ours.rpartition(".")
        theirs = f"{known.get_name(stem)}.{suffix}"
        array = converted(theirs, values, config, name).float().numpy()
        if array.ndim == 2 and kind != GGMLQuantizationType.F32:
            writer.add_tensor(theirs, quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(theirs, np.ascontiguousarray(array))


def converted(name: str, values: torch.Tensor, config: Any, architecture: str) -> torch.Tensor:
    """As llama.cpp wants it: rotary pairs of Llama side by side, Gemma's norms counted from 1."""
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return values + 1
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    if architecture != "llama" or heads is None:
        return values
    return values.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(values.shape)
