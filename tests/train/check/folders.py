"""Random drafts of every form on tiny targets, exported as users export them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from decode.config import ModelConfig
from decode.formats.source import Source
from decode.models.describe import describe_model
from tests.tiny import tiny_llama, tiny_tokenizer
from tests.train.export.saved_heads import save_head
from train.check.folder import open_folder
from train.check.subject import Subject, form_of
from train.export.config import ExportConfig, SavedDraftConfig
from train.export.draft_folder import Export, export_lm
from train.export.engines import ENGINES
from train.export.engines.base import Loads
from train.export.source import open_source
from train.export.stage import run

VOCAB = 300
TARGETS: dict[str, type[PretrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
}
TAPS = (1, 4, 6)
"""Others than engines assume of 8 layers."""
DRAFTS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "eagle3": ("eagle3", {"taps": TAPS}, False),
    "eagle3-reduced": ("eagle3.1", {"taps": TAPS}, True),
    "peagle": ("peagle", {"taps": TAPS, "mask_token": 7}, False),
    "peagle-reduced": ("peagle-one-layer", {"taps": TAPS}, True),
    "medusa": ("medusa", {"mlp_layers": 2}, False),
    "medusa-reduced": ("medusa", {}, True),
    "dflash": ("dflash", {"taps": TAPS}, False),
    "dflash-reduced": ("dflash", {"taps": TAPS, "mask_token": 7}, True),
    "dflash2": ("dflash2", {"taps": TAPS, "mask_token": 7}, False),
    "lilicorr": ("lilicorr-convolved", {"taps": TAPS, "candidates": 4}, False),
    "jetspec": ("jetspec", {"taps": TAPS}, False),
    "dspark": ("dspark", {"taps": TAPS}, False),
    "dspark-reduced": ("dspark-fill-in", {"taps": TAPS}, True),
}
"""Name -> (variant of tests.decode.heads, fields of its configuration, whether its vocabulary is reduced)."""


@dataclass(frozen=True)
class Folders:
    """Each is made when it is first asked for, and only read."""

    folder: Path

    @cache  # noqa: B019 - one object a session
    def target(self, kind: str) -> Path:
        """A target with random weights."""
        torch.manual_seed(0)
        tokenizer = tiny_tokenizer(VOCAB)
        ends: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        model = AutoModelForCausalLM.from_config(TARGETS[kind](**SHAPE, **ends))
        model.eval().save_pretrained(self.folder / kind)
        tokenizer.save_pretrained(self.folder / kind)
        return self.folder / kind

    @cache  # noqa: B019
    def draft(self, kind: str, draft: str) -> Path:
        """A draft as a run saves it."""
        if draft == "lm":
            return save_draft_model(self.folder / f"{kind}-lm", self.target(kind))
        variant, fields, is_reduced = DRAFTS[draft]
        vocab = torch.arange(0, VOCAB, 3) if is_reduced else None
        save_head(self.folder / f"{kind}-{draft}", self.target(kind), variant, vocab, **fields)
        return self.folder / f"{kind}-{draft}"

    def source(self, kind: str, draft: str) -> Source:
        """It as an export opens it."""
        return open_source(config_of(self.draft(kind, draft), Path("nowhere")))

    @cache  # noqa: B019
    def exported(self, kind: str, draft: str) -> Path:
        """The folder for vLLM."""
        output = self.folder / f"{kind}-{draft}-vllm"
        run(config_of(self.draft(kind, draft), output))
        return output

    def copied(self, kind: str, draft: str, to: Path) -> Path:
        """One to be damaged."""
        return shutil.copytree(self.exported(kind, draft), to)


def save_draft_model(folder: Path, target: Path) -> Path:
    """A language model that drafts for the target."""
    known = describe_model(ModelConfig(path=str(target)))
    trained_on = {"path": str(target), "fingerprint": known.fingerprint, "vocab_size": known.vocab_size}
    export = Export(str(target), None, torch.float32, 3, "# Card\n", {"target": trained_on})
    model = tiny_llama(VOCAB, num_layers=1, max_position_embeddings=256, tie_word_embeddings=True)
    export_lm(model, folder, export)
    return folder


def config_of(draft: Path, output: Path) -> ExportConfig:
    """The settings of an export."""
    return ExportConfig(format="vllm", output_dir=str(output), draft=SavedDraftConfig(path=str(draft)))


def subject_of(folder: Path, target: Path, *engines: str) -> Subject:
    """As `train.check` opens it."""
    opened = open_folder(str(folder))
    form = form_of(opened)
    asked = [ENGINES[name] for name in engines] or [
        one for one in ENGINES.values() if isinstance(one.forms[form], Loads)
    ]
    return Subject(opened, describe_model(ModelConfig(path=str(target))), form, tuple(asked))
