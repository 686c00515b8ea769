"""Drafts that are language models of their own: a small Llama, or any pretrained model with the target's tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedTokenizerBase

from decode.drafters.lm import LMDraft
from decode.models.load import ModelDescription
from decode.models.output_head import Ends
from train.config import TrainConfig
from train.drafts.config import LM_HEADS, LM_WIDTH, DraftConfig
from train.drafts.family import Built
from train.drafts.rope import rope_of
from train.export.draft_folder import Export, export_lm


@dataclass(frozen=True)
class LMShape:
    """A transformers model."""

    config: PretrainedConfig
    source: str | None
    """Pretrained folder or hub id."""
    taps: tuple[int, ...] = ()
    depth: int | None = None

    @property
    def num_parameters(self) -> int:
        """As `Shape` says."""
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(self.config).num_parameters()


def lm_shape(cfg: TrainConfig, target: ModelDescription | None, tokenizer: PreTrainedTokenizerBase | None) -> LMShape:
    """A Llama of the configured size over the target's (or the tokenizer's) tokens, or the config of `init_from`."""
    draft = cfg.draft
    if draft.init_from is not None:
        return LMShape(AutoConfig.from_pretrained(draft.init_from, revision=draft.revision), draft.init_from)
    tokens = _target_tokens(target) if target else _tokenizer_tokens(tokenizer)
    longest = draft.max_positions or (target.max_positions if target else cfg.sequence_length)
    width, heads = draft.width or LM_WIDTH, draft.heads or LM_HEADS
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=draft.mlp_width or -(-width * 8 // 3 // 64) * 64,
        num_hidden_layers=draft.layers,
        num_attention_heads=heads,
        num_key_value_heads=draft.kv_heads or heads,
        head_dim=width // heads,
        max_position_embeddings=longest,
        tie_word_embeddings=draft.tie_embeddings,
        rope_parameters=rope_of(target),
        **tokens,
    )
    return LMShape(config, None)


def lm_build(draft: DraftConfig, shape: LMShape, ends: Ends | None = None) -> Built:
    """From torch's global generator or pretrained, with adapters where asked for; it has ends of its own."""
    if shape.source is None:
        return Built(LMDraft.from_config(shape.config))
    module = LMDraft.from_pretrained(shape.source, "float32", draft.revision, role="draft.init_from")
    if draft.lora.rank == 0:
        return Built(module)
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        r=draft.lora.rank,
        lora_alpha=draft.lora.alpha,  # type: ignore[arg-type]
        target_modules=list(draft.lora.targets),
        task_type="CAUSAL_LM",
    )
    return Built(module, get_peft_model(module.model, settings))  # type: ignore[arg-type]


def lm_export(built: Built, folder: Path, export: Export) -> None:
    """A transformers folder; adapters are kept beside it in peft's format, and merged in it."""
    model: Any = built.module.model
    if built.adapters is not None:
        built.adapters.save_pretrained(str(folder.parent / "adapter"))
        model = built.adapters.merge_and_unload()  # type: ignore[operator]
    export_lm(model, folder, export)


def _target_tokens(target: ModelDescription) -> dict[str, Any]:
    text = target.config.get_text_config()
    special = {name: getattr(text, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {"vocab_size": target.vocab_size, **special}


def _tokenizer_tokens(tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    assert tokenizer is not None, "a model without a target needs a tokenizer"
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {"vocab_size": len(tokenizer), **special}
