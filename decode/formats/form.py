"""Which form of head a folder holds, by what its tensors are called; the path tells nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from decode.common.checked_json import read_json
from decode.common.errors import InputError
from decode.drafters.provenance import FILE
from decode.formats.folder import PublishedFolder, read_folder
from decode.formats.weights import names_in

WORDS = ("eagle3", "dspark", "dflash2", "lilicorr", "dflash", "medusa")
"""Forms, as `architectures`, `model_type` or `speculators_model_type` name them within a word, in lower case."""
_MARKS = {
    "peagle": re.compile(r"^(model\.)?mask_hidden$"),
    "eagle3": re.compile(r"^(model\.)?(midlayer|layers\.0)\.hidden_norm\.weight$"),
    "medusa": re.compile(r"^(medusa_heads\.|heads\.)?\d+\.\d+\.linear\.weight$|^blocks\.\d+\.layers\.\d+\.weight$"),
    "dspark": re.compile(r"^(model\.)?markov_head\."),
    "dflash2": re.compile(r"^(model\.)?candidate_selector\."),
    "lilicorr": re.compile(r"^(model\.)?lilicorr\."),
    "dflash": re.compile(r"^(model\.)?hidden_norm\.weight$"),
}
"""A tensor that no other form has; but DSpark, DFlash2 and LiLiCorr are DFlash with more, and P-EAGLE is EAGLE-3 with
masks."""
_MORE = {"dflash": {"dspark", "dflash2", "lilicorr"}, "eagle3": {"peagle"}}
"""Form -> those that have its tensors, and more."""
KNOWN = (
    "EAGLE-3 (midlayer.* or layers.0.* with hidden_norm), P-EAGLE (EAGLE-3 with mask_hidden), Medusa (0.0.linear.* or "
    "blocks.0.layers.0.*), DFlash (layers.* with hidden_norm), DSpark (markov_head.* too), DFlash2 "
    "(candidate_selector.* too), LiLiCorr (lilicorr.* too)"
)


def word_of(written: Mapping[str, Any]) -> str | None:
    """The form that config.json names; None where it names none."""
    words = [*(written.get("architectures") or []), written.get("model_type"), written.get("speculators_model_type")]
    text = " ".join(str(word) for word in words).lower()
    named = next((form for form in WORDS if form in text), None)
    return "medusa" if named is None and "medusa_num_heads" in written else named


def published_form(path: str | Path) -> str | None:
    """The form of the published head in a folder; None for a draft of ours and for a language model, whose own readers
    tell what is wrong with it.

    InputError where the tensors are of several forms, of another than config.json names, or of none that is known.
    """
    folder = Path(path)
    if (folder / FILE).is_file() or not (folder / "config.json").is_file():
        return None
    written, names = _written(folder), names_in(folder)
    if word_of(written) is None and not marked(names) and "fc.weight" not in names:
        return None
    return _form_of(read_folder(folder))


def _written(folder: Path) -> dict[str, Any]:
    try:
        written = read_json(folder / "config.json")
    except InputError:
        return {}
    return written if isinstance(written, dict) and isinstance(written.get("architectures") or [], list) else {}


def _form_of(folder: PublishedFolder) -> str:
    found, named = marked(folder.stored), word_of(folder.written)
    if len(found) > 1:
        raise InputError(
            f"{folder.path} holds tensors of several forms of head, {' and '.join(found)}: two folders were mixed, and "
            "each would be read without the other's weights. Give each a folder of its own"
        )
    if not found:
        shown = ", ".join(sorted(folder.stored)[:4])
        told = f"config.json names {named}, and its" if named else "its"
        raise InputError(
            f"{folder.path} is no head that is known here: {told} {len(folder.stored)} tensors are {shown} ... Known "
            f"are {KNOWN}; EAGLE-1 and EAGLE-2 are not"
        )
    if named is not None and named != found[0] and (named, found[0]) != ("eagle3", "peagle"):  # so engines call it
        raise InputError(
            f"{folder.path}/config.json names {named}, and the tensors beside it are those of {found[0]}: two folders "
            "were mixed. Fetch the folder again"
        )
    refuse_single_numbers(folder)
    return found[0]


def refuse_single_numbers(folder: PublishedFolder) -> None:
    """InputError for tensors of shape (), which no head has: what reads rows of them would stop without a word."""
    single = [name for name, one in folder.stored.items() if not one.shape]
    if single:
        raise InputError(
            f"{', '.join(single[:3])} of {folder.path} is a single number, of shape (), and all tensors of a head have "
            "rows: it does not hold the weights that its configuration calls for. Fetch the folder again"
        )


def marked(names: Iterable[str]) -> list[str]:
    """Forms of which there is a tensor."""
    found = [form for form, mark in _MARKS.items() if any(mark.search(name) for name in names)]
    return [form for form in found if not _MORE.get(form, set()) & {*found}]
