"""Whether an engine loads a draft, and why it does not: what train/export/engines says of its form, target and
configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decode.common.checked_json import read_json
from decode.common.errors import InputError
from decode.drafters.dspark import DSparkConfig
from decode.drafters.head_config import HeadConfig
from decode.formats.lm import SLIDING
from decode.formats.source import Source
from decode.models.describe import ModelDescription
from train.export.engines import ENGINES
from train.export.engines.base import FORMS, Engine, Loads


def form_of(family: str, config: HeadConfig | None) -> str:
    """What engines tell a draft by: its family, but `dflash` of blocks whose tokens do not know each other."""
    is_dflash = isinstance(config, DSparkConfig) and config.layout == "fill_in" and not config.num_known
    return "dflash" if is_dflash else family


def foreseen(family: str, config: HeadConfig, target: ModelDescription) -> list[str]:
    """Lines on the engines that will load a head of this shape, and on those that load its form and not this one."""
    source = Source(Path("the draft"), form_of(family, config), target, None, config.depth, {}, config)
    if source.form not in FORMS:  # a family that was added, and is not written for engines yet
        return []
    hows = {name: engine.forms[source.form] for name, engine in ENGINES.items()}
    known = [name for name, how in hows.items() if isinstance(how, Loads)]
    if not known:
        return [f"engines that load it: none. {next(iter(hows.values()))}"]
    refused = {name: _foreseen_by(ENGINES[name], source) for name in known}
    served = ", ".join(name for name in known if not refused[name])
    reasons = [why for why in dict.fromkeys(refused.values()) if why]
    named = {why: ", ".join(name for name in known if refused[name] == why) for why in reasons}
    return [f"engines that load it: {served or 'none'}", *(f"not {who}: {why}" for why, who in named.items())]


def _foreseen_by(engine: Engine, source: Source) -> str | None:
    try:
        return refusal(engine, source)
    except InputError:  # a layer of its target is asked for its weights, and there are none yet
        return None


def refusal(engine: Engine, source: Source) -> str | None:
    """Why the engine does not load this draft; None where it does, be it with transformers' class of the target, which
    an export is told by model_impl."""
    found, why = loads(engine, source, "auto")
    if found is None:
        found, _ = loads(engine, source, "transformers")
    return None if found is not None else why


def loads(engine: Engine, source: Source, model_impl: str) -> tuple[Loads | None, str]:
    """How the engine loads this draft, or None and the reason."""
    how = engine.forms[source.form]
    if isinstance(how, str):
        return None, how
    why = (
        _refuses_gguf(source, how)
        or _refuses_few(source)
        or _refuses_window(source, engine)
        or how.refuses(source, model_impl)
    )
    return (how, "") if why is None else (None, why)


def _refuses_gguf(source: Source, how: Loads) -> str | None:
    """Why the target's file would not do; None where the target is a folder, or the engine takes the file."""
    if how.takes_gguf or not source.is_for_gguf:
        return None
    return (
        f"{source.target.path} is a GGUF file, and a target in transformers format is wanted there. Write it as one, "
        f"python scripts/unpack_gguf.py {source.target.path} FOLDER, and give target.path=FOLDER"
    )


def _refuses_few(source: Source) -> str | None:
    """Rows that were never trained to be drafted would be."""
    if source.few_tokens is None:
        return None
    return (
        f"{source.folder} drafts {source.few_tokens} of its tokens (draft_vocab in config.json), which engines do not "
        "heed: they would draft the others too. Serve it with draftsmith itself, or train without draft.head.vocab"
    )


def _refuses_window(source: Source, engine: Engine) -> str | None:
    """No engine has sinks at the first positions of a text; without them a window is `as_sliding`."""
    window, how = source.window, engine.forms[source.form]
    if window is None:
        return None
    who = f"{source.folder} attends to its first {window.sinks} and last {window.size} positions"
    if window.sinks:
        return (
            f"{who}, and {engine.title} has no sinks before its windows: less would be accepted. Serve it with "
            "draftsmith itself, or train with draft.sinks=0 for format=transformers"
        )
    if not (isinstance(how, Loads) and how.slides):
        return (
            f"{who}, and {engine.title} was not tried with drafts that have a window. Use format=transformers, serve "
            "it with draftsmith itself, or train without draft.window"
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
