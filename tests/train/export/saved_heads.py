"""Random heads on tiny targets, saved as a run saves them, and what an export makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from decode.common.checked_json import read_json
from decode.drafters.head_draft import HeadDraft
from decode.models.describe import describe_loaded
from decode.models.output_head import ends_of
from tests.decode.heads import random_head
from tests.tiny import tiny_llama, tiny_tokenizer
from train.export.config import ExportConfig, SavedDraftConfig
from train.export.draft_folder import Export, export_head
from train.export.engines import ENGINES
from train.export.engines.base import Loads
from train.export.stage import run


def save_padded_target(folder: Path, rows: int = 320, **overrides: Any) -> Path:
    """A target of six layers whose embedding has more rows than its tokenizer has tokens, 300."""
    tokenizer = tiny_tokenizer(300)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    tiny_llama(rows, num_layers=6, **ids | overrides).save_pretrained(folder)  # type: ignore[arg-type]
    tokenizer.save_pretrained(folder)
    return folder


def save_head(folder: Path, target: Path, name: str, vocab: Tensor | None = None, **fields: Any) -> HeadDraft:
    """A random head of that name of `tests.decode.heads`, with other `fields` of its configuration, in `folder`."""
    model = AutoModelForCausalLM.from_pretrained(target)
    like = random_head(name, model, vocab=vocab)
    torch.manual_seed(0)
    head = type(like)(replace(like.config, **fields), ends_of(model), vocab)
    for weight in head.parameters():
        weight.data.normal_(0, 0.3)
    known = describe_loaded(model)
    trained_on = {"path": str(target), "fingerprint": known.fingerprint, "vocab_size": known.vocab_size}
    export = Export(str(target), None, torch.float32, 3, "# Card\n", {"target": trained_on})
    export_head(head.eval().requires_grad_(False), folder, export)
    return head


def export(draft: Path, output: Path, form: str = "vllm", **given: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and the tensors of a folder for that engine."""
    run(ExportConfig(format=form, output_dir=str(output), draft=SavedDraftConfig(path=str(draft)), **given))  # type: ignore[arg-type]
    return read_json(output / "config.json"), load_file(output / "model.safetensors")


def check_described(fields: dict[str, Any], tensors: dict[str, Tensor], engine: str, form: str) -> None:
    """config.json alone calls for these names and shapes, and kinds, and nothing else has to be there."""
    how = ENGINES[engine].forms[form]
    assert isinstance(how, Loads)
    specs = how.layout.manifest(fields)
    assert tensors.keys() <= specs.keys()
    assert {name for name, one in specs.items() if not one.optional} <= tensors.keys()
    for name, tensor in tensors.items():
        kind = fields["dtype"] if specs[name].kind == "weight" else specs[name].kind
        assert tensor.shape == specs[name].shape, name
        assert tensor.dtype == getattr(torch, kind), name
