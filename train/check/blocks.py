"""Blocks of DFlash and DSpark heads: keys that engines guess where they are absent, or that contradict the draft; and
the token whose embedding stands in the slots that are to be filled in: one id, which has a row."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import torch

from decode.formats.mask import MASK_FILE, MASK_ID
from train.check.states import unread
from train.check.subject import WRITE, Finding, Subject


def dflash(subject: Subject) -> Iterator[Finding]:
    fields = subject.folder.fields
    anchor = (fields.get("dflash_config") or {}).get("sample_from_anchor", fields.get("sample_from_anchor"))
    if anchor:
        yield Finding(
            "sample_from_anchor=true: slot k drafts the token k + 1 places behind its anchor, slot 0 included",
            "vLLM's runner of version 1, SGLang, TensorRT-LLM and llama.cpp take slot k for the token k places behind "
            "it, and nearly nothing is accepted; vLLM's second runner refuses",
            "Train with draft.head.layout=fill_in, or serve as DSpark",
        )
    if fields.get("block_size") == 1:
        yield Finding("block_size=1", "its one slot holds the token before the block, and nothing is drafted", WRITE)
    yield from _blocks(subject)


def dspark(subject: Subject) -> Iterator[Finding]:
    fields = subject.folder.fields
    # without it, plain folders are read by their authors' layout, which theirs leave unsaid
    is_unclear = subject.folder.is_ours or subject.folder.is_speculators
    if fields.get("sample_from_anchor") is None and is_unclear:
        yield Finding(
            "sample_from_anchor is absent",
            "vLLM takes true, but false for folders of the speculators library: the block is read a place too early or "
            "too late, and nearly nothing is accepted",
            "Write true for draft.head.layout=anchor, false for fill_in",
        )
    if fields.get("markov_head_type") not in (None, "vanilla"):
        yield Finding(
            f"markov_head_type={fields['markov_head_type']}",
            "vLLM reads every bias as a vanilla one; SGLang makes room for gates or a recurrent state, and leaves it "
            "random where the folder holds none",
            "Write vanilla, which is what is checked here",
        )
    if not fields.get("markov_rank"):
        yield Finding(
            f"markov_rank={fields.get('markov_rank')}",
            "vLLM and SGLang want at least 1",
            "Write the rank; 1 with zeros is none",
        )
    yield from _blocks(subject)


def _blocks(subject: Subject) -> Iterator[Finding]:
    fields, layers = subject.folder.fields, subject.target.num_layers
    yield from unread(subject)
    told = {fields.get("is_causal"), (fields.get("dflash_config") or {}).get("causal")} - {None}
    if len(told) > 1:
        yield Finding(
            f"is_causal={fields['is_causal']}, and dflash_config has causal={fields['dflash_config']['causal']}",
            "vLLM reads the first, others the second: whether a slot of a block sees those behind it",
            WRITE + ", the same in both places",
        )
    if fields.get("block_size") is None:
        yield Finding("block_size is absent", "SGLang refuses the folder; others draft what they are told to", WRITE)
    told, inside = fields.get("block_size"), (fields.get("dflash_config") or {}).get("block_size")
    if None not in (told, inside) and told != inside:
        yield Finding(
            f"block_size={told}, and dflash_config has {inside}",
            "some engines read one, some the other",
            WRITE + ", the same in both places",
        )
    known = fields.get("num_target_layers")
    if known is not None and known != layers:
        yield Finding(
            f"num_target_layers={known}, and the target has {layers}",
            "the ids of states mean layers of another target",
            "Serve the target that the draft was trained on",
        )


def mask_token(subject: Subject) -> int | None:
    """The id that stands in a block for tokens that are not there yet."""
    return next(iter(_masks(subject).values()), None)


def _masks(subject: Subject) -> dict[str, int]:
    """Each place of config.json that names it."""
    fields = subject.folder.fields
    nested = {f"{name}.": fields.get(name) or {} for name in ("dflash_config", "dspark_config")}
    found = {f"{where}{MASK_ID}": one.get(MASK_ID) for where, one in {**nested, "": fields}.items()}
    found |= {name: fields.get(name) for name in ("pard_token", "ptd_token_id")}  # P-EAGLE's, in vLLM
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
        row, its_token = (state["embedding"], state.get(MASK_ID, token)) if isinstance(state, dict) else (
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
