"""Which hidden states of a target engines can hand to a head."""

from __future__ import annotations

from decode.formats.source import Source


def not_captured(source: Source) -> str | None:
    """Why no engine can serve a head with these taps: they capture what goes from one layer into the next. The
    embeddings (0) and the last layer's output are captured by some, and the final state, normed, by none."""
    num_layers, taps = source.target.num_layers, source.taps
    outside = [tap for tap in taps if not 0 < tap < num_layers]
    if not outside:
        return None
    return (
        f"the head reads the hidden states {list(taps)} of a target of {num_layers} layers, and engines hand over "
        f"those between its layers, 1 to {num_layers - 1}, not {outside}; train it with draft.head.taps out of those"
    )


def unknown_layer(source: Source, engine: str, knows: frozenset[str] = frozenset()) -> str | None:
    """Why `engine` cannot compute the layer of an EAGLE-3 head that began as one of the speculators library."""
    parts = ("norm_before_residual", "qk_norm", "attention_bias")
    present = [part for part in parts if getattr(source.config, part) and part not in knows]
    if not present:
        return None
    return (
        f"{engine} does not know {' and '.join(present)}, which this head began with as a published one; serve it with "
        "vLLM, or train one without draft.init_from"
    )


def other_target(source: Source, engine: str, known: frozenset[str]) -> str | None:
    """Why `engine` cannot serve a head on a target of this type."""
    kind = source.target.config.get_text_config().model_type
    if kind in known:
        return None
    return (
        f"{engine} drafts with heads for targets of the types {', '.join(sorted(known))}, and this one is {kind}; "
        "train draft=lm, which reads no hidden states"
    )
