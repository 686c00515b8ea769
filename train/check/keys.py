"""Keys of config.json that engines guess where they are absent, or that contradict the draft, or each other."""

from __future__ import annotations

from collections.abc import Iterator

from decode.formats.folder import completed
from decode.formats.rope import written_rope
from train.check.attention_keys import WRITE, dflash, dspark, eagle3
from train.check.subject import Finding, Subject

_OF_LAYERS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "hidden_act rms_norm_eps max_position_embeddings rope attention_bias mlp_bias"
).split()


def guessed(subject: Subject) -> Iterator[Finding]:
    """Those of the form."""
    yield from _BY_FORM.get(subject.form, lambda subject: iter(()))(subject)
    yield from _halves(subject)
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


_BY_FORM = {"eagle3": eagle3, "medusa": _medusa, "dflash": dflash, "dspark": dspark}
