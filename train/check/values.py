"""What the tensors hold, and the rows that should be the target's."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from decode.formats.vocabulary import drafted_ids
from train.check.subject import Finding, Subject

ONLY = {"float32": torch.float32, "int64": torch.int64, "bool": torch.bool}
WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)
MAY_BE_ZERO = re.compile(r"bias$|markov|confidence|linear|blocks\.")
"""Biases, and residual layers that have learned nothing yet, which start at zero."""
ROWS = 4096


def types(subject: Subject) -> Iterator[Finding]:
    """One precision for all weights; the types of maps between vocabularies."""
    stored, wrong = subject.folder.stored, []
    for name, spec in subject.specs.items():
        dtype = stored[name].dtype
        wanted = WEIGHTS if spec.kind == "weight" else (ONLY[spec.kind],)
        if dtype not in wanted:
            wrong.append(f"{name} is {_name(dtype)}, not {' or '.join(map(_name, wanted))}")
    for one in wrong:
        yield Finding(
            one,
            "an engine casts it or refuses it: ids in floating point lose their last digits, a mask in whole numbers "
            "picks rows in place of marking them",
            "Write it in that type",
        )
    found = {stored[name].dtype for name, spec in subject.specs.items() if spec.kind == "weight"}
    if len(found) > 1 and not wrong:
        yield Finding(
            f"the weights are of several types, {', '.join(sorted(map(_name, found)))}",
            "engines cast all of them to one, the target's, so that some are rounded that were not in training",
            "Write all of them in the one that config.json names",
        )


def finite(subject: Subject) -> Iterator[Finding]:
    """No NaN, no infinity, and no matrix or norm of zeros."""
    counts_from_one = "gemma" in str(subject.folder.fields.get("model_type"))  # a norm's weight of 0 scales by 1 there
    may_be_zero = re.compile(MAY_BE_ZERO.pattern + "|norm") if counts_from_one else MAY_BE_ZERO
    for name in subject.specs:
        if not subject.folder.stored[name].dtype.is_floating_point:
            continue
        values = subject.folder.tensor(name)
        bad = int((~values.isfinite()).sum())
        if bad:
            yield Finding(
                f"{name} holds {bad} values that are NaN or infinite, of {values.numel()}",
                "the engine drafts NaN, or one token over and over, and says nothing",
                "Take an earlier checkpoint of the training",
            )
        elif values.numel() and not values.any() and not may_be_zero.search(name):
            yield Finding(
                f"{name} holds nothing but zeros",
                "the engine drafts the same for every text",
                "Write what was trained: it was never filled, or lost on the way",
            )


def rows_of_the_target(subject: Subject) -> Iterator[Finding]:
    """The embedding is the target's in every form; the output head is as well where `train.export` wrote it, since our
    heads learn behind the target's own. Published ones may have trained one of theirs."""
    for theirs, own in subject.renamed(subject.engines[0]).items():
        if theirs.endswith("embed_tokens.weight") and subject.form != "lm":
            yield from _equal(subject, own, subject.embedding, "embedding")
        is_output = re.search(r"lm_heads?(\.\d+)?\.weight$", theirs) and subject.form != "lm"
        if is_output and subject.folder.is_trained_here:
            rows, ids = subject.output_rows, drafted_ids(subject.folder)
            is_cut = ids is not None and subject.folder.stored[own].shape[0] == len(ids)
            if ids is None or bool(((ids >= 0) & (ids < len(rows))).all()):
                yield from _equal(subject, own, rows[ids] if is_cut else rows, "output head")


def _equal(subject: Subject, name: str, rows: Tensor, what: str) -> Iterator[Finding]:
    found = subject.folder.tensor(name)
    extra = found.shape[0] - rows.shape[0]  # DSpark's mask may be a row behind the vocabulary
    if found.shape[1:] != rows.shape[1:] or extra not in (0, 1):
        return  # reported with the shapes
    pairs = zip(found[: len(rows)].split(ROWS), rows.split(ROWS), strict=True)
    differing = sum(int((one != theirs.to(one.dtype)).any(-1).sum()) for one, theirs in pairs)
    if differing:
        yield Finding(
            f"{differing} of {len(rows)} rows of {name} are not those of the target's {what}",
            "vLLM and TensorRT-LLM draft from the folder's rows, SGLang from the target's, and the head was trained on "
            "the target's: it drafts from other words than it learned",
            "Write the target's own rows, or leave the tensor out where the engine then takes the target's",
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
