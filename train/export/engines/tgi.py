"""Text Generation Inference (3.3.7, read and not run): Medusa heads alone."""

from __future__ import annotations

import shlex
from typing import cast

from decode.drafters.medusa import MedusaConfig
from decode.formats.medusa import MEDUSA
from decode.formats.source import Source
from train.export.engines import vllm
from train.export.engines.base import FORMS, Engine, Launch, Loads, NameRules

TARGETS = ("llama", "mistral", "gemma3_text")
"""Of those that heads are trained on here; TGI runs others by transformers, where it does not draft."""


def launch(how: Launch) -> str:
    """The folder stands in the target's place: its config.json names the target."""
    words = ["text-generation-launcher", "--model-id", str(how.draft), "--speculate", str(how.num_draft_tokens)]
    return shlex.join(words)


def refuses(source: Source, model_impl: str) -> str | None:
    """Why TGI does not draft with these heads."""
    config, kind = cast(MedusaConfig, source.config), source.target.config.model_type
    if kind not in TARGETS:
        return f"TGI drafts for targets of the types {', '.join(TARGETS)}, and this one is {kind}; use format=vllm"
    if config.draft_vocab_size is not None:
        return (
            f"TGI drafts from the target's whole vocabulary, and these heads know {config.draft_vocab_size} of "
            f"{config.vocab_size} tokens; train them with draft.head.vocab=null, or use format=vllm"
        )
    if config.mlp_layers > 1:
        return (
            f"TGI reads heads that share the target's output head with one residual layer each, and these have "
            f"{config.mlp_layers}; train them with draft.head.mlp_layers=1, or use format=vllm"
        )
    return vllm.refuses_medusa(source, model_impl)


_NAMES = NameRules(skips=(r"^lm_heads\.", "^token_map$"), unknown="skipped")
_MEDUSA_ALONE = "TGI drafts with Medusa heads alone; train draft=medusa instead"
ENGINE = Engine(
    "tgi",
    "TGI 3.3",
    dict.fromkeys(FORMS, _MEDUSA_ALONE)
    | {"medusa": Loads(MEDUSA, "2.1", launch, refuses, names=_NAMES, targets=frozenset(TARGETS))},
)
