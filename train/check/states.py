"""Which of the target's hidden states the draft reads, and whether every engine finds the same ones."""

from __future__ import annotations

from collections.abc import Iterator

from decode.formats import blocks, eagle3
from decode.formats.base import FUSED
from decode.formats.states import listed
from train.check.subject import Finding, Subject

WANTED = {
    "eagle3": (eagle3.AT_TOP, eagle3.NESTED),
    "peagle": (eagle3.AT_TOP, eagle3.NESTED),
    "dflash": (blocks.NESTED,),
    "dflash2": (blocks.NESTED,),
    "lilicorr": (blocks.NESTED,),
    "dspark": (blocks.AT_TOP,),
}
_USUAL = (
    "each engine has a rule of its own for what is not listed: (2, L // 2, L - 3) of L layers, the other list as it "
    "stands, or the other list plus one"
)
_SPREAD = "the engine refuses the folder, or spreads as many states as fc has room for over the layers"


def states(subject: Subject) -> Iterator[Finding]:
    """Listed, in both conventions where engines read both, ascending, inside the target, and as many as fc reads."""
    found = listed(subject.folder.fields)
    yield from _absent(subject, found)
    if not found:
        return
    (first, taps), *others = found.items()
    for name, ids in others:
        if ids != taps:
            yield Finding(
                f"{first} means the hidden states {list(taps)} (0 the embeddings), and {name} means {list(ids)}",
                "engines read one list or the other, so that some give the draft the states of other layers, without a "
                "word: from 58.9 to 1.2 % accepted in vLLM's own report",
                f"Write {first} as trained, and the other list one lower, or the other way round",
            )
    layers = subject.target.num_layers
    if list(taps) != sorted(set(taps)) or not all(0 < tap < layers for tap in taps):
        yield Finding(
            f"{first} means the hidden states {list(taps)} of a target of {layers} layers",
            "engines look whether a layer is in the list: they hand states over in ascending order, once each, and "
            "those outside 1 to L - 1 never",
            "List ascending ids of layers that the target has, with the columns of fc in that order",
        )
    yield from _counted(subject, len(taps))


def _absent(subject: Subject, found: dict[str, tuple[int, ...]]) -> Iterator[Finding]:
    wanted, is_eagle = WANTED[subject.form], subject.form in ("eagle3", "peagle")
    if subject.folder.is_speculators:
        wanted = wanted[:1] if is_eagle else (blocks.SPECULATORS,)
    if subject.form == "dspark" and not subject.folder.is_speculators and found:
        wanted = ()  # read wherever it stands
    for name in wanted:
        if name not in found:
            there = "; ".join(f"{one} means {list(ids)}" for one, ids in found.items()) or "no list is there"
            yield Finding(
                f"config.json has no {name} ({there})",
                _USUAL if is_eagle else _SPREAD,
                "Write it as trained"
                + (", one lower than the list above it" if name.startswith("eagle_config") else ""),
            )


def _counted(subject: Subject, count: int) -> Iterator[Finding]:
    fields, stored = subject.folder.fields, subject.folder.stored
    written = fields.get("num_aux_hidden_states")
    if written is not None and written != count:
        yield Finding(
            f"num_aux_hidden_states={written}, and {count} states are listed",
            "vLLM and SGLang make room in fc for that many, and hand over as many as are listed",
            "Write the number of listed states",
        )
    width = fields.get("target_hidden_size") or subject.target.hidden_size
    if width != subject.target.hidden_size:
        yield Finding(
            f"target_hidden_size={width}, and the target's states have {subject.target.hidden_size}",
            "fc gets states of another width than it has columns for",
            "Write the target's width, or serve the target that the draft was trained on",
        )
    if FUSED in stored and stored[FUSED].shape[-1] != count * width:
        yield Finding(
            f"fc.weight has {stored[FUSED].shape[-1]} columns, and {count} states of {width} are listed",
            "the engine fails at the first token, or reads other columns",
            "List as many states as fc was trained on",
        )


def unread(subject: Subject) -> Iterator[Finding]:
    """Hidden states that the folder is made for, and that it says are not used."""
    fields = subject.folder.fields
    for where in ("eagle_config", "dflash_config"):
        if (fields.get(where) or {}).get("use_aux_hidden_state") is False and FUSED in subject.folder.stored:
            yield Finding(
                f"{where} has use_aux_hidden_state=false, and the folder holds fc.weight",
                "vLLM leaves fc.weight aside, and gives the draft the target's last state in place of those it reads",
                "Write true",
            )
