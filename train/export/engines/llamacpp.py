"""llama.cpp (server of xllamacpp 2026.10.11549, which is build b11549; converter of llama-cpp-python 0.3.36, which is
commit 0c1e57098): folders are converted to GGUF first."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import cast

from decode.drafters.eagle3 import Eagle3Config
from decode.formats.base import Layout
from decode.formats.blocks import DFLASH
from decode.formats.dflash2 import DFLASH2
from decode.formats.dspark import DSPARK
from decode.formats.eagle3 import EAGLE3
from decode.formats.lm import LM
from decode.formats.source import Source
from train.export.engines import blocks
from train.export.engines.base import PLAIN, VLLM_ALONE, Engine, Launch, Loads, NameRules
from train.export.engines.states import not_captured, other_target, unknown_layer


def launch(kind: str) -> Callable[[Launch], str]:
    """Conversion of both models, of a target that is no GGUF file yet, then the server. The converter wants folders, so
    that a target on the hub is fetched first."""

    def command(how: Launch) -> str:
        convert = ["python", "convert_hf_to_gguf.py"]
        is_file = Path(how.target).is_file()
        is_on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", how.target) and not Path(how.target).exists()
        folder = "target" if is_on_hub else how.target
        served = how.target if is_file else "target.gguf"
        fetch = [] if not is_on_hub else [["hf", "download", how.target, "--local-dir", folder]]
        target = [] if is_file else [*fetch, [*convert, folder, "--outfile", served]]
        own = [] if kind == "draft-simple" else ["--target-model-dir", folder]
        draft = [*convert, str(how.draft), *own, "--outfile", "draft.gguf"]
        serve = ["llama-server", "-m", served, "-md", "draft.gguf", "--spec-type", kind]
        lines = [*target, draft, [*serve, "--spec-draft-n-max", str(how.num_draft_tokens)]]
        return "\n".join(map(shlex.join, lines))

    return command


def refuses_eagle3(source: Source, _model_impl: str) -> str | None:
    """Why llama.cpp cannot draft with this head (src/models/eagle3.cpp). Of norms that it does not know the converter
    refuses fc_norm, and norm_output, which has no tensor of its own, goes unseen."""
    config, norms = cast(Eagle3Config, source.config), ("fc_norm", "norm_output")
    present = [name for name in norms if getattr(config, name)]
    if present:
        return (
            f"llama.cpp does not know {' and '.join(present)} of EAGLE-3.1, which this head has; train it with "
            f"{' '.join(f'draft.head.{name}=false' for name in present)}"
        )
    if len(config.taps) != 3:
        return (
            f"llama.cpp hands over three hidden states, and this head reads {len(config.taps)} ({list(config.taps)}); "
            "train it with three draft.head.taps"
        )
    return (
        other_target(source, "llama.cpp", PLAIN)
        or not_captured(source)
        or unknown_layer(source, "llama.cpp", frozenset({"norm_before_residual"}))
    )


def dflash(layout: Layout, *asked: blocks.Asked) -> Loads:
    """Of DFlash or DFlash2, which the graph tells apart by the selector's tensors; `asked` besides what both need."""
    since, names = "builds of October 2026", blocks.LLAMACPP_DFLASH_NAMES
    both = (blocks.reduced, blocks.no_id)
    return blocks.loads(layout, since, launch("draft-dflash"), names, "llama.cpp", *both, *asked, tried="run")


EAGLE3_NAMES = NameRules(
    renames=((r"^(midlayer|layers\.0)\.", "model.layers.0."),),
    skips=("^t2d$",),
    shared=(r"^embed_tokens\.", r"^lm_head\."),
)
"""conversion/llama.py."""
ENGINE = Engine(
    "llamacpp",
    "llama.cpp b11549",
    {
        "lm": Loads(LM, "b4000", launch("draft-simple"), tried="run", takes_gguf=True),
        "eagle3": Loads(
            EAGLE3,
            "builds of July 2026",
            launch("draft-eagle3"),
            refuses_eagle3,
            tried="run",
            names=EAGLE3_NAMES,
            targets=PLAIN,
        ),
        "medusa": "llama.cpp has no Medusa heads; train draft=lm or draft=eagle3 instead",
        "dflash": dflash(DFLASH),
        "dspark": blocks.loads(
            DSPARK,
            "builds of October 2026",
            launch("draft-dspark"),
            blocks.LLAMACPP_DSPARK_NAMES,
            "llama.cpp",
            blocks.no_learned,
            blocks.counts_slots,
            tried="run",
        ),
        **VLLM_ALONE,
        "dflash2": dflash(DFLASH2, blocks.narrow),
    },
)
