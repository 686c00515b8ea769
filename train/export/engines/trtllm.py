"""TensorRT-LLM, the PyTorch backend (read and not run)."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import yaml

from decode.common.checked_json import read_json
from decode.formats.blocks import DFLASH
from decode.formats.dspark import DSPARK
from decode.formats.eagle3 import EAGLE3
from decode.formats.lm import LM
from decode.formats.source import Source
from train.export.engines import blocks
from train.export.engines.base import PLAIN, VLLM_ALONE, Engine, Launch, Loads, NameRules
from train.export.engines.states import not_captured, other_target, unknown_layer


def launch(decoding_type: str) -> Callable[[Launch], str]:
    """A YAML file, and the command that reads it. Of EAGLE-3 heads it names the layers whose outputs are read, which
    are not looked for in the folder."""

    def command(how: Launch) -> str:
        spec: dict[str, Any] = {
            "decoding_type": decoding_type,
            "max_draft_len": how.num_draft_tokens,
            "speculative_model": str(how.draft),
        }
        if decoding_type == "Eagle3":
            spec["eagle3_layers_to_capture"] = sorted(tap - 1 for tap in how.taps)
        text = yaml.safe_dump({"speculative_config": spec}, sort_keys=False, width=10**6)
        return f"cat > speculative.yaml <<'END'\n{text}END\n" + shlex.join(
            ["trtllm-serve", how.target, "--config", "speculative.yaml"]
        )

    return command


def refuses_eagle3(source: Source, _model_impl: str) -> str | None:
    """Why TensorRT-LLM cannot draft with this head."""
    if len(source.taps) == 1:
        return (
            f"TensorRT-LLM leaves fc out where a head reads a single hidden state ({source.taps[0]}); train it with "
            "two or more draft.head.taps"
        )
    return other_target(source, "TensorRT-LLM", PLAIN) or not_captured(source) or unknown_layer(source, "TensorRT-LLM")


EAGLE3_NAMES = NameRules(
    renames=((r"^layers\.0\.", "midlayer."),),
    skips=("t2d", r"^embed_tokens\."),
    shared=(r"^lm_head\.",),
    unknown="skipped",
)
"""_torch/models/modeling_speculative.py; the embedding is the target's wherever it is as wide as the head."""
LANGUAGE_MODELS = frozenset(
    {"exaone4", "gemma3_text", "llama", "mistral", "mixtral", "nemotron", "qwen2", "qwen3", "qwen3_moe"}
)
"""Model types that its PyTorch backend has a class for from 1.0 on (docs, models/supported-models)."""


def refuses_lm(source: Source, _model_impl: str) -> str | None:
    """Why it cannot run this draft model."""
    kind = read_json(source.folder / "config.json")["model_type"]
    if kind in LANGUAGE_MODELS:
        return None
    return (
        f"TensorRT-LLM's PyTorch backend has no class for {kind} models; train a draft of the type llama, or use vLLM"
    )


ENGINE = Engine(
    "trtllm",
    "TensorRT-LLM 1.3",
    {
        "lm": Loads(LM, "1.0", launch("DraftTarget"), refuses_lm),
        "eagle3": Loads(EAGLE3, "1.3", launch("Eagle3"), refuses_eagle3, names=EAGLE3_NAMES, targets=PLAIN),
        "medusa": "its PyTorch backend has no Medusa heads; train draft=eagle3, or serve these with format=vllm",
        "dflash": blocks.loads(
            DFLASH, "1.3", launch("DFlash"), blocks.TRTLLM_NAMES, "TensorRT-LLM", blocks.reduced, blocks.no_learned
        ),
        "dspark": blocks.loads(
            DSPARK,
            "1.3",
            launch("DSpark"),
            blocks.TRTLLM_NAMES,
            "TensorRT-LLM",
            blocks.reduced,
            blocks.no_learned,
            blocks.fill_in,
        ),
        **VLLM_ALONE,
    },
)
