"""A trained draft as a folder: a language model as one that transformers, vLLM and SGLang load unchanged, a head as one
that `decode.load_drafter` loads."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from decode.common.checked_json import write_json
from decode.common.run_folder import sha256_file
from decode.drafters.head_draft import HeadDraft
from decode.drafters.provenance import FILE, PROVENANCE, SCHEMA
from decode.formats.lm import copy_tokenizer, engine_config, generation_config
from decode.formats.weights import save_tensors
from train.checkpoints.run_checkpoints import without_aliases


@dataclass(frozen=True)
class Export:
    """What an exported folder says besides the weights."""

    tokenizer_source: str
    """Folder or hub id whose tokenizer files are copied byte for byte, or GGUF file that holds one."""
    tokenizer_revision: str | None
    """Hub revision of it."""
    dtype: torch.dtype
    """Precision of the weights."""
    num_draft_tokens: int
    """Draft tokens per round k that engines are told to start with."""
    card: str
    """README.md."""
    provenance: Mapping[str, Any]
    """What draftsmith.json holds besides schema, family and checksums."""


def export_lm(model: PreTrainedModel, folder: Path, export: Export) -> None:
    """Write `folder`, which appears whole: config, safetensors, tokenizer, generation config, card, draftsmith.json.

    The vocabulary size is the target's padded one, which every engine compares.
    """
    with _whole_folder(folder, "lm", export) as draft:
        write_json(draft / "config.json", engine_config(model, export.dtype))
        _save_weights(model, draft, export.dtype)
        write_json(draft / "generation_config.json", generation_config(model.config, export.num_draft_tokens))
        copy_tokenizer(export.tokenizer_source, export.tokenizer_revision, draft)


def export_head(head: HeadDraft, folder: Path, export: Export) -> None:
    """Write `folder`, which appears whole: config, safetensors, card, draftsmith.json. The ends stay the target's."""
    with _whole_folder(folder, head.config.family, export) as draft:
        write_json(draft / "config.json", asdict(head.config))
        _save_weights(head, draft, export.dtype)


@contextmanager
def _whole_folder(folder: Path, family: str, export: Export) -> Iterator[Path]:
    """A hidden folder to write into, which gets its card and draftsmith.json and then its name; an existing one is
    replaced: it is the unfinished export of the same run."""
    draft = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    yield draft
    (draft / "README.md").write_text(export.card, encoding="utf-8")
    sums = {path.name: sha256_file(path) for path in sorted(draft.iterdir())}
    PROVENANCE.write(draft / FILE, {"schema": SCHEMA, "family": family, **export.provenance, "sha256": sums})
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)


def _save_weights(module: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    """In `dtype`, but for whole numbers (a draft vocabulary's ids)."""
    weights = without_aliases(module.state_dict())
    weights = {name: one.to(dtype) if one.is_floating_point() else one for name, one in weights.items()}
    save_tensors(weights, folder / "model.safetensors")
