"""Keys of config.json that engines guess where they are absent, or that contradict the draft, or each other."""

from __future__ import annotations

from collections.abc import Iterator

from decode.formats.base import FUSED, OUTPUT
from decode.formats.eagle3 import NESTED
from decode.formats.folder import completed
from decode.formats.rope import written_rope
from decode.formats.states import listed
from train.check.blocks import dflash, dspark
from train.check.states import unread
from train.check.subject import WRITE, Finding, Subject

_OF_LAYERS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "hidden_act rms_norm_eps max_position_embeddings rope attention_bias mlp_bias"
).split()


def guessed(subject: Subject) -> Iterator[Finding]:
    """Those of the form."""
    yield from _BY_FORM.get(subject.form, lambda subject: iter(()))(subject)
    yield from _halves(subject)
    fields = subject.folder.fields
    if fields.get("tie_word_embeddings") and subject.form == "lm" and OUTPUT in subject.folder.stored:
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


def _eagle3(subject: Subject) -> Iterator[Finding]:
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
    inside = listed(subject.folder.fields).get(NESTED)
    width = subject.folder.fields.get("target_hidden_size") or width
    return FUSED in stored and stored[FUSED].shape[-1] == (len(inside) if inside else 3) * (width or 0)


def _medusa(subject: Subject) -> Iterator[Finding]:
    fields, stored = subject.folder.fields, subject.folder.stored
    biases = [name for name in stored if name.endswith("bias")]
    if not fields.get("medusa_fc_bias") and biases:
        yield Finding(
            f"medusa_fc_bias={fields.get('medusa_fc_bias')}, and the folder holds {len(biases)} biases",
            "vLLM takes false where it is absent, and drops them without a word",
            "Write true",
        )
    counts = [name for name in subject.folder.written if "num" in name and "heads" in name]
    layers = [name for name in subject.folder.written if "num" in name and "layers" in name]
    for names in (counts, layers):
        if len(names) != 1:
            yield Finding(
                f"config.json has {len(names)} keys for one number: {', '.join(names) or 'none'}",
                "vLLM takes every key that holds num with heads (with layers) for the number of Medusa heads (of their "
                "layers), and keeps the last; without one it takes 5 heads of 1 layer",
                "Write medusa_num_heads and medusa_num_layers, and no other such key",
            )


def _halves(subject: Subject) -> Iterator[Finding]:
    """What describes the layers is said twice in folders that are for engines and for the speculators library."""
    written = subject.folder.written
    nested = written.get("transformer_layer_config")
    unread = [engine.title for engine in subject.engines if engine.name in ("sglang", "trtllm")]
    if subject.folder.is_speculators and unread:
        yield Finding(
            "config.json is of the speculators library, without model_type and sizes at the top",
            f"{', '.join(unread)} cannot read such folders, and stop",
            "Serve with vLLM, or write what transformer_layer_config holds at the top as well",
        )
    if nested is None or subject.folder.is_speculators:
        return
    top, inside = ({**completed(one), "rope": written_rope(one)} for one in (written, nested))
    wrong = [name for name in _OF_LAYERS if (top.get(name) or None) != (inside.get(name) or None)]
    if wrong:
        yield Finding(
            "; ".join(f"{one}={top.get(one)}, and transformer_layer_config has {inside.get(one)}" for one in wrong),
            "engines read the first, and take a default where it is absent; the speculators library reads the second",
            WRITE + ", the same in both places",
        )


_BY_FORM = {
    "eagle3": _eagle3,
    "peagle": _eagle3,
    "medusa": _medusa,
    "dflash": dflash,
    "dflash2": dflash,
    "lilicorr": dflash,
    "dspark": dspark,
}
