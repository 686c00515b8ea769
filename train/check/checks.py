"""Every check, in the order in which they are run and told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from train.check import blocks, likeness, names, states, values, vocabulary
from train.check.keys import guessed
from train.check.subject import Finding, Subject

HEADS = frozenset(("eagle3", "peagle", "medusa", "dflash", "dflash2", "lilicorr", "dspark"))
RECURSIVE_OR_BLOCKS = HEADS - {"medusa"}
BLOCKS = frozenset(("dflash", "dflash2", "lilicorr", "dspark"))
DRAFTS = HEADS | {"lm"}
EVERY = DRAFTS | {"mtp"}
"""With targets that hold a layer of their own to draft with."""


@dataclass(frozen=True)
class Check:
    """One of them."""

    name: str
    says: str
    """What holds of a folder that passes."""
    run: Callable[[Subject], Iterator[Finding]]
    forms: frozenset[str] = HEADS


CHECKS = (
    Check("target", "the engine drafts so for such a target", likeness.target_type, EVERY),
    Check("names", "every tensor that config.json calls for, of its shape, no other", names.names_and_shapes, EVERY),
    Check("types", "one precision for all weights, ids in int64, marks in bool", values.types, EVERY),
    Check("values", "nothing is NaN or infinite, and no matrix is zero", values.finite, EVERY),
    Check("states", "hidden states listed, in order, inside the target, as many as are read", states.states,
          RECURSIVE_OR_BLOCKS),
    Check("vocabulary", "as many tokens as the target has", vocabulary.sizes, EVERY),
    Check("head", "a reduced vocabulary has an output head of its own", vocabulary.reduced_head),
    Check("tokens", "draft ids stand for ascending tokens, ends of text among them", vocabulary.tokens),
    Check("mask", "the row of the mask is there", blocks.mask, BLOCKS | {"peagle"}),
    Check("keys", "no key is left to an engine's guess, and the layout is the method's", guessed, DRAFTS),
    Check("rope", "rotary positions are said once, or twice alike; a head's are the target's", likeness.rope,
          RECURSIVE_OR_BLOCKS | {"lm"}),
    Check("sizes", "width, context and epsilon are the target's", likeness.sizes, RECURSIVE_OR_BLOCKS),
    Check("rows", "rows of embedding and output head are the target's", values.rows_of_the_target),
)  # fmt: skip


def applicable(subject: Subject) -> list[Check]:
    """The checks of its form."""
    return [one for one in CHECKS if subject.form in one.forms]


def findings(subject: Subject) -> list[Finding]:
    """All faults of the folder; what one check finds keeps no other from looking."""
    return [replace(found, check=one.name) for one in applicable(subject) for found in one.run(subject)]
