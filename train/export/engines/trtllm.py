"""TensorRT-LLM, the PyTorch backend (read and not run)."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import yaml

from train.export.engines.base import NO_HYDRA, OWN_MTP_ALONE, Engine, Launch, Loads
from train.export.layouts.lm import LM


def launch(decoding_type: str) -> Callable[[Launch], str]:
    """A YAML file, and the command that reads it."""

    def command(how: Launch) -> str:
        spec = {
            "decoding_type": decoding_type,
            "max_draft_len": how.num_draft_tokens,
            "speculative_model": str(how.draft),
        }
        text = yaml.safe_dump({"speculative_config": spec}, sort_keys=False, width=10**6)
        return f"cat > speculative.yaml <<'END'\n{text}END\n" + shlex.join(
            ["trtllm-serve", how.target, "--config", "speculative.yaml"]
        )

    return command


ENGINE = Engine(
    "trtllm",
    "TensorRT-LLM 1.2",
    {
        "lm": Loads(LM, "1.0", launch("DraftTarget")),
        "eagle3": "not written yet",
        "medusa": "its PyTorch backend has no Medusa heads; train draft=eagle3, or serve these with format=vllm",
        "dflash": "not written yet",
        "dspark": "not written yet",
        "mtp": OWN_MTP_ALONE,
        "hydra": NO_HYDRA,
    },
)
