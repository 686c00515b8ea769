"""All of them."""

from __future__ import annotations

from collections.abc import Iterator

from train.check.keys.blocks import dflash, dspark
from train.check.keys.both_halves import halves
from train.check.keys.eagle3 import eagle3
from train.check.keys.medusa import medusa
from train.check.subject import Finding, Subject

_BY_FORM = {"eagle3": eagle3, "medusa": medusa, "dflash": dflash, "dspark": dspark}


def guessed(subject: Subject) -> Iterator[Finding]:
    """Those of the form."""
    yield from _BY_FORM.get(subject.form, lambda subject: iter(()))(subject)
    yield from halves(subject)
    fields = subject.folder.fields
    if fields.get("tie_word_embeddings") and subject.form == "lm" and "lm_head.weight" in subject.folder.stored:
        yield Finding(
            "tie_word_embeddings=true, and the folder holds lm_head.weight",
            "engines take the embedding for the output head, and drop the other one without a word",
            "Write false, or leave lm_head.weight out where both are the same",
        )
    if fields.get("tie_word_embeddings") and subject.form != "lm":
        yield Finding(
            "tie_word_embeddings=true",
            "SGLang takes the embedding for the output head and leaves the head aside; readers of transformers 4 take "
            "it for true where it is absent in some model types",
            "Write false, and ship the output head",
        )
