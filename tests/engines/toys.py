"""Toy targets that have learnt a grammar, and drafts that have learnt part of it: their tokens are accepted and refused
at every position, so that a small fault of an export moves the counters. Made by the stages that users run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    ExaoneMoeConfig,
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from decode.common.typed_config import build
from decode.config import ModelConfig
from decode.drafters.base import Drafter
from decode.drafters.saved_draft import load_drafter
from decode.models.load import load_model
from distill.config import DistillConfig
from tests.engines.counters import Counters, our_counters
from tests.engines.source import EOS, PAD, VOCAB_SIZE, Source, tokenizer, write_texts
from train.config import TrainConfig
from train.export.config import ExportConfig, Format, SavedDraftConfig
from train.export.stage import run as export

K = 3
"""Draft tokens a round."""
REDUCED = 80
"""Tokens of a reduced draft vocabulary; the grammar has 96."""
TAPS = [1, 4, 6]
"""Others than engines assume of 8 layers (2, 4 and 5), so that a list that they do not read shows."""
_EXAONE: dict[str, Any] = {
    "layer_types": [*["sliding_attention"] * 7, "full_attention"],
    "sliding_window": 16,
    "mtp_layer_types": ["full_attention"],
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 7,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
_GEMMA: dict[str, Any] = {"query_pre_attn_scalar": 32, "sliding_window": 16, "rope_parameters": None}
TARGETS: dict[str, Callable[..., PretrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen3": Qwen3Config,
    "qwen3_moe": partial(Qwen3MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64),
    "exaone_moe": partial(ExaoneMoeConfig, **_EXAONE),
    "gemma3": lambda **shape: Gemma3TextConfig(**(shape | _GEMMA)),
}
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the smallest that vLLM's attention has on a CPU
    "max_position_embeddings": 128,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
_EAGLE3: dict[str, Any] = {"family": "eagle3", "head": {"depth": K, "taps": TAPS}}
_MEDUSA: dict[str, Any] = {"family": "medusa", "head": {"depth": K}}
_UNUSED = next(token for token in range(2, VOCAB_SIZE) if token not in Source().words)
"""A token that no text holds."""
_PLAIN = _EAGLE3["head"] | {"fc_norm": False, "norm_output": False}
_BLOCK: dict[str, Any] = {"depth": K, "taps": TAPS, "markov_rank": 0, "confidence": False, "anchors": 40}
_PARALLEL = {"tokens": K, "mask_token": _UNUSED, "anchors": 40}
_DSPARK = _BLOCK | {"markov_rank": 8, "confidence": True, "mask_token": _UNUSED}
_DFLASH2 = {"depth": K, "taps": TAPS, "markov_rank": 8, "candidates": 4, "anchors": 40}
DRAFTS: dict[str, dict[str, Any]] = {
    "lm": {"family": "lm", "layers": 1, "width": 64, "heads": 2},
    "pard": {"family": "lm", "layers": 2, "width": 64, "heads": 2, "parallel": _PARALLEL},
    "eagle3": _EAGLE3,
    "eagle3-reduced": _EAGLE3 | {"head": _EAGLE3["head"] | {"vocab": REDUCED}},
    "peagle": {"family": "peagle", "layers": 2, "head": _EAGLE3["head"] | {"mask_token": _UNUSED}},
    "medusa": _MEDUSA,
    "mtp": {"family": "mtp", "head": {"depth": K, "init_own": True}},
    "medusa-reduced": _MEDUSA | {"head": _MEDUSA["head"] | {"vocab": REDUCED}},
    "eagle3-plain": {"family": "eagle3", "head": _PLAIN},
    "eagle3-plain-reduced": {"family": "eagle3", "head": _PLAIN | {"vocab": REDUCED, "norm_before_fc": True}},
    "dflash": {"family": "dspark", "layers": 1, "head": _BLOCK},
    "dflash-token": {"family": "dspark", "layers": 1, "head": _BLOCK | {"mask_token": _UNUSED}},
    "dflash2": {"family": "dflash2", "layers": 1, "head": _DFLASH2},
    "jetspec": {"family": "dspark", "layers": 1, "head": _BLOCK | {"causal": True}},
    "dspark": {"family": "dspark", "layers": 1, "head": _DSPARK},
    "dspark-reduced": {"family": "dspark", "layers": 1, "head": _DSPARK | {"vocab": REDUCED}},
}


STEPS = {"dspark": 150, "parallel": 300}
"""Of families, and of draft models that draft in one pass, that need more to be of use."""
PROMPTS: list[list[int]] = Source().draw(12, 8).tolist()
NEW_TOKENS = 40


@dataclass(frozen=True)
class Toys:
    """Targets and runs, each made when it is first asked for."""

    folder: Path

    @cache  # noqa: B019 - one object a session
    def target(self, kind: str) -> Path:
        """A target of this architecture."""
        return make_target(self.folder / kind / "target", kind)

    @cache  # noqa: B019
    def loaded(self, kind: str) -> PreTrainedModel:
        """The same, in memory."""
        return load_model(ModelConfig(path=str(self.target(kind)), dtype="float32", device="cpu"))

    @cache  # noqa: B019
    def records(self, kind: str) -> Path:
        """Its answers."""
        return write_records(self.folder / kind / "records", self.target(kind))

    @cache  # noqa: B019
    def run(self, kind: str, draft: str) -> Path:
        """The run that trained this draft for it."""
        return train_draft(self.folder / kind / draft, self.target(kind), self.records(kind), DRAFTS[draft])

    @cache  # noqa: B019
    def exported(self, kind: str, draft: str, form: Format = "vllm") -> Path:
        """The folder of that draft for an engine."""
        folder = self.folder / kind / f"{draft}-{form}"
        run = SavedDraftConfig(path=str(self.run(kind, draft)))
        cfg = ExportConfig(format=form, output_dir=str(folder), draft=run, num_draft_tokens=K)
        export(replace(cfg, model_impl="transformers") if kind == "gemma3" else cfg)
        return folder

    @cache  # noqa: B019
    def drafter(self, kind: str, draft: str) -> Drafter:
        """The draft as our decoder runs it."""
        return load_drafter(str(self.run(kind, draft)), self.loaded(kind))

    @cache  # noqa: B019
    def ours(self, kind: str, draft: str) -> Counters:
        """What our decoder counts, greedily."""
        return our_counters(self.loaded(kind), self.drafter(kind, draft), PROMPTS, NEW_TOKENS, K)


def make_target(folder: Path, kind: str, steps: int = 120) -> Path:
    """A target in transformers' format with its tokenizer, 15 s of training from where it knows nothing."""
    torch.manual_seed(0)
    source, model = Source(), AutoModelForCausalLM.from_config(TARGETS[kind](**_SHAPE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(steps):
        ids = source.draw(16, 48)
        loss = nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def write_records(folder: Path, target: Path) -> Path:
    """The target's answers to a few beginnings, with the hidden states that heads read."""
    from distill.stage import run

    texts = write_texts(folder.with_name("texts"), Source(), documents=80, length=16)
    settings = {
        "target": {"path": str(target), "dtype": "float32"},
        "data": {"name": "text", "path": str(texts), "validation_share": 0.05, "heldout_share": 0.05},
        "prompts": {"tokens": 8, "per_document": 1, "count": 64, "validation_count": 2},
        "sampling": {"max_new_tokens": 40},
        "records": {"features": {"layers": [*TAPS, -1]}},
        "batch_size": 64,
        "output_dir": str(folder),
    }
    run(build(DistillConfig, settings))
    return folder


def train_draft(folder: Path, target: Path, records: Path, draft: dict[str, Any]) -> Path:
    """A run on those records."""
    from train.stage import run

    settings = {
        "output_dir": str(folder),
        "target": {"path": str(target), "dtype": "float32"},
        "records": str(records),
        "draft": draft,
        "engine": {"device": "cpu", "precision": "fp32"},
        "sequence_length": 48,
        "batch_size": 16,
        "steps": STEPS.get("parallel" if "parallel" in draft else draft["family"], 60),
        "optimizer": "adamw",
        "lr": 1e-2,
        "validate_every": 1000,
        "validation_rows": 1,
        "checkpoint_every": 1000,
        "export_dtype": "float32",
    }
    run(build(TrainConfig, settings))
    return folder
