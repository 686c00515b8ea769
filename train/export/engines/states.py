"""Which hidden states of the target an engine can hand to a head."""

from __future__ import annotations

from decode.models.hidden_states import FINAL
from train.export.source import Source


def not_captured(source: Source, engine: str, *, embeddings: bool, last: bool) -> str | None:
    """Why `engine` cannot serve a head with these taps. The final state, normed, is captured by none; some capture
    the `embeddings`, tap 0, and the raw output of the `last` layer."""
    num_layers, taps = source.target.num_layers, source.config.taps
    kinds = {FINAL: (False, "the final state, normed"), 0: (embeddings, "the embeddings")}
    kinds[num_layers] = (last, "the last layer's raw output")
    lacking = [f"{tap} ({kinds[tap][1]})" for tap in taps if tap in kinds and not kinds[tap][0]]
    if not lacking:
        return None
    return (
        f"the head reads the target's hidden states {list(taps)}, and {engine} does not hand over "
        f"{', '.join(lacking)}, so that it would draft from others; train it with draft.head.taps of 1 to "
        f"{num_layers - 1}"
    )
