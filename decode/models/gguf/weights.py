"""The tensors of a GGUF file as transformers' model of that configuration has them.

transformers reads such files, too, in 9 s of one core where the 134M parameters of SmolLM2 take 1 s here: it parses the
vocabulary value by value, and makes its table of names for every module.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from decode.models.gguf.file import FREQUENCIES, GgufFile
from decode.models.weight_counts import empty_model


def gguf_shapes(file: GgufFile, config: PretrainedConfig) -> dict[str, Tensor]:
    """Every tensor on the meta device, by our name; one that the model does not have keeps its own."""
    names = _names(file, config)
    return {ours: torch.empty(file.tensors[theirs].shape, device="meta") for theirs, ours in names.items()}


def gguf_weights(file: GgufFile, config: PretrainedConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same with their values, turned into numbers one by one, in `dtype`."""
    content = np.memmap(file.path, np.uint8, "r")
    names = _names(file, config)
    return {
        ours: _undone(theirs, _numbers(file, content, theirs), file, config).to(dtype) for theirs, ours in names.items()
    }


def _names(file: GgufFile, config: PretrainedConfig) -> dict[str, str]:
    """llama.cpp's name -> ours."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kind = next(one for one, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
    known = get_tensor_name_map(kind, config.num_hidden_layers)
    ours: dict[str, str] = {}
    for name in empty_model(config).state_dict():
        stem, _, suffix = name.rpartition(".")
        ours.setdefault(f"{known.get_name(stem)}.{suffix}", name)
    return {name: ours.get(name, name) for name in file.tensors if name != FREQUENCIES}


def _numbers(file: GgufFile, content: np.ndarray, name: str) -> Tensor:
    """float32, of its shape."""
    from gguf import GGMLQuantizationType, dequantize

    stored = file.tensors[name]
    start = file.header.begin + stored.offset
    rows = content[start : start + stored.size].reshape(-1 if len(stored.shape) == 1 else stored.shape[:-1] + (-1,))
    numbers = np.asarray(dequantize(rows, GGMLQuantizationType(stored.kind)), np.float32)
    return torch.from_numpy(np.array(numbers)).reshape(stored.shape)


def _undone(name: str, values: Tensor, file: GgufFile, config: PretrainedConfig) -> Tensor:
    """What llama.cpp's converter did: Gemma's norms count from 1 there, and the halves of Llama's rotary pairs lie side
    by side."""
    if file.architecture.startswith("gemma") and name.endswith("norm.weight"):
        return values - 1
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    if file.architecture != "llama" or heads is None:
        return values
    return values.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(values.shape)
