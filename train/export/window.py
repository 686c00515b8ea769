"""Windows of attention in engines: none has sinks at the first positions of a text; without them a Llama is what a
Mistral of the same weights is with `sliding_window`, and that is what is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decode.common.checked_json import read_json
from decode.forward.window import FIELDS, Window
from train.export.engines.base import Engine, Loads
from train.export.source import Source

NOT_OF_MISTRAL = ("layer_types", "attention_bias", "mlp_bias", "pretraining_tp", *FIELDS)
SLIDING = ("llama", "mistral")


def refuses_window(source: Source, engine: Engine) -> str | None:
    """Why this engine cannot draft as this draft was trained to attend; None where it can."""
    window, how = source.window, engine.forms[source.form]
    if window is None:
        return None
    who = f"{source.folder} attends to its first {window.sinks} and last {window.size} positions"
    if window.sinks:
        return (
            f"{who}, and {engine.title} has no sinks before its windows: it would draft with other positions in sight "
            "than were trained, and less would be accepted. Serve it with draftsmith itself, or train with "
            "draft.sinks=0 for format=transformers"
        )
    if not (isinstance(how, Loads) and how.slides):
        return (
            f"{who}, and {engine.title} was not tried with drafts that have a window; one that overlooks it drafts "
            "with the whole text in sight, and less is accepted. Use format=transformers, serve it with draftsmith "
            "itself, or train without draft.window"
        )
    return _no_mistral(read_json(source.folder / "config.json"), who)


def _no_mistral(fields: Mapping[str, Any], who: str) -> str | None:
    biased = [name for name in ("attention_bias", "mlp_bias") if fields.get(name)]
    if fields["model_type"] in SLIDING and not biased:
        return None
    what = f"a {fields['model_type']} model{f' with {biased[0]}' if biased else ''}"
    return (
        f"{who}, and is {what}, of which no form with a sliding_window is written. Start from a Llama or Mistral "
        "(draft.init_from), or serve it with draftsmith itself"
    )


def as_sliding(fields: Mapping[str, Any], window: Window) -> dict[str, Any]:
    """config.json of the Mistral with the same weights and the same window, in every layer."""
    assert window.sinks == 0, "refused before"
    kept = {name: value for name, value in fields.items() if name not in NOT_OF_MISTRAL}
    return kept | {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": min(window.size, fields.get("sliding_window") or window.size),
    }
