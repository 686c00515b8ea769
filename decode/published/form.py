"""Which form of head a folder holds, by what its tensors are called; the path tells nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from decode.common.errors import InputError
from decode.drafters.provenance import FILE
from decode.published.folder import PublishedFolder, read_folder
from decode.published.weights import PICKLES

WORDS = (("eagle3", "eagle3"), ("dspark", "dspark"), ("dflash", "dflash"), ("medusa", "medusa"))
"""A word of `architectures`, `model_type` or `speculators_model_type`, in lower case, and the form it stands for."""
_MARKS = {
    "eagle3": re.compile(r"^(model\.)?(midlayer|layers\.0)\.hidden_norm\.weight$"),
    "medusa": re.compile(r"^(medusa_heads\.|heads\.)?\d+\.\d+\.linear\.weight$|^blocks\.\d+\.layers\.\d+\.weight$"),
    "dspark": re.compile(r"^(model\.)?markov_head\."),
    "dflash": re.compile(r"^(model\.)?hidden_norm\.weight$"),
}
"""A tensor that no other form has; but DSpark is DFlash with a bias."""
KNOWN = (
    "EAGLE-3 (midlayer.* or layers.0.* with hidden_norm), Medusa (0.0.linear.* or blocks.0.layers.0.*), DFlash and "
    "DSpark (layers.* with hidden_norm, markov_head.*)"
)


def word_of(written: dict) -> str | None:
    """The form that config.json names; None where it names none."""
    words = [*(written.get("architectures") or []), written.get("model_type"), written.get("speculators_model_type")]
    text = " ".join(str(word) for word in words).lower()
    return next((form for word, form in WORDS if word in text), None)


def published_form(path: str | Path) -> str | None:
    """The form of the published head in a folder; None for a draft of ours and for a language model.

    InputError where the tensors are of several forms, of another than config.json names, or of none that is known.
    """
    folder = Path(path)
    if (folder / FILE).is_file() or not (folder / "config.json").is_file():
        return None
    if not _may_hold_a_head(folder):
        return None
    read = read_folder(folder)
    return _form_of(read)


def _form_of(folder: PublishedFolder) -> str | None:
    found, named = marked(folder.stored), word_of(folder.written)
    if len(found) > 1:
        raise InputError(
            f"{folder.path} holds tensors of several forms of head, {' and '.join(found)}: two folders were mixed, and "
            "each would be read without the other's weights. Give each a folder of its own"
        )
    if not found and named is None and "fc.weight" not in folder.stored:
        return None
    if not found:
        shown = ", ".join(sorted(folder.stored)[:4])
        raise InputError(
            f"{folder.path} is no head that is known here ({'config.json names ' + named if named else shown}, and its "
            f"{len(folder.stored)} tensors are {shown} ...). Known are {KNOWN}; EAGLE-1 and EAGLE-2 are not"
        )
    if named is not None and named != found[0]:
        raise InputError(
            f"{folder.path}/config.json names {named}, and the tensors beside it are those of {found[0]}: two folders "
            "were mixed. Fetch the folder again"
        )
    return found[0]


def marked(names: Iterable[str]) -> list[str]:
    """Forms of which there is a tensor."""
    found = [form for form, mark in _MARKS.items() if any(mark.search(name) for name in names)]
    return [form for form in found if form != "dflash" or "dspark" not in found]


def _may_hold_a_head(folder: Path) -> bool:
    """Whether weights lie there; a folder without any is told what it lacks by who reads it as a language model."""
    return any(file.suffix in (".safetensors", *PICKLES) for file in folder.iterdir())
