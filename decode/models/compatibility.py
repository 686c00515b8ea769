"""Which models this decoder can treat exactly, by what their configuration says of attention, positions and cache; and
the tokens that a target shares with its draft and its records."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from decode.common.errors import InputError
from decode.models.gguf.file import open_gguf

if TYPE_CHECKING:
    from decode.config import ModelConfig

CACHE_ARGUMENTS = ("cache", "past_key_values")
OWN_MASKS = ("bloom", "gpt_neo", "mpt")  # attention that counts columns of the cache, not positions


def refuse_unsupported(config: PretrainedConfig, path: str, role: str = "target") -> None:
    """Raise InputError for a model whose passes this decoder cannot make exactly."""
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(
            f"{role}.path={path} is a {config.model_type} model, which transformers does not load as a causal language "
            "model; speculative decoding needs one that predicts the next token"
        )
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(model_class, "_is_stateful", False):
        raise InputError(
            f"{role}.path={path} is a {config.model_type} model with recurrent state, which cannot be rolled back "
            "after a rejected draft token; use a model whose layers are all attention"
        )
    _refuse_without_cache(model_class, config, path, role)
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if "mrope_section" in rope:
        raise InputError(
            f"{role}.path={path} uses multimodal rotary positions (mrope), which this decoder does not handle"
        )
    if getattr(config.get_text_config(), "attn_temperature_tuning", False):  # off in trees and shorter rows
        raise InputError(
            f"{role}.path={path} is a {config.model_type} model with attn_temperature_tuning, which scales queries by "
            "their place in the cache. Use a model whose attention goes by position_ids"
        )
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds or config.model_type in OWN_MASKS or getattr(config, "alibi", False):
        raise InputError(
            f"{role}.path={path} is a {config.model_type} model (unusual layers: {sorted(kinds) or 'none'}), which "
            "makes its own masks or position biases. Use a model with full or sliding-window attention"
        )


@functools.cache
def cache_argument(model_class: type) -> str | None:
    """What passes of such a model call the keys and values that they are handed; None where they take none.
    transformers 5.24 renamed it from past_key_values to cache; remote code may keep the older name."""
    taken = _taken(model_class)
    return next((name for name in CACHE_ARGUMENTS if name in taken), None)


def _taken(model_class: Any) -> Mapping[str, object]:
    return inspect.signature(model_class.forward).parameters


def _refuse_without_cache(model_class: Any, config: PretrainedConfig, path: str, role: str) -> None:
    has = {"cache": cache_argument(model_class), "position_ids": "position_ids" in _taken(model_class)}
    lacks = [name for name, it in has.items() if not it]
    if lacks:
        raise InputError(
            f"{role}.path={path} is a {config.model_type} model, whose passes take no {' and no '.join(lacks)}: "
            "tokens of a tree could not be read behind the ones before them. Use a model that keeps keys and values "
            "by position"
        )
    is_encoder = getattr(config, "is_decoder", None) is False and hasattr(config, "type_vocab_size")
    if is_encoder:  # as BERT and its kin are; GPT-NeoX says the same of itself, and sees no later tokens
        raise InputError(
            f"{role}.path={path} is a {config.model_type} model with is_decoder=False, in which tokens see the ones "
            "after them, so it predicts no next token. Use a model that was trained as a decoder (is_decoder=True)"
        )


def attention_of(config: PretrainedConfig, asked: str = "auto") -> str:
    """The attention kernel, "sdpa" or "eager"; raises InputError where the model does not have the one asked for."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    has_sdpa = getattr(model_class, "_supports_sdpa", False)
    if asked == "sdpa" and not has_sdpa:
        raise InputError(
            f"attn_implementation=sdpa, and {config.model_type} models compute attention that sdpa "
            "does not have (sinks or soft caps, say); use attn_implementation=auto, which takes eager for them"
        )
    return ("sdpa" if has_sdpa else "eager") if asked == "auto" else asked


def longest_context(config: PretrainedConfig) -> int | None:
    """Tokens up to which a token's position alone decides its rotation; longrope rotates all of a longer pass anew, so
    that the distribution of a token would depend on how many others are read with it. None where nothing limits it."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    rope = getattr(text, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
    return min(limit, original) if limit and original and rope.get("rope_type") in ("longrope", "dynamic") else limit


def rotates(config: PretrainedConfig) -> bool:
    """Whether positions are rotations, which go on behind the longest context; a table of them ends there."""
    return bool(getattr(config.get_text_config(), "rope_parameters", None))


def load_tokenizer(source: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, GGUF file or hub id; raises InputError where there is none."""
    path = Path(source.path or "")
    try:
        if path.is_file():
            from decode.models.gguf.tokenizer import gguf_tokenizer  # of use for such files alone

            return gguf_tokenizer(open_gguf(path, "target"))
        return AutoTokenizer.from_pretrained(
            source.path, revision=source.revision, trust_remote_code=source.trust_remote_code
        )
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 - the tokenizers library raises nothing narrower for a damaged file
        raise InputError(
            f"no tokenizer can be loaded from {source.path} ({type(error).__name__}: {error}), and text cannot be read "
            f"without one. {'Fetch the file' if path.is_file() else 'Copy its tokenizer files'} again"
        ) from error


def token_map_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the token-to-id map: two tokenizers with the same hash give every token the same id."""
    pairs = sorted(tokenizer.get_vocab().items(), key=lambda pair: (pair[1], pair[0]))
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def chat_template_hash(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Hash of the chat template, None where there is none."""
    template = getattr(tokenizer, "chat_template", None)
    return None if template is None else hashlib.sha256(json.dumps(template).encode()).hexdigest()
