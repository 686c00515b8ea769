"""SGLang (wheel 0.5.23, read and not run): names that it does not know are skipped without a word."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from train.export.engines.base import NO_HYDRA, OWN_MTP_ALONE, Engine, Launch, Loads
from train.export.layouts.lm import LM


def launch(algorithm: str) -> Callable[[Launch], str]:
    """Chains of k: k steps, one candidate a step, k + 1 tokens a verification."""

    def command(how: Launch) -> str:
        k = how.num_draft_tokens
        words = ["python", "-m", "sglang.launch_server", "--model-path", how.target]
        words += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(how.draft)]
        words += ["--speculative-num-steps", str(k), "--speculative-eagle-topk", "1"]
        return shlex.join([*words, "--speculative-num-draft-tokens", str(k + 1)])

    return command


ENGINE = Engine(
    "sglang",
    "SGLang 0.5.23",
    {
        "lm": Loads(LM, "0.5.9", launch("STANDALONE")),
        "eagle3": "not written yet",
        "medusa": "SGLang has no Medusa heads; train draft=eagle3 instead, or serve these with vLLM",
        "dflash": "not written yet",
        "dspark": "not written yet",
        "mtp": OWN_MTP_ALONE,
        "hydra": NO_HYDRA,
    },
)
