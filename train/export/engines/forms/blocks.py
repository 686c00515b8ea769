"""What engines ask of DFlash and DSpark heads, each of them of its own."""

from __future__ import annotations

from train.export.engines.base import PLAIN, NameRules
from train.export.engines.forms.states import not_captured, other_target
from train.export.layouts import blocks, dflash
from train.export.source import Source

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


def refuses_dflash_vllm(source: Source, _model_impl: str) -> str | None:
    """Why vLLM cannot draft with a DFlash head."""
    return _untrained(source, "vLLM") or dflash.no_id(source)


def refuses_dspark_vllm(source: Source, _model_impl: str) -> str | None:
    """Why vLLM cannot draft with a DSpark head."""
    return _untrained(source, "vLLM")


def refuses_dflash_sglang(source: Source, _model_impl: str) -> str | None:
    """Why SGLang cannot draft with a DFlash head: it writes a learned mask into the embedding that it shares with the
    target (speculative/dflash_worker_v2.py), so into the output head too where the two are one."""
    wanting = _untrained(source, "SGLang") or _reduced(source, "SGLang")
    if wanting or blocks.shape(source).mask_token is not None:
        return wanting
    if dflash.unused_row(source) is None:
        return (
            "its mask is a learned vector, which SGLang writes into the target's own embedding, and "
            f"{source.target.path} has a token for every row; {dflash.HOW}"
        )
    if source.target.config.get_text_config().tie_word_embeddings:
        return (
            "its mask is a learned vector, which SGLang writes into the target's own embedding, and that is also its "
            f"output head, so that the target would write otherwise; {dflash.HOW}"
        )
    return None


def refuses_dspark_sglang(source: Source, _model_impl: str) -> str | None:
    """Why SGLang cannot draft with a DSpark head."""
    return _untrained(source, "SGLang") or _reduced(source, "SGLang") or dflash.no_learned(source, "SGLang")


def refuses_dflash_trtllm(source: Source, _model_impl: str) -> str | None:
    """Why TensorRT-LLM cannot draft with a DFlash head."""
    return _on_the_targets_ends(source, "TensorRT-LLM")


def refuses_dspark_trtllm(source: Source, _model_impl: str) -> str | None:
    """Why TensorRT-LLM cannot draft with a DSpark head."""
    return _on_the_targets_ends(source, "TensorRT-LLM") or _fill_in(source, "TensorRT-LLM")


def refuses_dflash_llamacpp(source: Source, _model_impl: str) -> str | None:
    """Why llama.cpp cannot draft with a DFlash head: its converter stops at `d2t`. It reads mask_embedding.pt."""
    return _untrained(source, "llama.cpp") or _reduced(source, "llama.cpp") or dflash.no_id(source)


def refuses_dspark_llamacpp(source: Source, _model_impl: str) -> str | None:
    """Why llama.cpp cannot draft with a DSpark head."""
    wanting = _untrained(source, "llama.cpp") or dflash.no_learned(source, "llama.cpp")
    if wanting or blocks.shape(source).layout == "anchor":
        return wanting
    return (
        "llama.cpp counts in block_size the slots of a DSpark block of layout=fill_in, and the folder the tokens that "
        "it drafts, so that it would draft one token less; train with draft.head.layout=anchor, or serve it with "
        "format=vllm"
    )


def refuses_speculators(source: Source, _model_impl: str) -> str | None:
    """Why the speculators library cannot read the head."""
    return _untrained(source, "vLLM") or blocks.no_speculators(source)


def _on_the_targets_ends(source: Source, engine: str) -> str | None:
    return _untrained(source, engine) or _reduced(source, engine) or dflash.no_learned(source, engine)


def _untrained(source: Source, engine: str) -> str | None:
    depth, k = blocks.shape(source).depth, source.num_draft_tokens
    if k > depth:
        return f"num_draft_tokens={k}, and its blocks draft depth={depth} tokens; ask for {depth} at most"
    return other_target(source, engine, PLAIN) or not_captured(source)


def _reduced(source: Source, engine: str) -> str | None:
    drafted = blocks.shape(source).draft_vocab_size
    if drafted is None:
        return None
    return (
        f"{engine} drafts with the target's whole output head, and this head knows {drafted} of its "
        f"{source.target.vocab_size} tokens; train with draft.head.vocab=null, or serve it with format=vllm"
    )


def _fill_in(source: Source, engine: str) -> str | None:
    if blocks.shape(source).layout == "anchor":
        return None
    return (
        f"{engine} takes slot k of a DSpark block for the token k + 1 places behind its anchor, and this one was "
        "trained with layout=fill_in; train with draft.head.layout=anchor, or serve it with format=vllm"
    )
