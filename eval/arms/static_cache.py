"""transformers' static cache with a compiled forward, as an arm, and why it cannot run where it cannot."""

from __future__ import annotations

import shutil
from typing import Any

from torch._inductor import config as inductor
from transformers import CompileConfig, PreTrainedModel

NAME = "transformers static, compiled"


def no_compiler() -> str | None:
    """Why nothing can be compiled on this CPU; None where a C++ compiler is found."""
    names = inductor.cpp.cxx if isinstance(inductor.cpp.cxx, list | tuple) else (inductor.cpp.cxx,)
    if any(name and shutil.which(name) for name in (*names, "g++", "clang++")):
        return None
    return "torch.compile needs a C++ compiler, and neither g++ nor clang++ is installed"


def static_options(model: PreTrainedModel, max_length: int) -> dict[str, Any]:
    """Fields of GenerationConfig: one cache of `max_length` tokens for all calls, so that one graph serves them."""
    compiled = CompileConfig(mode="default")  # reduce-overhead is about CUDA graphs
    compiled._compile_all_devices = model.device.type == "cpu"  # type: ignore[assignment]  # the only way to ask for it
    return {"cache_implementation": "static", "max_cache_len": max_length, "compile_config": compiled}
