"""The files of a checkpoint: what its configurations may hold, which files its weights lie in, and what the headers of
those say: names and shapes, and no value is read."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from huggingface_hub.errors import StrictDataclassError
from pydantic import AliasChoices, Field
from safetensors import SafetensorError
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_utils import load_state_dict

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


class EndTokens(Content):
    """Special tokens of generation_config.json."""

    bos_token_id: Token | list[Token] | None = None
    eos_token_id: Token | list[Token] | None = None
    pad_token_id: Token | None = None


_REMEDY = "Copy the folder again from where it was saved."
CONFIG = JsonFile(ModelFile, "another model would be built than the one that the weights belong to", _REMEDY)
GENERATION = JsonFile(EndTokens, "texts would end at another token, or never", _REMEDY)


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


KINDS = ("*.safetensors", "pytorch_model*.bin")
NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""What transformers loads, in its order."""
DAMAGED = (SafetensorError, pickle.UnpicklingError, EOFError, OSError)
"""What files raise that are damaged or missing, and pickled ones that hold more than tensors."""


def read_headers(folder: Path, role: str) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by name, on the meta device; InputError for files that are missing or damaged, or
    that hold anything but tensors. A pickled file is read as weights alone: no program in it is run."""
    tensors: dict[str, Tensor] = {}
    for file in checkpoint_files(folder, role):
        try:
            found = load_state_dict(file, map_location="meta", weights_only=True)
        except (*DAMAGED, ValueError, KeyError, IndexError, AttributeError, TypeError, RuntimeError) as error:
            raise InputError(damaged(f"{role}.path={folder}", error, file)) from error
        if not isinstance(found, dict) or not all(isinstance(one, Tensor) for one in found.values()):
            raise InputError(
                f"{file} of {role}.path={folder} holds no tensors by name, as the weights of a model are saved; it may "
                "be a training checkpoint. Save the model itself with save_pretrained"
            )
        tensors |= found
    return tensors


def checkpoint_files(folder: Path, role: str) -> list[Path]:
    """The files that transformers reads; InputError where there are none by its names, or an index names others."""
    first = next((folder / name for name in NAMES if (folder / name).is_file()), None)
    if first is None:
        there = sorted(file.name for kind in ("*.safetensors", "*.bin") for file in folder.glob(kind))
        raise InputError(
            f"{role}.path={folder} holds a config.json but no weights that transformers would load "
            f"(there: {', '.join(there) or 'none'}; read are {', '.join(NAMES)}). Save the model in transformers format"
        )
    if first.suffix != ".json":
        return [first]
    index = read_json(first)
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise InputError(f"{first} has no weight_map that says in which file a tensor lies; copy it again")
    files = [folder / name for name in sorted(set(names.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise InputError(
            f"{role}.path={folder} lacks {', '.join(missing[:3])}, {len(missing)} of the {len(files)} files of weights "
            f"that {first.name} names: what they hold would be random numbers. Copy the folder again"
        )
    return files


def weight_files(folder: Path) -> list[Path]:
    """Every file of weights, whether transformers reads it or not."""
    return sorted(file for pattern in KINDS for file in folder.glob(pattern))


def published_files(folder: Path) -> list[Path]:
    """Pickled files of published heads, which transformers knows nothing of."""
    return [folder / name for name in ("mask_embedding.pt", "medusa_lm_head.pt") if (folder / name).is_file()]


def damaged(which: str, error: Exception, file: Path | None = None) -> str:
    """What to say of weights that cannot be read."""
    reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    if isinstance(error, pickle.UnpicklingError):
        return (
            f"the weights of {which} cannot be read{f' from {file.name}' if file else ''} as tensors alone, and "
            "nothing of it was run: a pickle may hold a program. Fetch it again, or convert it to safetensors where "
            f"you trust it ({reason})"
        )
    where = f"{file.name} cannot be read" if file else "they cannot be read"
    return f"the weights of {which} are damaged or missing: {where} ({reason}). Fetch them again"
