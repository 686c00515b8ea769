"""A draft LM: a plain transformers folder, which every engine loads."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from decode.common.checked_json import read_json, write_json
from decode.config import ModelConfig
from decode.formats.base import OUTPUT, Layout, Spec, precision
from decode.formats.rope import older_rope
from decode.forward.window import FIELDS, Window
from decode.models.describe import describe_model

if TYPE_CHECKING:
    from decode.formats.source import Source

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
NOT_OF_MISTRAL = ("layer_types", "attention_bias", "mlp_bias", "pretraining_tp", *FIELDS)
SLIDING = ("llama", "mistral")


def written_config(source: Source) -> dict[str, Any]:
    """As training wrote it, in the precision that is asked for; earlier releases left rope_scaling out."""
    fields = read_json(source.folder / "config.json")
    fields |= older_rope(fields)
    if source.window is not None:
        fields = as_sliding(fields, source.window)
    if source.dtype is None:
        return fields
    return fields | precision(source.dtype)


def as_sliding(fields: Mapping[str, Any], window: Window) -> dict[str, Any]:
    """config.json of what a Llama is without sinks: the Mistral with the same weights and window, in every layer."""
    assert window.sinks == 0, "refused before"
    kept = {name: value for name, value in fields.items() if name not in NOT_OF_MISTRAL}
    return kept | {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": min(window.size, fields.get("sliding_window") or window.size),
    }


def written_tensors(source: Source) -> dict[str, Tensor]:
    """As training wrote them; a tied output head is left out."""
    weights = load_file(source.folder / "model.safetensors")
    return {name: one.to(source.dtype or one.dtype) for name, one in weights.items()}


def manifest(fields: Mapping[str, Any]) -> dict[str, Spec]:
    """The tensors of the transformers class that config.json names."""
    kind = deepcopy(dict(fields))  # transformers writes into a rope_scaling that it is handed
    known = AutoConfig.for_model(kind.pop("model_type"), **kind)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(known)
    return {
        name: Spec(tuple(one.shape), optional=known.tie_word_embeddings and name == OUTPUT)
        for name, one in model.state_dict().items()
    }


def _extras(source: Source, folder: Path) -> None:
    """The target's tokenizer files, byte for byte, and how transformers drafts, by as many tokens as are asked for."""
    drafting = read_json(source.folder / "generation_config.json")
    write_json(folder / "generation_config.json", drafting | {"num_assistant_tokens": source.num_draft_tokens})
    for name in TOKENIZER_FILES:
        if (source.folder / name).is_file():
            shutil.copyfile(source.folder / name, folder / name)


def engine_config(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Any]:
    """config.json for old and new readers: rope_theta and rope_scaling beside rope_parameters, torch_dtype beside
    dtype."""
    fields = model.config.to_dict() | {"architectures": [type(model).__name__]} | precision(dtype)
    fields.pop("_name_or_path", None)
    return fields | older_rope(fields)


def generation_config(config: PretrainedConfig, num_draft_tokens: int) -> dict[str, Any]:
    """Special tokens, and how transformers drafts with this model: always k tokens, so that runs are comparable."""
    special = {name: getattr(config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    settings = GenerationConfig(
        **special,
        num_assistant_tokens=num_draft_tokens,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    return settings.to_diff_dict()


def copy_tokenizer(source: str, revision: str | None, folder: Path) -> None:
    """Copy the tokenizer files that `source` (folder or hub id) has, byte for byte; of a GGUF file write them."""
    if Path(source).is_file():
        tokenizer = describe_model(ModelConfig(source), loads=False).tokenizer
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
        return
    for name in TOKENIZER_FILES:
        path = Path(source) / name
        found = str(path) if path.is_file() else None
        if not Path(source).is_dir():
            found = cached_file(source, name, revision=revision, _raise_exceptions_for_missing_entries=False)
        if found is not None:
            shutil.copyfile(found, folder / name)


LM = Layout("lm", written_config, written_tensors, manifest, extras=_extras)
