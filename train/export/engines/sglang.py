"""SGLang (wheel 0.5.23, read and not run): names that it does not know are skipped without a word."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from train.export.engines.base import NO_HYDRA, OWN_MTP_ALONE, PLAIN, Engine, Launch, Loads, NameRules
from train.export.engines.states import not_captured, other_target
from train.export.layouts.eagle3 import EAGLE3
from train.export.layouts.lm import LM
from train.export.source import Source


def launch(algorithm: str) -> Callable[[Launch], str]:
    """Chains of k: k steps, one candidate a step, k + 1 tokens a verification."""

    def command(how: Launch) -> str:
        k = how.num_draft_tokens
        words = ["python", "-m", "sglang.launch_server", "--model-path", how.target]
        words += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(how.draft)]
        words += ["--speculative-num-steps", str(k), "--speculative-eagle-topk", "1"]
        return shlex.join([*words, "--speculative-num-draft-tokens", str(k + 1)])

    return command


def refuses_eagle3(source: Source, _model_impl: str) -> str | None:
    """Why SGLang cannot draft with this head. It always gives a head the target's embedding in place of the folder's,
    which for Gemma 3 is the one before scaling (speculative/eagle_worker_v2.py)."""
    return other_target(source, "SGLang", PLAIN) or not_captured(source)


EAGLE3_NAMES = NameRules(
    renames=(
        ("midlayer", "layers.0"),
        ("aux_norm_low", "fc_norm.0"),
        ("aux_norm_mid", "fc_norm.1"),
        ("aux_norm_high", "fc_norm.2"),
    ),
    skips=("t2d",),
    shared=(r"embed_tokens\.",),
    unknown="skipped",
    missing="random",
)
"""models/llama_eagle3.py."""
ENGINE = Engine(
    "sglang",
    "SGLang 0.5.23",
    {
        "lm": Loads(LM, "0.5.9", launch("STANDALONE")),
        "eagle3": Loads(EAGLE3, "0.5.18", launch("EAGLE3"), refuses_eagle3, names=EAGLE3_NAMES, targets=PLAIN),
        "medusa": "SGLang has no Medusa heads; train draft=eagle3 instead, or serve these with vLLM",
        "dflash": "not written yet",
        "dspark": "not written yet",
        "mtp": OWN_MTP_ALONE,
        "hydra": NO_HYDRA,
    },
)
