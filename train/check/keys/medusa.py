"""Of Medusa heads."""

from __future__ import annotations

from collections.abc import Iterator

from train.check.subject import Finding, Subject


def medusa(subject: Subject) -> Iterator[Finding]:
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
