"""Multi-token prediction: one layer over [embedding; final hidden state], shared by all steps (DeepSeek-V3, 2024;
applied to its own output as in FastMTP, 2025). Parts are named as in checkpoints that come with such layers: a
target's own MTP layer, which transformers leaves aside when it loads the target, is read from there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from decode.common.errors import InputError
from decode.common.typed_config import require
from decode.drafters.eagle3 import RecursiveDraft
from decode.drafters.head_config import HeadConfig
from decode.drafters.layers import MLP, Extend
from decode.models.describe import ModelDescription
from decode.models.head_targets import check_taps
from decode.models.hidden_states import FINAL
from decode.models.output_head import Ends
from decode.models.small import random_like


@dataclass(frozen=True, kw_only=True)
class MTPConfig(HeadConfig):
    """Shape of an MTP layer; its only tap is the target's final hidden state."""

    family: str = "mtp"
    is_recursive: ClassVar[bool] = True
    qk_norm: bool = False
    """Queries and keys are normalised, as in Qwen3."""
    attention_bias: bool = False
    """Queries, keys and values have biases, as in Qwen2."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.taps == (FINAL,),
            f"mtp starts from the final hidden state of its target, where taps={list(self.taps)} are asked for; leave "
            "draft.head.taps out",
        )

    @classmethod
    def settled(cls, asked: Mapping[str, Any], target: ModelDescription) -> dict[str, Any]:
        """Norms and biases as the target's own layers have them."""
        return {
            "qk_norm": any(name.endswith("q_norm.weight") for name in random_like(target.config).state_dict()),
            "attention_bias": bool(getattr(target.config.get_text_config(), "attention_bias", False)),
        }


class MTPDraft(RecursiveDraft):
    """The state of a slot is what the output head reads: the final hidden state's place in the next step."""

    config: MTPConfig

    def __init__(self, config: MTPConfig, ends: Ends, vocab: Tensor | None = None) -> None:
        super().__init__(config, ends, vocab)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = nn.RMSNorm(width, eps)
        self.hnorm = nn.RMSNorm(width, eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.self_attn = config.attention(qk_norm=config.qk_norm, bias=config.attention_bias)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        self.mlp = MLP(width, config.mlp_width)
        self.norm = nn.RMSNorm(width, eps)

    def fuse(self, features: Tensor) -> Tensor:
        return features[:, :, 0].to(self.dtype)

    def advance(self, state: Tensor, tokens: Tensor, positions: Tensor, extend: Extend) -> Tensor:
        x = self.eh_proj(torch.cat([self.enorm(self.embed(tokens)), self.hnorm(state)], -1))
        x = x + self.self_attn(self.input_layernorm(x), positions, extend)
        return self.norm(x + self.mlp(self.post_attention_layernorm(x)))

    def normed(self, state: Tensor) -> Tensor:
        """What the output head reads of a state: the state, which is normed already."""
        return state


PARTS = {
    "enorm": ("enorm", "pre_fc_norm_embedding", "token_layernorm"),
    "hnorm": ("hnorm", "pre_fc_norm_hidden", "hidden_layernorm"),
    "eh_proj": ("eh_proj", "fc", "input_proj"),
    "norm": ("shared_head.norm", "norm", "final_layernorm", "post_norm"),
}
"""Our name of a part -> its names in checkpoints: DeepSeek and GLM, Qwen, MiMo."""
QWEN = 1
HIDDEN_FIRST = "input_proj"  # MiMo's projection reads [hidden; embedding]
EXTRA_NORMS = "gemma"  # its layers have four norms, and weights that count from 1


def own_mtp(target: ModelDescription, depth: int) -> tuple[MTPConfig, dict[str, Tensor]]:
    """Config and weights of the first MTP layer of `target`, a local folder of safetensors.

    Looked for under `mtp.` (Qwen, EXAONE), `model.layers.L.` behind the target's L layers (DeepSeek, GLM) and
    `model.mtp_layers.0.` (MiMo). Raises InputError where there is none, or one of another structure.
    """
    check_taps(target.config, (FINAL,), target.path)
    check_sees_all(target)
    found = _tensors(target)
    if not found or EXTRA_NORMS in target.config.model_type:
        raise InputError(
            f"{target.path} holds no MTP layer that is known here: neither weights mtp.*, model.mtp_layers.0.* nor "
            f"those of a layer {target.num_layers} behind its {target.num_layers} layers. Train one with draft=mtp"
        )
    weights = {_our_name(name): tensor for name, tensor in found.items()}
    if any(name.startswith(HIDDEN_FIRST) for name in found):
        weights["eh_proj.weight"] = torch.cat(weights["eh_proj.weight"].chunk(2, 1)[::-1], 1)
    config = mtp_config(target, depth, "self_attn.q_norm.weight" in weights, "self_attn.q_proj.bias" in weights)
    with torch.device("meta"):
        wanted = MTPDraft(config, cast(Ends, None)).state_dict()
    wrong = sorted(name for name in {*wanted, *weights} if _shape(wanted, name) != _shape(weights, name))
    if wrong:
        raise InputError(
            f"the MTP layer in {target.path} is not a dense attention layer like the target's own: "
            f"{', '.join(wrong[:6])} are missing, foreign or of another shape. Train one with draft=mtp"
        )
    return config, weights


def check_sees_all(target: ModelDescription) -> None:
    """Raise InputError where the target's own MTP layer looks no further back than a window; where nothing is said of
    it, it is like the target's first layer, as vLLM takes it (model_executor/models/exaone_moe.py)."""
    text = target.config.get_text_config()
    kinds = getattr(text, "mtp_layer_types", None) or getattr(text, "layer_types", None) or ["full_attention"]
    if kinds[0] != "full_attention":
        raise InputError(
            f"the MTP layer of {target.path} has {kinds[0]} (mtp_layer_types or layer_types in its config.json), and "
            "the one here sees all tokens before. Train draft=eagle3, or serve the target's own layer as it is"
        )


def _shape(weights: dict[str, Tensor], name: str) -> torch.Size | None:
    return weights[name].shape if name in weights else None


def mtp_config(target: ModelDescription, depth: int, qk_norm: bool, attention_bias: bool) -> MTPConfig:
    """A layer like the target's own ones."""
    text = target.config.get_text_config()
    return MTPConfig(
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        taps=(FINAL,),
        depth=depth,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        mlp_width=text.intermediate_size,
        rms_norm_eps=text.rms_norm_eps,
        rope=dict(text.rope_parameters),
        max_positions=target.max_positions,
        qk_norm=qk_norm,
        attention_bias=attention_bias,
    )


def _tensors(target: ModelDescription) -> dict[str, Tensor]:
    """Tensors of the layer, by the names they have there without their prefix."""
    own = re.compile(rf"(?:model\.)?(?:mtp\.layers\.0|mtp|mtp_layers\.0|layers\.{target.num_layers})\.(.+)")
    found = {}
    for file in sorted(Path(target.path).glob("*.safetensors")):
        with safe_open(str(file), "pt") as tensors:
            matches = {name: own.fullmatch(name) for name in tensors.keys()}  # noqa: SIM118
            found |= {match[1]: tensors.get_tensor(name) for name, match in matches.items() if match}
    shared = ("embed_tokens", "shared_head.head")  # copies of the target's ends
    return {name: tensor for name, tensor in found.items() if not name.startswith(shared)}


def _our_name(name: str) -> str:
    part, _, kind = name.rpartition(".")
    ours = [our for our, theirs in PARTS.items() if part in theirs]
    return f"{ours[0]}.{kind}" if ours else name
