"""The speculators library (0.9.0), whose folders vLLM serves by their own name."""

from __future__ import annotations

import shlex

from decode.formats.blocks import DFLASH
from decode.formats.dspark import DSPARK
from decode.formats.eagle3 import EAGLE3
from train.export.engines import blocks, vllm
from train.export.engines.base import FORMS, Engine, Launch, Loads, NameRules

_KNOWN = "the speculators library knows EAGLE-3, DFlash and DSpark heads alone; train draft=eagle3, or use format=vllm"


def launch(how: Launch) -> str:
    """The folder stands in the target's place: its config.json names the target, and k."""
    words = ["vllm", "serve", str(how.draft)]
    return shlex.join(words if how.model_impl == "auto" else [*words, "--model-impl", how.model_impl])


EAGLE3_NAMES = NameRules(unknown="skipped", missing="random")
"""Those of transformers' from_pretrained, which lists them in its log."""
ENGINE = Engine(
    "speculators",
    "speculators 0.9",
    dict.fromkeys(FORMS, _KNOWN)
    | {
        "eagle3": Loads(EAGLE3, "0.9", launch, vllm.refuses_eagle3, names=EAGLE3_NAMES),
        "dflash": blocks.loads(DFLASH, "0.9", launch, blocks.SPECULATORS_NAMES, "vLLM", blocks.not_of_speculators),
        "dspark": blocks.loads(DSPARK, "0.9", launch, blocks.SPECULATORS_NAMES, "vLLM", blocks.not_of_speculators),
    },
)
