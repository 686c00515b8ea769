"""What each form of published draft says of itself: how it is read, how it is written, and which tensors any
config.json of it calls for; and the decoder layers that most forms have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from decode.common.checked_json import write_json
from decode.common.errors import InputError
from decode.formats.folder import PublishedFolder
from decode.formats.rope import DEFAULT_BASE, older_rope, written_rope
from decode.formats.weights import save_tensors
from decode.models.describe import ModelDescription

if TYPE_CHECKING:
    from decode.drafters.head_config import HeadConfig
    from decode.formats.source import Source

EMBEDDING, OUTPUT, FUSED = "embed_tokens.weight", "lm_head.weight", "fc.weight"
SPECULATORS_VERSION = "0.9.0"
LAYER = {
    "hidden_size": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_width": "intermediate_size",
    "rms_norm_eps": "rms_norm_eps",
}
"""Our field of a head with attention -> its key in config.json."""
Get = Callable[[str], Tensor]
"""A tensor of the folder by its name there; on the meta device where only shapes are asked for."""


@dataclass(frozen=True)
class Spec:
    """One tensor as an engine makes room for it."""

    shape: tuple[int, ...]
    kind: Literal["weight", "float32", "int64", "bool"] = "weight"
    """weight: the precision of the folder, bfloat16, float16 or float32, one for all of them."""
    optional: bool = False
    """Engines do without it, or take the target's."""
    is_flat: bool = False
    """Engines lay its numbers out anew, whatever shape they are stored in."""

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether what is stored so fits."""
        return prod(shape) == prod(self.shape) if self.is_flat else shape == self.shape


@dataclass(frozen=True)
class Reader:
    """How a head that others publish becomes one of ours."""

    config: Callable[[PublishedFolder, ModelDescription], HeadConfig]
    tensors: Callable[[PublishedFolder, HeadConfig, Get], dict[str, Tensor]]
    """The head's own by our names, and those of another name as they are, which are then refused."""
    ends: Callable[[PublishedFolder], dict[str, str | None]]
    """The tensors whose first rows should be those of the target's "embedding" and "output head", by these words."""


@dataclass(frozen=True)
class Layout:
    """One form of folder. `config` and `tensors` are written; `manifest` says of any config.json of this form, also of
    folders made elsewhere, which tensors belong to it."""

    name: str
    config: Callable[[Source], dict[str, Any]]
    tensors: Callable[[Source], dict[str, Tensor]]
    manifest: Callable[[Mapping[str, Any]], dict[str, Spec]]
    reader: Reader | None = None
    """None of forms that others read: a target's folder, a language model."""
    weights: str = "model.safetensors"
    extras: Callable[[Source, Path], None] = lambda source, folder: None
    """Writes the other files that engines want."""
    note: Callable[[Source], str] = lambda source: ""
    """A sentence of the card, where what is written is not what was trained, number by number."""
    most: Callable[[Mapping[str, Any]], int | None] = lambda fields: None
    """Tokens that there are heads or places for in a round, by config.json; None where it drafts on from its own."""

    def write(self, source: Source, folder: Path) -> None:
        """Put config.json, the weights and the extras into `folder`."""
        write_json(folder / "config.json", self.config(source))
        save_tensors(self.tensors(source), folder / self.weights)
        self.extras(source, folder)


def read_layer(folder: PublishedFolder, target: ModelDescription) -> dict[str, Any]:
    """Fields of a head with attention, all of which config.json says or transformers has a usual value for."""
    fields = folder.fields
    folder.needed("hidden_size", "num_attention_heads", "intermediate_size")
    return {ours: fields[key] for ours, key in LAYER.items()} | {
        "vocab_size": target.vocab_size,
        "rope": written_rope(fields) or {"rope_type": "default", "rope_theta": DEFAULT_BASE},
        "max_positions": fields.get("max_position_embeddings") or target.max_positions,
    }


def written_layer(source: Source) -> dict[str, Any]:
    """The same in config.json, with the rotary embedding twice, since older readers know rope_theta and rope_scaling
    alone."""
    config, text = source.config, source.target.config.get_text_config()
    rope = {"rope_parameters": dict(config.rope)}
    return {key: getattr(config, ours) for ours, key in LAYER.items()} | {
        "vocab_size": config.vocab_size,
        "hidden_act": "silu",
        "max_position_embeddings": source.target.max_positions,
        **rope,
        **older_rope(rope),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": text.bos_token_id,
        "eos_token_id": text.eos_token_id,
        **precision(source.weight_dtype),
        "use_cache": True,
    }


def layer_specs(
    fields: Mapping[str, Any],
    prefix: str,
    read: int,
    *,
    qk_norm: bool,
    norms: tuple[str, ...] = (),
    mlp_bias: Any = False,
) -> dict[str, Spec]:
    """The tensors of a Llama layer, or with `qk_norm` a Qwen3 one, whose queries, keys and values are made from that
    many numbers; `norms` are others that it has."""
    width, inner, size = (fields[name] for name in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = (size * fields[name] for name in ("num_attention_heads", "num_key_value_heads"))
    attention = {"q_proj": (queries, read), "k_proj": (keys, read), "v_proj": (keys, read), "o_proj": (width, queries)}
    mlp = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
    matrices = {f"self_attn.{name}": shape for name, shape in attention.items()}
    matrices |= {f"mlp.{name}": shape for name, shape in mlp.items()}
    vectors = dict.fromkeys(("input_layernorm", "post_attention_layernorm", *norms), (width,))
    vectors |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (size,)) if qk_norm else {}
    biased = ["self_attn."] * bool(fields.get("attention_bias")) + ["mlp."] * bool(mlp_bias)
    shapes = {f"{name}.weight": shape for name, shape in (vectors | matrices).items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in matrices.items() if name.startswith(tuple(biased))}
    return {f"{prefix}.{name}": Spec(shape) for name, shape in shapes.items()}


def precision(dtype: Any) -> dict[str, str]:
    """By both names that readers know."""
    return dict.fromkeys(("dtype", "torch_dtype"), str(dtype).removeprefix("torch."))


def named_target(source: Source) -> str:
    """As whoever opens the folder from elsewhere finds it."""
    path = source.target.path
    return str(Path(path).absolute()) if Path(path).is_dir() else path


def speculators_fields(source: Source, kind: str) -> dict[str, Any]:
    """What the speculators library wants to know of a head, beside its shape: which kind, of which target, and how many
    tokens it drafts; `vllm serve FOLDER` goes by it too."""
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": source.num_draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    verifier = {"name_or_path": named_target(source), "architectures": source.target.config.architectures or []}
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


def check_sizes(folder: PublishedFolder, width: int, vocab: int, target: ModelDescription) -> None:
    """Raise InputError for a head of another target, as far as sizes tell."""
    asked = {"hidden_size": (width, target.hidden_size), "vocab_size": (vocab, target.vocab_size)}
    for name, (ours, theirs) in asked.items():
        if ours != theirs:
            raise InputError(
                f"{folder.path} is a head of a target with {name}={ours}, and {target.path} has {theirs}. Give the "
                "target that it was published for"
            )
