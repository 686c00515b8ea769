"""README.md of a folder for an engine: how to serve it, what was tried, what was measured."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from decode.common.markdown import code, fenced
from decode.formats.source import Source
from train.export.engines.base import Engine, Loads
from train.export.model_card import measured

TRIED = {
    "run": "run: accepted tokens there equal draftsmith's own, on small models",
    "checked": "checked against its source, not run",
}


def engine_card(source: Source, commands: Mapping[Engine, str], note: str) -> str:
    """The card; `commands` are the launch commands by engine, `note` is the layout's."""
    target = source.target.path
    fields = {"base_model": target, "tags": ["speculative-decoding", "draftsmith"]}
    head = yaml.safe_dump(fields, allow_unicode=True, width=10**6).strip()
    about = f"A draft ({source.kind}) for {code(target)}, which verifies what it proposes and writes as before."
    lines = ["---", head, "---", "", "# Draft for speculative decoding", "", about, "", "## Serve", ""]
    for engine, command in commands.items():
        lines += [f"{engine.title} ({tried(source, engine)}):", "", fenced("bash", command.splitlines()), ""]
    lines += [
        "Look at the number of accepted tokens, not at the text: verification keeps the text right even where a draft "
        "is loaded wrongly.",
        "",
        *([note, ""] if note else []),
    ]
    head, found = "Teacher-forced on validation text, when it was trained.", source.written.get("measured") or {}
    return "\n".join([*lines, *measured(head, found, source.num_draft_tokens)])


def tried(source: Source, engine: Engine) -> str:
    """From which version on, and whether it was run."""
    how = engine.forms[source.form]
    assert isinstance(how, Loads)
    return f"from {how.since}; {TRIED[how.tried]}"
