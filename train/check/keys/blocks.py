"""Of DFlash and DSpark heads."""

from __future__ import annotations

from collections.abc import Iterator

from train.check.keys.unread import WRITE, unread
from train.check.subject import Finding, Subject


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
