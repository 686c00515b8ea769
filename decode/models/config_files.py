"""config.json and generation_config.json of a model's folder: what would otherwise show as a traceback, or only in the
text that is written. transformers checks types; sizes, ids and words are checked here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from huggingface_hub.errors import StrictDataclassError
from pydantic import AliasChoices, Field
from transformers import GenerationConfig, PretrainedConfig
from transformers.activations import ACT2FN

from decode.common.checked_json import Content, JsonFile, Text, read_json
from decode.common.errors import InputError

Width = Annotated[int, Field(ge=1, le=1 << 31)]
Layers = Annotated[int, Field(ge=1, le=1 << 12)]
"""Modules are built one by one: a billion of them would never be."""
Token = Annotated[int, Field(ge=-(1 << 31), le=1 << 31)]
Precision = Literal["float64", "float32", "bfloat16", "float16"]


class Sizes(Content):
    """Fields that every architecture names alike, or nearly; the others are left to transformers."""

    model_type: Text | None = None
    vocab_size: Width | None = None
    hidden_size: Width | None = Field(None, validation_alias=AliasChoices("hidden_size", "n_embd"))
    num_hidden_layers: Layers | None = Field(None, validation_alias=AliasChoices("num_hidden_layers", "n_layer"))
    num_attention_heads: Layers | None = Field(None, validation_alias=AliasChoices("num_attention_heads", "n_head"))
    num_key_value_heads: Layers | None = None
    head_dim: Width | None = None
    intermediate_size: Width | list[Width] | None = None
    """Gemma 3n has one for every layer."""
    max_position_embeddings: Width | None = Field(
        None, validation_alias=AliasChoices("max_position_embeddings", "n_positions")
    )
    rms_norm_eps: Annotated[float, Field(ge=0, lt=1)] | None = None
    dtype: Precision | None = Field(None, validation_alias=AliasChoices("dtype", "torch_dtype"))
    architectures: list[Text] | None = None


class ModelFile(Sizes):
    """config.json; a multimodal one holds the language model's sizes in `text_config`."""

    text_config: Sizes | None = None


class Ends(Content):
    """Special tokens of generation_config.json."""

    bos_token_id: Token | list[Token] | None = None
    eos_token_id: Token | list[Token] | None = None
    pad_token_id: Token | None = None


_REMEDY = "Copy the folder again from where it was saved."
CONFIG = JsonFile(ModelFile, "another model would be built than the one that the weights belong to", _REMEDY)
GENERATION = JsonFile(Ends, "texts would end at another token, or never", _REMEDY)


def check_model_files(folder: Path, role: str) -> None:
    """Raise InputError for JSON in a model's folder that no model has."""
    CONFIG.read(folder / "config.json")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        read_json(index, _REMEDY)
    generation = folder / "generation_config.json"
    if not generation.exists():
        return
    GENERATION.read(generation)
    try:
        GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError, AttributeError, LookupError, StrictDataclassError) as error:
        raise InputError(
            f"{generation} of {role}.path={folder} is none that transformers reads ({error}): {GENERATION.why}. "
            f"{_REMEDY}"
        ) from error


def check_words(config: PretrainedConfig, path: str, role: str) -> None:
    """Raise InputError for an activation that is none, and for an end of text that is no token of the model."""
    text = config.get_text_config()
    if not isinstance(text, PretrainedConfig):
        raise InputError(
            f"{role}.path={path}: text_config is {text!r:.80}, and a {config.model_type} model has none: {CONFIG.why}. "
            f"{_REMEDY}"
        )
    for name in ("hidden_act", "hidden_activation", "activation_function"):
        word = getattr(text, name, None)
        if word is not None and word not in ACT2FN:
            raise InputError(
                f"{role}.path={path}: {name} is {word!r}, and it should be one of {', '.join(sorted(ACT2FN))}: "
                f"{CONFIG.why}. {_REMEDY}"
            )
    known = dict(_ends(text, Path(path)))
    if len(known) > 1 and known["config.json"] not in (None, []) and known["generation_config.json"] in (None, []):
        raise InputError(
            f"{role}.path={path}: generation_config.json has eos_token_id={known['generation_config.json']}, and "
            f"config.json {known['config.json']}: no text would ever end. Give both the id of the model's end of text"
        )
    for file, ends in known.items():
        for end in ends if isinstance(ends, list) else [ends]:
            if end is not None and not 0 <= end < text.vocab_size:
                raise InputError(
                    f"{role}.path={path}: eos_token_id of {file} is {end}, and the vocabulary has the ids 0 to "
                    f"{text.vocab_size - 1}: {GENERATION.why}. Give it the id of the model's end of text"
                )


def _ends(text: PretrainedConfig, folder: Path) -> Iterator[tuple[str, Any]]:
    yield "config.json", text.eos_token_id
    if (folder / "generation_config.json").is_file():
        yield "generation_config.json", GENERATION.read(folder / "generation_config.json").eos_token_id
