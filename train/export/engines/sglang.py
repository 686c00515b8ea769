"""SGLang (wheel 0.5.23, read and not run): names that it does not know are skipped without a word."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from decode.formats.blocks import DFLASH
from decode.formats.dspark import DSPARK, TEMPERATURES
from decode.formats.eagle3 import EAGLE3
from decode.formats.lm import LM
from decode.formats.source import Source
from train.export.engines import blocks
from train.export.engines.base import PLAIN, VLLM_ALONE, Engine, Launch, Loads, NameRules
from train.export.engines.states import not_captured, other_target, unknown_layer


def launch(algorithm: str) -> Callable[[Launch], str]:
    """Chains of k: k steps, one candidate a step, k + 1 tokens a verification."""

    def command(how: Launch) -> str:
        k = how.num_draft_tokens
        words = ["python", "-m", "sglang.launch_server", "--model-path", how.target]
        words += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(how.draft)]
        words += ["--speculative-num-steps", str(k), "--speculative-eagle-topk", "1"]
        return shlex.join([*words, "--speculative-num-draft-tokens", str(k + 1)])

    return command


def launch_dflash(how: Launch) -> str:
    """A block of k + 1 slots."""
    return shlex.join([*_blocks("DFLASH", how), "--speculative-num-draft-tokens", str(how.num_draft_tokens + 1)])


def launch_dspark(how: Launch) -> str:
    """A block that drafts k tokens; what it predicts of them is read where SGLANG_RAGGED_VERIFY_MODE is not static."""
    words = [*_blocks("DSPARK", how), "--speculative-dspark-block-size", str(how.num_draft_tokens)]
    if how.is_calibrated:
        words += ["--speculative-dspark-confidence-sts-path", str(how.draft / TEMPERATURES)]
    return shlex.join(words)


def _blocks(algorithm: str, how: Launch) -> list[str]:
    words = ["python", "-m", "sglang.launch_server", "--model-path", how.target]
    return [*words, "--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(how.draft)]


def refuses_eagle3(source: Source, _model_impl: str) -> str | None:
    """Why SGLang cannot draft with this head. It always gives a head the target's embedding in place of the folder's,
    which for Gemma 3 is the one before scaling (speculative/eagle_worker_v2.py)."""
    return other_target(source, "SGLang", PLAIN) or not_captured(source) or unknown_layer(source, "SGLang")


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
        "dflash": blocks.loads(
            DFLASH, "0.5.23", launch_dflash, blocks.SGLANG_NAMES, "SGLang", blocks.reduced, blocks.no_row_of_the_targets
        ),
        "dspark": blocks.loads(
            DSPARK, "0.5.23", launch_dspark, blocks.SGLANG_NAMES, "SGLang", blocks.reduced, blocks.no_learned
        ),
        **VLLM_ALONE,
    },
)
