"""A published head in a few words."""

from __future__ import annotations

from math import prod

from decode.drafters.dspark import DSparkConfig
from decode.drafters.head_draft import HeadConfig
from decode.drafters.saved_head import expected
from decode.models.hidden_states import FINAL


def described(config: HeadConfig) -> str:
    """Its family, size, and what it reads and drafts."""
    size = sum(map(prod, expected(config).values()))
    reads = "the final hidden state" if config.taps == (FINAL,) else f"the hidden states {list(config.taps)}"
    drafted = config.draft_vocab_size or config.vocab_size
    rows = "an output head of its own" if config.has_own_head else "the target's"
    words = [
        f"draftsmith reads it as a draft of family {config.family}: {size:,} parameters on {reads} of the target",
        f"drafts {drafted} of {config.vocab_size} tokens by {rows}",
    ]
    if isinstance(config, DSparkConfig):
        words.append(f"{config.depth} tokens a block, {config.layers} layers, Markov rank {config.markov_rank}")
    if config.family == "medusa":
        words.append(f"{config.depth} heads")
    return "; ".join(words)
