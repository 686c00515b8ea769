"""Keys of EAGLE-3, DFlash and DSpark heads that engines guess where they are absent, or that contradict the draft."""

from __future__ import annotations

from collections.abc import Iterator

from train.check.subject import Finding, Subject

WRITE = "Write it as the draft was trained"


def eagle3(subject: Subject) -> Iterator[Finding]:
    written, fields = subject.folder.written, subject.folder.fields
    yield from _unread(subject)
    if "target_hidden_size" in written and written["target_hidden_size"] is None and not subject.folder.is_speculators:
        yield Finding(
            "target_hidden_size=null",
            "vLLM multiplies it by the number of states, and stops with a TypeError",
            "Write the target's width, or leave the key out",
        )
    if subject.folder.is_speculators and written.get("norm_before_residual") is None:
        yield Finding(
            "norm_before_residual is absent",
            "vLLM takes true for folders of the speculators library, the library itself false",
            "Write false, or true where the residual starts behind the norm",
        )
    if fields.get("norm_before_residual") and any(one.name in ("sglang", "trtllm") for one in subject.engines):
        yield Finding(
            "norm_before_residual=true",
            "SGLang and TensorRT-LLM do not read it, and start the residual before the norm",
            "Serve with vLLM, or train with false",
        )
    if fields.get("draft_vocab_size") is None:
        yield Finding(
            "draft_vocab_size is absent or null",
            "SGLang takes the target's output head in place of the folder's; TensorRT-LLM and llama.cpp do not see "
            "that this is an EAGLE-3 head",
            "Write the rows of lm_head.weight",
        )
    if fields.get("attention_bias") and any(one.name == "sglang" for one in subject.engines):
        yield Finding(
            "attention_bias=true",
            "SGLang has no biases of queries, keys and values in an EAGLE-3 head, and skips them without a word",
            "Serve with vLLM, or train without",
        )
    for name in ("norm_before_fc", "fc_norm", "norm_output"):
        inside = (fields.get("eagle_config") or {}).get(name)
        if inside is not None and bool(inside) != bool(fields.get(name)):
            yield Finding(
                f"{name}={fields.get(name)}, and eagle_config has {inside}",
                "some engines read one, some the other",
                WRITE + ", the same in both places",
            )
    if fields.get("num_aux_hidden_states") is None and (subject.folder.is_ours or not _three_states(subject)):
        yield Finding(
            "num_aux_hidden_states is absent",
            "vLLM and SGLang take the length of eagle_config's list, and without one 3",
            "Write the number of hidden states that fc reads",
        )


def _three_states(subject: Subject) -> bool:
    """Whether what engines guess is what fc has room for."""
    stored, width = subject.folder.stored, subject.folder.fields.get("hidden_size")
    inside = (subject.folder.fields.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    width = subject.folder.fields.get("target_hidden_size") or width
    return "fc.weight" in stored and stored["fc.weight"].shape[-1] == (len(inside) if inside else 3) * (width or 0)


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
    yield from _unread(subject)
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


def _unread(subject: Subject) -> Iterator[Finding]:
    """Hidden states that the folder is made for, and that it says are not used."""
    fields = subject.folder.fields
    for where in ("eagle_config", "dflash_config"):
        if (fields.get(where) or {}).get("use_aux_hidden_state") is False and "fc.weight" in subject.folder.stored:
            yield Finding(
                f"{where} has use_aux_hidden_state=false, and the folder holds fc.weight",
                "vLLM leaves fc.weight aside, and gives the draft the target's last state in place of those it reads",
                "Write true",
            )
