"""What folders for engines and for the speculators library say twice."""

from __future__ import annotations

from collections.abc import Iterator

from decode.published.folder import completed
from decode.published.rope import written_rope
from train.check.keys.unread import WRITE
from train.check.subject import Finding, Subject

_OF_LAYERS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "hidden_act rms_norm_eps max_position_embeddings rope attention_bias mlp_bias"
).split()


def halves(subject: Subject) -> Iterator[Finding]:
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
