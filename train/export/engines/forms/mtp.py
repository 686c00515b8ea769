"""What is served of a prediction layer (MTP): that of a target which was published with one, tuned."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import torch

from decode.common.errors import InputError
from decode.drafters.mtp import check_sees_all
from train.export.engines.base import OWN_MTP_ALONE, Launch
from train.export.layouts.own_mtp import misfits, own_layer
from train.export.source import Source

TARGETS = frozenset({"exaone_moe"})
"""Types whose layer is a dense one without a class of its own in transformers. Not: ernie4_5_moe, whose layer has no
last norm; deepseek_v3, glm4_moe, hy_v3 and their kin, whose layer is a mixture of experts; qwen3_next and qwen3_5,
which are recurrent and not decoded here."""


def launch(how: Launch) -> str:
    """vLLM: the folder is the target."""
    spec = {"method": "mtp", "num_speculative_tokens": how.num_draft_tokens}
    return shlex.join(["vllm", "serve", str(how.draft), "--speculative-config", json.dumps(spec)])


def refuses(source: Source, _model_impl: str) -> str | None:
    """Why the layer cannot take the place of the target's own."""
    target, config = source.target, source.config
    if target.config.model_type not in TARGETS:
        return OWN_MTP_ALONE
    if not Path(target.path).is_dir():
        return f"a copy of the target is written, and {target.path} is no local folder; give target.path the folder"
    if config.draft_vocab_size is not None:
        return (
            f"engines draft from the target's whole vocabulary, and this layer knows {config.draft_vocab_size} of "
            f"{config.vocab_size} tokens; train it with draft.head.vocab=null"
        )
    shapes, dtype = own_layer(source)
    wrong = misfits(source, shapes)
    if wrong:
        return (
            f"the layer differs from the target's own in {', '.join(wrong[:4])}, {len(wrong)} tensors in all; train "
            "with draft.head.init_own=true, which starts from that one"
        )
    if dtype not in (source.weight_dtype, torch.float32):
        name = str(dtype).removeprefix("torch.")
        return f"the layer would be written in {source.weight_dtype} beside a target in {dtype}; give dtype={name}"
    try:
        check_sees_all(target)
    except InputError as error:
        return str(error)
    return None
