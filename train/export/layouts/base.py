"""What every layout is: the one description of how a form of draft lies in a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from decode.common.checked_json import write_json
from train.export.draft_folder import older_rope, save_tensors
from train.export.source import Source

FILE = "draftsmith_export.json"
"""What an exported folder says of itself; engines do not read it."""


SPECULATORS_VERSION = "0.9.0"


@dataclass(frozen=True)
class Spec:
    """One tensor as an engine makes room for it."""

    shape: tuple[int, ...]
    kind: Literal["weight", "float32", "int64", "bool"] = "weight"
    """weight: the precision of the folder, bfloat16, float16 or float32, one for all of them."""
    optional: bool = False
    """Engines do without it, or take the target's."""


@dataclass(frozen=True)
class Layout:
    """One form of folder. `config` and `tensors` are written; `manifest` says of any config.json of this form, also of
    folders made elsewhere, which tensors belong to it."""

    name: str
    config: Callable[[Source], dict[str, Any]]
    tensors: Callable[[Source], dict[str, Tensor]]
    manifest: Callable[[Mapping[str, Any]], dict[str, Spec]]
    weights: str = "model.safetensors"
    extras: Callable[[Source, Path], None] = lambda source, folder: None
    """Writes the other files that engines want."""
    note: Callable[[Source], str] = lambda source: ""
    """A sentence of the card, where what is written is not what was trained, number by number."""

    def write(self, source: Source, folder: Path) -> None:
        """Put config.json, the weights and the extras into `folder`."""
        write_json(folder / "config.json", self.config(source))
        save_tensors(self.tensors(source), folder / self.weights)
        self.extras(source, folder)


def ascending(weight: Tensor, taps: Sequence[int]) -> Tensor:
    """What reads the states of all taps side by side (..., n * d), in the order in which engines hand them over: that
    of the target's layers."""
    order = sorted(range(len(taps)), key=taps.__getitem__)
    return weight.unflatten(-1, (len(taps), -1))[..., order, :].flatten(-2).contiguous()


def token_maps(source: Source) -> dict[str, Tensor]:
    """Of a reduced vocabulary: d2t (V_draft,) is what to add to a draft id, t2d (V,) which of the target's tokens are
    drafted. Nothing where all of them are."""
    ids, vocab_size = source.head.vocab, source.config.vocab_size
    if ids is None or len(ids) == vocab_size:
        return {}
    drafted = torch.zeros(vocab_size, dtype=torch.bool)
    drafted[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": drafted}


def decoder_fields(source: Source) -> dict[str, Any]:
    """The fields of config.json that every transformer layer needs, as heads have them from their target: with the
    rotary embedding twice, since older readers know rope_theta and rope_scaling alone."""
    config, text = source.config, source.target.config.get_text_config()
    name = str(source.weight_dtype).removeprefix("torch.")
    rope = {"rope_parameters": dict(config.rope)}
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_width,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": source.target.max_positions,
        **rope,
        **older_rope(rope),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": text.bos_token_id,
        "eos_token_id": text.eos_token_id,
        "dtype": name,
        "torch_dtype": name,
        "use_cache": True,
    }


def speculators_fields(source: Source, kind: str) -> dict[str, Any]:
    """What the speculators library wants to know of a head, beside its shape: which kind, of which target, and how many
    tokens it drafts; `vllm serve FOLDER` goes by it too."""
    path = Path(source.target.path)
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": source.num_draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    verifier = {
        "name_or_path": str(path.absolute()) if path.is_dir() else source.target.path,
        "architectures": source.target.config.architectures or [],
    }
    return {
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": verifier,
        },
    }
