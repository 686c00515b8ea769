"""What reads one form of published head: its configuration and its tensors, under our own names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from decode.common.errors import InputError
from decode.drafters.head_draft import HeadConfig
from decode.formats.folder import PublishedFolder
from decode.formats.rope import DEFAULT_BASE, written_rope
from decode.models.load import ModelDescription

Get = Callable[[str], Tensor]
"""A tensor of the folder by its name there; on the meta device where only shapes are asked for."""
DEPTH = 4
"""Tokens that training unrolls of a head whose folder does not say how many it was trained with."""


@dataclass(frozen=True)
class Reader:
    """Of one form."""

    form: str
    config: Callable[[PublishedFolder, ModelDescription], HeadConfig]
    tensors: Callable[[PublishedFolder, HeadConfig, Get], dict[str, Tensor]]
    """The head's own by our names, and those of another name as they are, which are then refused."""
    embedding: Callable[[PublishedFolder, HeadConfig], str | None]
    """The tensor whose first V rows should be the target's embedding; None where there is none."""
    output_head: Callable[[PublishedFolder, HeadConfig], str | None]
    """The tensor whose rows should be those of the target's output head."""


def layer_fields(folder: PublishedFolder, target: ModelDescription) -> dict[str, Any]:
    """Fields of a head with attention, all of which config.json says or transformers has a usual value for."""
    fields, given = folder.fields, needed(folder, "hidden_size", "num_attention_heads", "intermediate_size")
    return {
        "hidden_size": given["hidden_size"],
        "vocab_size": target.vocab_size,
        "heads": given["num_attention_heads"],
        "kv_heads": fields["num_key_value_heads"],
        "head_dim": fields["head_dim"],
        "mlp_width": given["intermediate_size"],
        "rms_norm_eps": fields["rms_norm_eps"],
        "rope": written_rope(fields) or {"rope_type": "default", "rope_theta": DEFAULT_BASE},
        "max_positions": fields.get("max_position_embeddings") or target.max_positions,
    }


def needed(folder: PublishedFolder, *names: str) -> dict[str, Any]:
    """Values of config.json; InputError where one is not there."""
    missing = [name for name in names if folder.fields.get(name) is None]
    if missing:
        raise InputError(
            f"{folder.path}/config.json does not say {', '.join(missing)}, so that no head can be built that its "
            "weights fit. Fetch the folder again, or write the values that it was trained with"
        )
    return {name: folder.fields[name] for name in names}


def check_sizes(folder: PublishedFolder, width: int, vocab: int, target: ModelDescription) -> None:
    """Raise InputError for a head of another target, as far as sizes tell."""
    asked = {"hidden_size": (width, target.hidden_size), "vocab_size": (vocab, target.vocab_size)}
    for name, (ours, theirs) in asked.items():
        if ours != theirs:
            raise InputError(
                f"{folder.path} is a head of a target with {name}={ours}, and {target.path} has {theirs}: it would "
                "draft from other states or for other tokens than it was trained for. Give the target that it was "
                "published for"
            )


def only(folder: PublishedFolder, wanted: Mapping[str, Any], why: str) -> None:
    """Raise InputError where config.json has another value than what is computed here; null and absent are fine."""
    for name, value in wanted.items():
        found = folder.fields.get(name)
        if found is not None and found != value:
            raise InputError(
                f"{folder.path}/config.json says {name}={found}, and heads are computed here with {value}: {why}. "
                "Serve this head with the engine that it was published for"
            )
