"""Folders of heads as others publish them, written from the descriptions of their layouts with random weights: no
part of our exporter is used.

Names and keys are those of: yuhuili/EAGLE3-LLaMA3.1-Instruct-8B (SafeAILab/EAGLE, cnets.py), RedHatAI's EAGLE-3
(speculators 0.9, models/eagle3), AngelSlim/Qwen3-8B_eagle3, SpecForge 0.1 (llama3_eagle.py), FasterDecoding's
medusa-vicuna-7b-v1.3 (medusa_model.py), TGI 3 (layers/medusa.py), z-lab/Qwen3-8B-DFlash-b16 (dflash.py),
deepseek-ai/dspark_qwen3_8b_block7 (DeepSpec).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.tiny import tiny_llama, tiny_tokenizer

WIDTH, VOCAB, INNER, HEADS, KV_HEADS, SIZE = 32, 300, 48, 4, 2, 8
DRAFTED = torch.tensor([0, 1, 3, *range(5, VOCAB, 2)])
"""Tokens of reduced vocabularies, the end of text among them."""
LAYER = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}


def save_target(folder: Path, **fields: Any) -> Path:
    """A target of 8 layers, so that the states that native heads read are different ones: 2, 4 and 5."""
    tokenizer = tiny_tokenizer(VOCAB)
    ends: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    tiny_llama(VOCAB, WIDTH, 8, **ends | fields).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def random(*shape: int) -> Tensor:
    """Wide, so that distributions are far from uniform."""
    return torch.randn(shape) * 0.3


def layer(prefix: str, read: int, *, is_qwen3: bool = False, is_eagle: bool = True) -> dict[str, Tensor]:
    """A decoder layer whose queries, keys and values are made from `read` numbers."""
    norms = ["input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if is_eagle else [])]
    shapes = dict.fromkeys(norms, (WIDTH,)) | {
        "self_attn.q_proj": (HEADS * SIZE, read),
        "self_attn.k_proj": (KV_HEADS * SIZE, read),
        "self_attn.v_proj": (KV_HEADS * SIZE, read),
        "self_attn.o_proj": (WIDTH, HEADS * SIZE),
        "mlp.gate_proj": (INNER, WIDTH),
        "mlp.up_proj": (INNER, WIDTH),
        "mlp.down_proj": (WIDTH, INNER),
    }
    if is_qwen3:
        shapes |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (SIZE,))
    return {f"{prefix}.{name}.weight": random(*shape) for name, shape in shapes.items()}


def eagle3_tensors(prefix: str, *, is_reduced: bool = True, is_qwen3: bool = False) -> dict[str, Tensor]:
    """As every library names them, but for the prefix of the layer."""
    torch.manual_seed(1)
    ids = DRAFTED if is_reduced else torch.arange(VOCAB)
    found = layer(prefix, 2 * WIDTH, is_qwen3=is_qwen3)
    found |= {"fc.weight": random(WIDTH, 3 * WIDTH), "norm.weight": random(WIDTH)}
    found |= {"lm_head.weight": random(len(ids), WIDTH)}
    return found | {"d2t": ids - torch.arange(len(ids)), "t2d": torch.isin(torch.arange(VOCAB), ids)}


def native_eagle3(folder: Path, embedding: Tensor) -> Path:
    """yuhuili's: pickled, without embedding and without a list of states."""
    fields = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    fields |= {name: value for name, value in LAYER.items() if name != "head_dim"} | {"bos_token_id": 1}
    fields |= {"draft_vocab_size": len(DRAFTED), "eos_token_id": 3, "torch_dtype": "float16"}
    return written(folder, fields, eagle3_tensors("midlayer"), "pytorch_model.bin")


def speculators_eagle3(folder: Path, embedding: Tensor) -> Path:
    """RedHatAI's, with the residual that starts behind the norm."""
    fields = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "draft_vocab_size": len(DRAFTED),
        "target_hidden_size": None,
        "norm_before_residual": True,
        "transformer_layer_config": {"model_type": "llama", "num_hidden_layers": 1, "rope_theta": 500000.0, **LAYER},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": "meta-llama/Llama-3.1-8B-Instruct", "architectures": ["LlamaForCausalLM"]},
        },
    }
    return written(folder, fields, eagle3_tensors("layers.0") | {"embed_tokens.weight": embedding})


def speculators_qwen3(folder: Path, embedding: Tensor) -> Path:
    """The library's with Qwen3's layer, whose queries and keys are normalised; every token is drafted."""
    inside = {"model_type": "qwen3", "num_hidden_layers": 1, "rope_parameters": {"rope_theta": 1e6}, **LAYER}
    fields = {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": VOCAB}
    fields |= {"norm_before_residual": False, "eagle_aux_hidden_state_layer_ids": [2, 4, 6]}
    tensors = eagle3_tensors("layers.0", is_reduced=False, is_qwen3=True)
    tensors |= {"embed_tokens.weight": embedding, "verifier_norm.weight": random(WIDTH)}
    return written(folder, fields | {"transformer_layer_config": inside}, tensors)


def speculators_peagle(folder: Path, embedding: Tensor) -> Path:
    """The library's P-EAGLE: EAGLE-3's layer, a second one over the states alone, and the states of its masks."""
    inside = {"model_type": "llama", "num_hidden_layers": 2, "rope_theta": 500000.0, **LAYER}
    fields = {"architectures": ["PEagleDraftModel"], "speculators_model_type": "peagle", "mask_token_id": 7}
    fields |= {"draft_vocab_size": len(DRAFTED), "norm_before_residual": True, "norm_before_fc": False}
    fields |= {"eagle_aux_hidden_state_layer_ids": [2, 4, 6], "transformer_layer_config": inside}
    tensors = eagle3_tensors("layers.0") | layer("layers.1", WIDTH) | {"embed_tokens.weight": embedding}
    return written(folder, fields, tensors | {"mask_hidden": random(1, 1, 3 * WIDTH)})


def angelslim_eagle3(folder: Path, embedding: Tensor) -> Path:
    """AngelSlim's for Qwen3: native names in safetensors, states in eagle_config, every token drafted."""
    fields = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, **LAYER}
    fields |= {"draft_vocab_size": VOCAB, "rope_theta": 1000000, "rope_scaling": None}
    fields |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "use_aux_hidden_state": True}}
    tensors = eagle3_tensors("midlayer", is_reduced=False)
    return written(folder, fields, tensors | {"embed_tokens.weight": embedding})


def specforge_eagle3(folder: Path, embedding: Tensor) -> Path:
    """SpecForge's: native names in safetensors, rotary positions scaled as its target's."""
    scaled = {"rope_type": "linear", "factor": 2.0}
    fields = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, **LAYER}
    fields |= {"draft_vocab_size": len(DRAFTED), "rope_theta": 500000.0, "rope_scaling": scaled}
    return written(folder, fields, eagle3_tensors("midlayer"))


def medusa_tensors(heads: int, layers: int, *, with_output: bool) -> dict[str, Tensor]:
    """Of each head in turn: residual layers, then an output head."""
    torch.manual_seed(2)
    found: dict[str, Tensor] = {}
    for head in range(heads):
        for number in range(layers):
            found |= {f"{head}.{number}.linear.weight": random(WIDTH, WIDTH)}
            found |= {f"{head}.{number}.linear.bias": random(WIDTH)}
        if with_output:
            found[f"{head}.{layers}.weight"] = random(VOCAB, WIDTH)
    return found


def authors_medusa(folder: Path, embedding: Tensor) -> Path:
    """FasterDecoding's, whose config.json counts fewer heads than there are."""
    fields = {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "medusa_num_heads": 2, "medusa_num_layers": 1}
    return written(folder, fields, medusa_tensors(4, 1, with_output=True), "medusa_lm_head.pt")


def tgi_medusa(folder: Path, embedding: Tensor) -> Path:
    """TGI's second kind, which drafts with the target's output head."""
    fields = {"base_model_name_or_path": "mistralai/Mistral-7B", "medusa_num_heads": 3, "medusa_num_layers": 2}
    tensors = medusa_tensors(3, 2, with_output=False)
    return written(folder, fields | {"version": "2"}, tensors, "medusa_lm_head.safetensors")


def block_tensors(layers: int) -> dict[str, Tensor]:
    """Of DFlash and DSpark."""
    torch.manual_seed(3)
    found = {"fc.weight": random(WIDTH, 3 * WIDTH), "hidden_norm.weight": random(WIDTH), "norm.weight": random(WIDTH)}
    for number in range(layers):
        found |= layer(f"layers.{number}", WIDTH, is_qwen3=True, is_eagle=False)
    return found


def dflash(folder: Path, embedding: Tensor) -> Path:
    """z-lab's, without embedding and output head."""
    fields = LAYER | {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_target_layers": 8,
        "layer_types": ["full_attention"] * 2,
        "block_size": 5,
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 3, 5]},
        "use_sliding_window": False,
        "sliding_window": None,
        "attention_bias": False,
        "rope_theta": 1000000,
        "rope_scaling": None,
    }
    return written(folder, fields, block_tensors(2))


def dflash2(folder: Path, embedding: Tensor) -> Path:
    """z-lab's, with what vLLM's qwen3_dflash2.py reads; slots see those before them alone."""
    fields = LAYER | {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "is_causal": True,
        "dflash_config": {
            "block_size": 5,
            "mask_token_id": 7,
            "target_layer_ids": [1, 3, 5],
            "conv_kernel_size": 2,
            "conv_group_size": 8,
            "selector_rank": 6,
            "selector_top_k": 9,
            "causal": True,
        },
        "block_size": 5,
        "rope_theta": 1000000,
    }
    tensors = block_tensors(2)
    for conv in (f"layers.{number}.{name}_conv" for number in range(2) for name in ("attention", "mlp")):
        tensors |= {f"{conv}.base_kernel": random(2, 2, WIDTH), f"{conv}.kernel_projection.weight": random(16, WIDTH)}
    for name in ("predecessor", "successor"):
        tensors[f"candidate_selector.{name}_codebook"] = random(VOCAB, 6)
    return written(folder, fields, tensors | {"candidate_selector.hidden_projection.weight": random(6, WIDTH)})


def lilicorr(folder: Path, embedding: Tensor) -> Path:
    """As vLLM 0.32 reads it (lilicorr.py), without convolutions and with a lattice as wide as the draft."""
    sizes = {"candidate_topk": 4, "hidden_size": 0, "num_layers": 2, "num_heads": 2, "mlp_ratio": 1.5, "factor_dim": 8}
    lattice = {f"lilicorr_{name}": value for name, value in (sizes | {"vector_eps": 1e-6, "logit_scale": 12.0}).items()}
    fields = LAYER | {
        "architectures": ["LiLiCorrDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_target_layers": 8,
        "block_size": 4,
        "rope_theta": 1000000.0,
        "dflash_config": {"target_layer_ids": [1, 3, 5], "mask_token_id": 7, "lilicorr_enabled": True, **lattice},
    }
    linears = dict.fromkeys(("pass_hidden_proj", "context_proj", "feature_mlp.down_proj"), (WIDTH, WIDTH))
    linears |= {"feature_mlp.up_proj": (WIDTH, 5), "factor_input_proj": (WIDTH, 3 * WIDTH)}
    linears |= dict.fromkeys(("out_head", "in_head", "anchor_out_head"), (8, WIDTH))
    shapes = {"slot_embedding": (1, 1, 3, 1, WIDTH), "rank_embedding": (1, 1, 1, 4, WIDTH), "same_slot_bias": (2,)}
    shapes |= {"relative_slot_bias": (2, 7), "feature_norm.weight": (5,), "feature_norm.bias": (5,)}
    shapes |= {f"{name}_norm.weight": (WIDTH,) for name in ("output", "anchor")}
    for layer in ("layers.0", "layers.1"):
        shapes |= {f"{layer}.{name}_norm.weight": (WIDTH,) for name in ("attn", "mlp")}
        shapes |= {f"{layer}.attn.in_proj_weight": (3 * WIDTH, WIDTH), f"{layer}.attn.in_proj_bias": (3 * WIDTH,)}
        linears |= {
            f"{layer}.attn.out_proj": (WIDTH, WIDTH),
            f"{layer}.mlp.up_proj": (48, WIDTH),
            f"{layer}.mlp.down_proj": (WIDTH, 48),
        }
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return written(folder, fields, block_tensors(2) | {f"lilicorr.{k}": random(*v) for k, v in shapes.items()})


def dspark(folder: Path, embedding: Tensor) -> Path:
    """deepseek-ai's, with the target's embedding inside, and a chance of acceptance."""
    fields = LAYER | {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_target_layers": 8,
        "block_size": 4,
        "target_layer_ids": [1, 3, 5],
        "mask_token_id": 7,
        "markov_rank": 6,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    }
    tensors = block_tensors(2) | {"embed_tokens.weight": embedding}
    tensors |= {"markov_head.markov_w1.weight": random(VOCAB, 6), "markov_head.markov_w2.weight": random(VOCAB, 6)}
    tensors |= {"confidence_head.proj.weight": random(1, WIDTH + 6), "confidence_head.proj.bias": random(1)}
    return written(folder, fields, tensors)


PUBLISHED: dict[str, tuple[Callable[[Path, Tensor], Path], str, str]] = {
    "yuhuili": (native_eagle3, "eagle3", "eagle3"),
    "RedHatAI": (speculators_eagle3, "eagle3", "eagle3"),
    "speculators-qwen3": (speculators_qwen3, "eagle3", "eagle3"),
    "speculators-peagle": (speculators_peagle, "peagle", "peagle"),
    "AngelSlim": (angelslim_eagle3, "eagle3", "eagle3"),
    "SpecForge": (specforge_eagle3, "eagle3", "eagle3"),
    "FasterDecoding": (authors_medusa, "medusa", "medusa"),
    "TGI": (tgi_medusa, "medusa", "medusa"),
    "z-lab": (dflash, "dflash", "dspark"),
    "z-lab's second": (dflash2, "dflash2", "dflash2"),
    "NVIDIA": (lilicorr, "lilicorr", "lilicorr"),
    "deepseek-ai": (dspark, "dspark", "dspark"),
}
"""Who publishes so -> (what writes a folder, its form, our family)."""


def written(folder: Path, fields: dict[str, Any], tensors: dict[str, Tensor], name: str = "model.safetensors") -> Path:
    """The folder, with weights in a file of that name."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = {key: one.clone().contiguous() for key, one in tensors.items()}
    if name.endswith(".safetensors"):
        save_file(tensors, folder / name, metadata={"format": "pt"})
    else:
        torch.save(tensors, folder / name)
    return folder
