"""A loader as a table: what becomes of each name in a file of weights, and what has to be there in the end."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Loader:
    """Of one form of draft in one engine."""

    source: str
    """Version and file that it was read from."""
    rules: Mapping[str, str | None]
    """Pattern of a whole name -> the parameter that it fills, a part of it in brackets; None where it is passed over on
    purpose. Exactly one has to match."""
    room: Callable[[Fields], set[str]]
    """Parameters, or parts, that stay random, or stop the engine, where the folder does not fill them."""
    shared: frozenset[str] = frozenset()
    """Parameters that the folder may fill, and the target does else."""
    demands: Mapping[str, Callable[[Fields, Fields], bool]] = field(default_factory=dict)
    """What the engine asks of config.json, given the target's too."""

    def taken(self, name: str) -> list[str | None]:
        """What every rule that matches makes of a name."""
        matches = ((re.fullmatch(pattern, name), to) for pattern, to in self.rules.items())
        return [match.expand(to) if to is not None else None for match, to in matches if match]


def fused(prefix: str, norms: tuple[str, ...]) -> set[str]:
    """A decoder layer's parameters where queries, keys and values are one of them, and both halves of the MLP too."""
    parts = {f"{prefix}self_attn.qkv_proj.weight[{one}]" for one in "qkv"}
    parts |= {f"{prefix}mlp.gate_up_proj.weight[{one}]" for one in ("gate", "up")}
    return parts | {f"{prefix}{name}.weight" for name in ("self_attn.o_proj", "mlp.down_proj", *norms)}


def fusing(prefix: str, to: str, norms: tuple[str, ...]) -> dict[str, str | None]:
    """The rules that fill those; `prefix` is a pattern with a group of its own, which `to` names \\1."""
    alone = "|".join(("self_attn.o_proj", "mlp.down_proj", *norms)).replace(".", r"\.")
    return {
        rf"{prefix}self_attn\.([qkv])_proj\.weight": rf"{to}self_attn.qkv_proj.weight[\2]",
        rf"{prefix}mlp\.(gate|up)_proj\.weight": rf"{to}mlp.gate_up_proj.weight[\2]",
        rf"{prefix}({alone})\.weight": rf"{to}\2.weight",
    }


def is_reduced(fields: Fields) -> bool:
    """Whether the draft has fewer tokens than the target."""
    return fields["draft_vocab_size"] < (fields.get("target_vocab_size") or fields["vocab_size"])


def language_model(source: str) -> Loader:
    """Of Llama's, whose names transformers' folders have."""
    norms = ("input_layernorm", "post_attention_layernorm")

    def room(fields: Fields) -> set[str]:
        layers = (fused(f"model.layers.{index}.", norms) for index in range(fields["num_hidden_layers"]))
        ends = {"model.embed_tokens.weight", "model.norm.weight"}
        return set().union(ends, *layers, set() if fields["tie_word_embeddings"] else {"lm_head.weight"})

    return Loader(
        source,
        rules=fusing(r"(model\.layers\.\d+\.)", r"\1", norms)
        | {r"model\.(embed_tokens|norm)\.weight": r"model.\1.weight", r"lm_head\.weight": "lm_head.weight"},
        room=room,
        demands={"as many tokens": lambda ours, target: ours["vocab_size"] == target["vocab_size"]},
    )
