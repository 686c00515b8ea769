"""The trainable families: how each is shaped, built and exported; the loop itself sees only a module with `unroll`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedTokenizerBase

from decode.drafters.lm import LMDraft
from decode.models import ModelDescription
from train.config import DraftConfig, TrainConfig
from train.export import export_lm

if TYPE_CHECKING:
    from peft import PeftModel

PLAIN_ROPES = ("default", "linear", "dynamic", "llama3", "yarn")  # the others hold factors that fit one head size only


@dataclass(frozen=True)
class Shape:
    """A draft as it will be built."""

    config: PretrainedConfig
    source: str | None
    """Pretrained folder or hub id."""

    @property
    def num_parameters(self) -> int:
        """Weights, tied ones once; counted without allocating them."""
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(self.config).num_parameters()


@dataclass(frozen=True)
class Built:
    """A draft in memory: the module to train, and the adapters inside it where it is trained through those."""

    module: nn.Module
    adapters: PeftModel | None = None


@dataclass(frozen=True)
class Family:
    """One trainable family."""

    shape: Callable[[TrainConfig, ModelDescription | None, PreTrainedTokenizerBase | None], Shape]
    build: Callable[[DraftConfig, Shape], Built]
    export: Callable[..., None]
    """See `train.export.export_lm`."""


def lm_shape(cfg: TrainConfig, target: ModelDescription | None, tokenizer: PreTrainedTokenizerBase | None) -> Shape:
    """A Llama of the configured size over the target's (or the tokenizer's) tokens, or the config of `init_from`."""
    draft = cfg.draft
    if draft.init_from is not None:
        return Shape(AutoConfig.from_pretrained(draft.init_from, revision=draft.revision), draft.init_from)
    tokens = _target_tokens(target) if target else _tokenizer_tokens(tokenizer)
    longest = draft.max_positions or (target.max_positions if target else cfg.sequence_length)
    config = LlamaConfig(
        hidden_size=draft.width,
        intermediate_size=draft.mlp_width or -(-draft.width * 8 // 3 // 64) * 64,
        num_hidden_layers=draft.layers,
        num_attention_heads=draft.heads,
        num_key_value_heads=draft.kv_heads or draft.heads,
        head_dim=draft.width // draft.heads,
        max_position_embeddings=longest,
        tie_word_embeddings=draft.tie_embeddings,
        rope_parameters=_rope(target),
        **tokens,
    )
    return Shape(config, None)


def lm_build(draft: DraftConfig, shape: Shape) -> Built:
    """The draft in fp32, from torch's global generator or pretrained, with adapters where asked for."""
    if shape.source is None:
        return Built(LMDraft.from_config(shape.config))
    module = LMDraft.from_pretrained(shape.source, torch.float32)
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


FAMILIES: dict[str, Family] = {"lm": Family(lm_shape, lm_build, export_lm)}


def _target_tokens(target: ModelDescription) -> dict[str, Any]:
    text = target.config.get_text_config()
    special = {name: getattr(text, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {"vocab_size": target.vocab_size, **special}


def _tokenizer_tokens(tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    assert tokenizer is not None, "a model without a target needs a tokenizer"
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {"vocab_size": len(tokenizer), **special}


def _rope(target: ModelDescription | None) -> dict[str, Any]:
    """The target's rotary embedding where it fits any head size, else its base frequency alone."""
    rope = dict(getattr(target.config.get_text_config(), "rope_parameters", None) or {}) if target else {}
    if isinstance(rope.get("full_attention"), dict):  # one set per kind of layer
        rope = dict(rope["full_attention"])
    rope.pop("partial_rotary_factor", None)
    if rope.get("rope_type", "default") in PLAIN_ROPES:
        return {"rope_type": "default", "rope_theta": 10000.0} | rope
    return {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}
