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
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from decode.common.checked_json import write_json
from decode.common.run_folder import sha256_file
from decode.config import ModelConfig
from decode.drafters.head_draft import HeadDraft
from decode.drafters.provenance import FILE, PROVENANCE, SCHEMA
from decode.models.load import describe_model
from train.checkpoint import without_aliases

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

HAD_LOCAL_BASE = ("gemma3_text", "gemma3n_text", "olmo3")
"""Types whose windowed layers turn by a plain base of their own, and said so before `rope_parameters`."""


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


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """As safetensors, readable for whoever reads the files beside it: the library's own are for their owner alone, and
    a server under another account could not load them."""
    save_file(dict(tensors), file, metadata={"format": "pt"})
    beside = file.parent / "config.json"
    file.chmod(beside.stat().st_mode)


def engine_config(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Any]:
    """config.json for old and new readers: rope_theta and rope_scaling beside rope_parameters, torch_dtype beside
    dtype."""
    name = str(dtype).removeprefix("torch.")
    fields = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": name, "torch_dtype": name}
    fields.pop("_name_or_path", None)
    return fields | older_rope(fields)


def older_rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embedding as readers know it that do not know `rope_parameters`; nothing where kinds of layers differ
    in it and had no names for that before."""
    rope, kind = fields.get("rope_parameters") or {}, str(fields.get("model_type"))
    local = rope.get("sliding_attention") or {}
    if kind in HAD_LOCAL_BASE and local.get("rope_type") == "default":
        full = older_rope({"rope_parameters": rope["full_attention"]})
        return full | {"rope_local_base_freq": local["rope_theta"]}
    if "rope_theta" not in rope:
        return {}
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    is_scaled = scaling.get("rope_type", "default") != "default"
    older = {"rope_theta": rope["rope_theta"], "rope_scaling": scaling if is_scaled else None}
    if "partial_rotary_factor" in rope:
        older["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if kind.startswith("gpt_neox"):  # llama.cpp's converter stops without these
        older |= {"rotary_emb_base": rope["rope_theta"], "rotary_pct": rope.get("partial_rotary_factor", 1.0)}
    return older


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
