"""transformers' assisted generation, which takes a language model as draft."""

from __future__ import annotations

import json

from decode.formats.lm import LM
from train.export.engines.base import FORMS, Engine, Launch, Loads


def launch(how: Launch) -> str:
    """Python: assisted generation."""
    target, draft = json.dumps(how.target, ensure_ascii=False), json.dumps(str(how.draft), ensure_ascii=False)
    return (
        f"target = AutoModelForCausalLM.from_pretrained({target})\n"
        f"draft = AutoModelForCausalLM.from_pretrained({draft})\n"
        "target.generate(input_ids, assistant_model=draft)"
    )


_NO_HEADS = "transformers drafts with language models alone; train draft=lm, or decode with draftsmith itself"
ENGINE = Engine(
    "transformers",
    "transformers 5",
    dict.fromkeys(FORMS, _NO_HEADS) | {"lm": Loads(LM, "4.30", launch, tried="run", slides=True)},
)
