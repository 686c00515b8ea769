"""llama.cpp (read and not run): folders are converted to GGUF first."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from train.export.engines.base import NO_HYDRA, OWN_MTP_ALONE, Engine, Launch, Loads
from train.export.layouts.lm import LM


def launch(kind: str) -> Callable[[Launch], str]:
    """Conversion of both models, then the server."""

    def command(how: Launch) -> str:
        convert = ["python", "convert_hf_to_gguf.py"]
        target = [*convert, how.target, "--outfile", "target.gguf"]
        own = [] if kind == "draft-simple" else ["--target-model-dir", how.target]
        draft = [*convert, str(how.draft), *own, "--outfile", "draft.gguf"]
        serve = ["llama-server", "-m", "target.gguf", "-md", "draft.gguf", "--spec-type", kind]
        lines = [target, draft, [*serve, "--spec-draft-n-max", str(how.num_draft_tokens)]]
        return "\n".join(map(shlex.join, lines))

    return command


ENGINE = Engine(
    "llamacpp",
    "llama.cpp",
    {
        "lm": Loads(LM, "b4000", launch("draft-simple")),
        "eagle3": "not written yet",
        "medusa": "llama.cpp has no Medusa heads; train draft=lm or draft=eagle3 instead",
        "dflash": "not written yet",
        "dspark": "not written yet",
        "mtp": OWN_MTP_ALONE,
        "hydra": NO_HYDRA,
    },
)
