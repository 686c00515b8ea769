"""The token whose embedding stands in the slots that a block is to fill in: one id, which has a row."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import torch

from decode.formats.blocks import MASK_FILE
from train.check.subject import Finding, Subject


def mask_token(subject: Subject) -> int | None:
    """The id that stands in a block for tokens that are not there yet."""
    return next(iter(_masks(subject).values()), None)


def _masks(subject: Subject) -> dict[str, int]:
    """Each place of config.json that names it."""
    fields = subject.folder.fields
    nested = {f"{name}.": fields.get(name) or {} for name in ("dflash_config", "dspark_config")}
    found = {f"{where}mask_token_id": one.get("mask_token_id") for where, one in {**nested, "": fields}.items()}
    return {name: token for name, token in found.items() if token is not None}


def mask(subject: Subject) -> Iterator[Finding]:
    """The mask's row: one of the vocabulary, or of a file of its own."""
    token, vocab = mask_token(subject), subject.folder.fields.get("vocab_size") or subject.target.vocab_size
    if token is None:
        yield Finding(
            "config.json has no mask_token_id",
            "TensorRT-LLM takes vocab_size, which is no row; the others refuse the folder",
            "Write the id of the row that the draft learned as its mask (mask_token_id, in dflash_config for DFlash)",
        )
        return
    if len(set(_masks(subject).values())) > 1:
        yield Finding(
            f"the mask has several ids: {', '.join(f'{name}={one}' for name, one in _masks(subject).items())}",
            "engines read one or the other, and the wrong one is a token that the draft does not know as its mask",
            "Write the same id in all places",
        )
    if not 0 <= token < vocab:
        yield Finding(
            f"mask_token_id={token} is no row of the {vocab} of vocab_size",
            "the engine reads outside of the embedding",
            "Write the id of a row, or a row behind the vocabulary with vocab_size one more",
        )
    names = {engine.name for engine in subject.engines}
    if subject.form == "dspark" and token >= subject.target.vocab_size and "sglang" in names:
        yield Finding(
            f"mask_token_id={token} is a row behind the target's {subject.target.vocab_size} tokens",
            "SGLang takes the target's embedding, which has no such row",
            "Train with draft.head.mask_token=ID, or serve with vLLM",
        )
    yield from _mask_file(subject, token)


def _mask_file(subject: Subject, token: int) -> Iterator[Finding]:
    file = subject.folder.path / MASK_FILE
    if not file.is_file():
        return
    try:
        state = torch.load(file, weights_only=True)
        row, its_token = (state["embedding"], state.get("mask_token_id", token)) if isinstance(state, dict) else (
            state, token,
        )  # fmt: skip
        row = row.reshape(-1)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, KeyError, AttributeError, ValueError) as error:
        yield Finding(
            f"{MASK_FILE} cannot be read as tensors alone ({type(error).__name__})",
            "engines read it with weights_only=True, and stop",
            'Write {"embedding": tensor, "mask_token_id": id} by torch.save',
        )
        return
    width = subject.folder.fields.get("hidden_size")
    if its_token != token or len(row) != width or not bool(row.isfinite().all()) or not bool(row.any()):
        yield Finding(
            f"{MASK_FILE} holds {len(row)} values for token {its_token}, and config.json has hidden_size={width} and "
            f"mask_token_id={token}; they should be finite, and not all zero",
            "vLLM stops where the tokens differ, and else drafts from a mask that the draft does not know",
            "Write the row that was trained, under the id of config.json",
        )
