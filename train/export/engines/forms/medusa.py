"""What every engine asks of Medusa heads."""

from __future__ import annotations

from decode.models.hidden_states import FINAL
from train.export.source import Source


def refuses(source: Source, _model_impl: str) -> str | None:
    """Why no engine drafts with these heads."""
    config, k = source.config, source.num_draft_tokens
    if config.has_own_head and source.is_reduced:
        return (
            f"each head has an output head of its own, for {config.draft_vocab_size} of {config.vocab_size} tokens, "
            "which exports do not write; serve the folder that training began from, or train one without "
            "draft.init_from"
        )
    if config.taps != (FINAL,):
        return (
            f"engines give Medusa heads the target's final hidden state, and these were trained on state "
            f"{config.taps[0]}; train them with draft.head.taps=null"
        )
    if k > config.depth:
        return (
            f"num_draft_tokens={k} is more than the {config.depth} heads, each of which drafts one token: engines "
            f"would look for heads that do not exist; ask for {config.depth}, or train with draft.head.depth={k}"
        )
    return None
