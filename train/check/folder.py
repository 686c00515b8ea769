"""A draft's folder as engines read it: config.json, and tensors whose values are read when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import Tensor

from decode.common.checked_json import Content, JsonFile, PlainPath, Sha256, Size, Text, read_json
from decode.common.errors import InputError
from decode.common.run_folder import sha256_file
from decode.drafters.provenance import FILE as OWN_FILE
from decode.models.checkpoint_files import Layers, ModelFile, Token, Width, checkpoint_files, damaged
from train.export.layouts.base import FILE

Ids = Annotated[list[Token], Field(max_length=1 << 10)]
_REMEDY = "Write it again, or fetch the folder again."
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}


class Nested(Content):
    """`eagle_config`, `dflash_config` or `dspark_config`."""

    eagle_aux_hidden_state_layer_ids: Ids | None = None
    target_layer_ids: Ids | None = None
    mask_token_id: Token | None = None
    sample_from_anchor: bool | None = None
    use_aux_hidden_state: bool | None = None
    causal: bool | None = None
    norm_before_fc: bool | None = None


class DraftFile(ModelFile):
    """config.json of a draft: what is read of it has these types."""

    speculators_model_type: Text | None = None
    transformer_layer_config: ModelFile | None = None
    eagle_config: Nested | None = None
    dflash_config: Nested | None = None
    dspark_config: Nested | None = None
    eagle_aux_hidden_state_layer_ids: Ids | None = None
    aux_hidden_state_layer_ids: Ids | None = None
    target_layer_ids: Ids | None = None
    num_aux_hidden_states: Layers | None = None
    target_hidden_size: Width | None = None
    draft_vocab_size: Width | None = None
    truncated_vocab_size: Width | None = None
    num_target_layers: Layers | None = None
    block_size: Layers | None = None
    markov_rank: Annotated[int, Field(ge=0, le=1 << 16)] | None = None
    mask_token_id: Token | None = None
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    medusa_num_heads: Layers | None = None
    medusa_num_layers: Layers | None = None
    num_heads: Layers | None = None
    tie_word_embeddings: bool | None = None
    is_causal: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    max_seq_len: Size | None = None


class ExportFile(Content):
    """What is read of draftsmith_export.json."""

    sha256: dict[PlainPath, Sha256] = {}
    engines: list[Text] = []
    """Titles of those that it was written for."""


EXPORT = JsonFile(ExportFile, "it says which files were edited since", _REMEDY)
CONFIG = JsonFile(DraftFile, "engines read it before they make room for the weights", _REMEDY)


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies, and what its file's header says of it."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class ServedFolder:
    """A draft as an engine is given it."""

    path: Path
    written: dict[str, Any]
    """config.json."""
    stored: dict[str, Stored]
    """Its tensors by the names they have there."""

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The values that engines work with: where vLLM reads by the speculators library's rules those that it nests,
        above them the others."""
        nested = (self.written.get("transformer_layer_config") or {}) if self.is_speculators else {}
        own = {name: value for name, value in self.written.items() if value is not None or name not in nested}
        return completed({**nested, **own})

    @property
    def is_speculators(self) -> bool:
        """Whether vLLM reads it by the speculators library's rules: where there is no model_type at the top."""
        return "speculators_model_type" in self.written and "model_type" not in self.written

    @property
    def is_ours(self) -> bool:
        """Whether `python -m train.export` wrote it."""
        return (self.path / FILE).is_file()

    @cached_property
    def _export(self) -> ExportFile:
        return EXPORT.read(self.path / FILE) if self.is_ours else ExportFile()

    @property
    def written_for(self) -> list[str]:
        """Titles of the engines that `python -m train.export` wrote it for; empty where it did not."""
        return self._export.engines

    @cached_property
    def edited(self) -> list[str]:
        """Files for engines that are not as `python -m train.export` wrote them, where it wrote the folder."""
        told = self._export.sha256
        files = {name: self.path / name for name in told if name != "README.md"}
        return [name for name, file in files.items() if not file.is_file() or sha256_file(file) != told[name]]

    def tensor(self, name: str) -> Tensor:
        """Its values, read now."""
        with safe_open(str(self.stored[name].file), "pt") as tensors:
            return tensors.get_tensor(name)


def completed(written: Mapping[str, Any]) -> dict[str, Any]:
    """With what transformers puts in place of fields that are often left out."""
    heads, width = written.get("num_attention_heads"), written.get("hidden_size")
    usual = {"rms_norm_eps": 1e-6, "hidden_act": "silu"}
    if heads:
        usual |= {"num_key_value_heads": heads} | ({"head_dim": width // heads} if width else {})
    return {**usual, **{name: value for name, value in written.items() if value is not None or name not in usual}}


def open_folder(path: str) -> ServedFolder:
    """The folder at `path`; no values are read. InputError for what is not a draft's folder, and for damaged files."""
    folder = Path(path)
    if not folder.is_dir():
        raise InputError(
            f"draft.path={path} is not a folder here; what a hub holds is fetched first, by `hf download {path}`, say"
        )
    if not (folder / "config.json").is_file():
        inside = sorted(one.parent.name for one in folder.glob("*/config.json"))
        hint = f"; it holds the folders {', '.join(inside)}: give one of them" if inside else ""
        raise InputError(f"draft.path={path} holds no config.json, so no engine reads a draft there{hint}")
    CONFIG.read(folder / "config.json")
    written = read_json(folder / "config.json", _REMEDY)
    if (folder / OWN_FILE).is_file() and "model_type" not in written:
        raise InputError(
            f"draft.path={path} holds a head as draftsmith saves it, which no engine reads. Write it for one first: "
            f"python -m train.export draft.path={path} format=vllm output_dir=FOLDER"
        )
    return ServedFolder(folder, written, _stored(folder))


def _stored(folder: Path) -> dict[str, Stored]:
    """Every tensor of the files that engines read: all of *.safetensors, or those that an index names."""
    indexed = (folder / "model.safetensors.index.json").is_file()
    files = checkpoint_files(folder, "draft") if indexed else sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError(
            f"draft.path={folder} holds no *.safetensors, which is what engines load drafts from. Convert pickled "
            "weights where you trust them, or fetch the folder again"
        )
    found: dict[str, Stored] = {}
    for file in files:
        for name, one in _header(file).items():
            if name in found:
                raise InputError(
                    f"{name} lies in {found[name].file.name} and in {file.name} of draft.path={folder}; engines read "
                    "both, and keep the last one. Take one file away"
                )
            found[name] = one
    return found


def _header(file: Path) -> dict[str, Stored]:
    try:
        with safe_open(str(file), "pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InputError(damaged(f"draft.path={file.parent}", error, file)) from error
    kinds = {name: one.get_dtype() for name, one in slices.items()}
    unknown = sorted({*kinds.values()} - {*DTYPES})
    if unknown:
        raise InputError(
            f"{file} holds tensors of type {', '.join(unknown)}, which is quantised or no weight at all; checked are "
            f"{', '.join(DTYPES)}. Give the folder as it was before it was quantised"
        )
    return {name: Stored(file, tuple(one.get_shape()), DTYPES[kinds[name]]) for name, one in slices.items()}
