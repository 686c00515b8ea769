"""Of EAGLE-3 heads."""

from __future__ import annotations

from collections.abc import Iterator

from train.check.keys.unread import WRITE, unread
from train.check.subject import Finding, Subject


def eagle3(subject: Subject) -> Iterator[Finding]:
    written, fields = subject.folder.written, subject.folder.fields
    yield from unread(subject)
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
