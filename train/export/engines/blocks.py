"""What engines ask of DFlash and DSpark heads, each of them of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from decode.drafters.dflash2 import DFlash2Config
from decode.drafters.lilicorr import LiLiCorrConfig
from decode.formats.base import Layout
from decode.formats.blocks import no_speculators
from decode.formats.mask import HOW, mask_id
from decode.formats.source import Source
from decode.models.mask_token import unused_row
from train.export.engines.base import PLAIN, Launch, Loads, NameRules
from train.export.engines.states import not_captured, other_target

VLLM_NAMES = NameRules(
    renames=(
        (r"^midlayer\.", "layers.0."),
        (r"^encoder\.output_norm_enc\.", "hidden_norm."),
        (r"^encoder\.fc\.", "fc."),
        ("d2t", "draft_id_to_target_id"),
    ),
    skips=("t2d",),
    missing="random",
)
"""model_executor/models/qwen3_dflash.py and qwen3_dspark.py, whose `load_weights` return nothing."""
SGLANG_NAMES = NameRules(
    renames=(
        (r"^model\.", ""),
        (r"^encoder\.output_norm_enc\.", "hidden_norm."),
        (r"^encoder\.fc\.", "fc."),
    ),
    skips=(r"^embed_tokens\.", r"^lm_head\.", r"rotary_emb\."),
    unknown="skipped",
    missing="random",
)
"""models/dflash.py and dspark.py: both ends are the target's."""
TRTLLM_NAMES = NameRules(
    renames=((r"^model\.", ""),), skips=(r"^embed_tokens\.", r"^lm_head\."), unknown="skipped", missing="random"
)
"""_torch/models/modeling_dflash.py and modeling_dspark.py: weights are loaded in part, both ends are the target's."""
LLAMACPP_DFLASH_NAMES = NameRules(renames=((r"^model\.", ""),))
"""conversion/qwen.py: ends are written into the GGUF file where they are there, and both are the target's else."""
LLAMACPP_DSPARK_NAMES = NameRules(renames=((r"^model\.", ""),), skips=("^t2d$",))
"""Likewise; of a whole vocabulary it passes over the output head."""
SPECULATORS_NAMES = NameRules(skips=(r"^verifier_",), unknown="skipped", missing="random")
"""Those of transformers' from_pretrained, which lists them in its log."""


Asked = Callable[[Source, str], str | None]
"""(source, engine) -> why the engine cannot draft with it; None where it can."""


def loads(
    layout: Layout,
    since: str,
    launch: Callable[[Launch], str],
    names: NameRules,
    engine: str,
    *asked: Asked,
    tried: str = "checked",
) -> Loads:
    """Of such heads, refused for the first of all reasons; depth, target and hidden states are asked for first."""

    def refuses(source: Source, _model_impl: str) -> str | None:
        return next((why for ask in (_untrained, *asked) if (why := ask(source, engine))), None)

    return Loads(layout, since, launch, refuses, tried, names, targets=PLAIN)


def no_row_of_the_targets(source: Source, engine: str) -> str | None:
    """SGLang writes a learned mask of DFlash into the embedding that it shares with the target
    (speculative/dflash_worker_v2.py), so into the output head too where the two are one."""
    why = f"its mask is a learned vector, which {engine} writes into the target's own embedding, and "
    if source.block.mask_token is not None:
        return None
    if unused_row(source.target) is None:
        return f"{why}{source.target.path} has a token for every row; {HOW}"
    if source.target.config.get_text_config().tie_word_embeddings:
        return f"{why}that is also its output head, so that the target would write otherwise; {HOW}"
    return None


def counts_slots(source: Source, engine: str) -> str | None:
    """llama.cpp's DSpark."""
    if source.block.layout == "anchor":
        return None
    return (
        f"{engine} counts in block_size the slots of a DSpark block of layout=fill_in, and would draft one token "
        "less; train with draft.head.layout=anchor, or serve it with format=vllm"
    )


def not_of_speculators(source: Source, _engine: str) -> str | None:
    """The library's."""
    return no_speculators(source)


def _untrained(source: Source, engine: str) -> str | None:
    depth, k = source.block.depth, source.num_draft_tokens
    if k > depth:
        return f"num_draft_tokens={k}, and its blocks draft depth={depth} tokens; ask for {depth} at most"
    if source.block.causal and engine != "vLLM":
        return (
            f"slots of its blocks see those before them alone, and {engine} lets them see all; train with "
            "draft.head.causal=false, or use format=vllm"
        )
    return other_target(source, engine, PLAIN) or not_captured(source)


def reduced(source: Source, engine: str) -> str | None:
    """It drafts with the target's output head; llama.cpp's converter stops at `d2t` of DFlash."""
    drafted = source.block.draft_vocab_size
    if drafted is None:
        return None
    return (
        f"{engine} drafts with the target's whole output head, and this head knows {drafted} of its "
        f"{source.target.vocab_size} tokens; train with draft.head.vocab=null, or serve it with format=vllm"
    )


def fill_in(source: Source, engine: str) -> str | None:
    """TensorRT-LLM's DSpark."""
    if source.block.layout == "anchor":
        return None
    return (
        f"{engine} takes slot k of a DSpark block for the token k + 1 places behind its anchor, and this one was "
        "trained with layout=fill_in; train with draft.head.layout=anchor, or serve it with format=vllm"
    )


def candidates(source: Source, engine: str) -> str | None:
    """vLLM's kernel of a lattice takes a power of two, 16 at most."""
    count = cast(LiLiCorrConfig, source.config).candidates
    if count in (2, 4, 8, 16):
        return None
    return f"{engine} takes 2, 4, 8 or 16 candidates a slot, and this head has {count}; train with another number"


def narrow(source: Source, engine: str) -> str | None:
    """llama.cpp hands a slot's candidates and their scores over in a row of the head's width (models/dflash.cpp)."""
    config = cast(DFlash2Config, source.config)
    count, width = config.candidates, config.hidden_size
    if width >= count * (count + 1):
        return None
    most = max(n for n in range(1, count) if n * (n + 1) <= width)
    return (
        f"{engine} wants {count * (count + 1)} channels for {count} candidates a slot, and this head has {width}; "
        f"train with draft.head.candidates={most}, or use format=vllm on a GPU"
    )


def no_id(source: Source, _engine: str) -> str | None:
    """Why no id can stand for the mask; None where one can."""
    if mask_id(source) is not None:
        return None
    return f"its mask is a learned vector, which needs the id of a token that {source.target.path} never writes; {HOW}"


def no_learned(source: Source, engine: str) -> str | None:
    """Why an engine that embeds masks by the target alone does not take this one."""
    if source.block.mask_token is not None:
        return None
    return f"its mask is a learned vector, and {engine} has the target's embedding alone; {HOW}"
