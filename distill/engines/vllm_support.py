"""Which targets vLLM's engine gives the states of, and which drafts it writes with; what it does not take is refused
before anything is loaded."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import torch

from decode.common.checked_json import read_json
from decode.common.errors import ConfigError, InputError
from decode.config import model_folder
from decode.drafters.provenance import read_provenance
from decode.drafters.saved_draft import DraftDescription
from decode.forward.window import window_in
from decode.models.checkpoint_check import is_quantised
from decode.models.checkpoint_files import read_headers
from decode.models.describe import ModelDescription
from decode.models.few_rows import FIELD
from distill.engines.config import TargetConfig
from distill.engines.worker_process import local

KNOWN = ("gpt_oss", "granite", "llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_moe")
"""Model types whose states and p were found to be those of transformers."""
PLAIN = (torch.float32, torch.bfloat16, torch.float16)
OTHERWISE = "use target.runtime=transformers"
METHODS = {"lm": "draft_model", "eagle3": "eagle3"}
"""Family -> what vLLM's speculative_config calls it."""


def check_target(target: ModelDescription) -> None:
    """Raise InputError for a target that the engine, or the norm and head that are read here, cannot serve."""
    config, path = target.config.get_text_config(), f"target.path={target.path}"
    if getattr(config, "kv_lora_rank", None):
        raise InputError(
            f"{path} is a {config.model_type} model with latent attention (MLA), and vLLM gives no hidden states of "
            f"such models, from which p is made; {OTHERWISE}"
        )
    _refuse_file(target.path, "target.path")
    check_plain_ends(target)
    if config.model_type not in KNOWN:
        raise InputError(
            f"{path} is a {config.model_type} model, and vLLM's states were compared with transformers' for others "
            f"({', '.join(KNOWN)}); {OTHERWISE}"
        )


def check_rope(target: ModelDescription, most: int) -> None:
    """Raise InputError where vLLM, started for texts of `most` tokens, rotates them otherwise than transformers does:
    with dynamic scaling always, with longrope's long factors where `most` is beyond the length of its short ones, which
    transformers takes for each text by its own length (vLLM 0.32, layers/rotary_embedding)."""
    rope = getattr(target.config.get_text_config(), "rope_parameters", None) or {}
    kind, room = rope.get("rope_type"), target.max_positions
    if kind == "dynamic" or (kind == "longrope" and most > room):
        raise InputError(
            f"target.path={target.path} has rope_type={kind}, by which vLLM turns texts otherwise than transformers"
            + ("" if kind == "dynamic" else f" if started for {most} tokens: {room} at most, and texts of {room - 1}")
            + f"; {OTHERWISE}"
        )


def check_plain_ends(target: ModelDescription) -> None:
    """Raise InputError for a quantised folder whose output head or last norm are packed as well: p is made of them
    here. Most leave both alone; those of a hub id are judged once they are read."""
    if not is_quantised(target.config) or not Path(target.path).is_dir():
        return
    tensors = read_headers(Path(target.path), "target")
    head = "model.embed_tokens.weight" if target.config.get_text_config().tie_word_embeddings else "lm_head.weight"
    packed = [name for name in (head, "model.norm.weight") if name not in tensors or tensors[name].dtype not in PLAIN]
    if packed:
        raise InputError(
            f"target.path={target.path} is quantised, {' and '.join(packed)} as well, of which target.runtime=vllm "
            f"makes p. Quantise it with the head left as it is, give the model in half precision, or {OTHERWISE}"
        )


def devices(asked: TargetConfig) -> int:
    """That an engine runs on. The one that reads shares each layer out over all of them: vLLM gives no states of a
    model that is held in groups of layers."""
    return asked.tensor_parallel_size * asked.pipeline_parallel_size


def check_sizes(asked: TargetConfig, target: ModelDescription) -> None:
    """Raise ConfigError where the model cannot be shared out as asked, or the devices seen here are too few."""
    config = target.config.get_text_config()
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or 1
    fitting = [size for size in range(1, heads + 1) if heads % size == 0 and not (groups % size and size % groups)]
    if devices(asked) not in fitting:
        pipeline = asked.pipeline_parallel_size
        told = f" (times pipeline_parallel_size={pipeline} as it reads)" if pipeline > 1 else ""
        raise ConfigError(
            f"target.tensor_parallel_size={asked.tensor_parallel_size}{told} does not share out the {heads} attention "
            f"heads and {groups} key-value heads of {target.path}; use {' or '.join(map(str, fitting))} in all"
        )
    if asked.pipeline_parallel_size > target.num_layers:
        raise ConfigError(
            f"target.pipeline_parallel_size={asked.pipeline_parallel_size} is more than the {target.num_layers} layers "
            f"of {target.path}; use fewer"
        )
    there = torch.accelerator.device_count()
    if there and devices(asked) > there:
        raise ConfigError(
            f"target.tensor_parallel_size={asked.tensor_parallel_size} and target.pipeline_parallel_size="
            f"{asked.pipeline_parallel_size} ask for {devices(asked)} devices, and here are {there}; use fewer, or a "
            "server on several machines (target.url)"
        )


def check_alone() -> None:
    """Raise ConfigError under a launcher of several processes, each of which would start engines on the same device."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        raise ConfigError(
            f"target.runtime=vllm and {ranks} processes, each of which would start an engine of its own on the same "
            f"device; start one by `python -m distill`, or {OTHERWISE}"
        )


def drafting_with_model(folder: str, num_draft_tokens: int, family: str = "lm") -> dict[str, Any]:
    """vLLM's speculative_config for a draft in a folder, or in the one of the run that trained it, or for a hub id."""
    path = local(model_folder(folder))
    _refuse_own_fields(path)
    return {"method": METHODS[family], "model": path, "num_speculative_tokens": num_draft_tokens}


def _refuse_file(path: str, where: str) -> None:
    if Path(path).is_file():
        raise InputError(
            f"{where}={path} is a GGUF file, and target.runtime=vllm is handed a folder: write it as one, "
            f"python scripts/unpack_gguf.py {path} FOLDER, or {OTHERWISE}"
        )


def _refuse_own_fields(path: str) -> None:
    """A draft that sees more than it was trained with, or drafts more, is accepted less."""
    config = Path(path) / "config.json"
    fields = read_json(config) if config.is_file() else {}
    window, otherwise = window_in(fields, path), "Use target.runtime=transformers, or train one without"
    if window is not None:
        raise InputError(
            f"the draft {path} attends to its first {window.sinks} and last {window.size} positions, and vLLM would "
            f"show it the whole text. {otherwise} draft.window"
        )
    if fields.get(FIELD) is not None:
        raise InputError(
            f"the draft {path} drafts {len(fields[FIELD])} of its tokens, and vLLM would draft the others too. "
            f"{otherwise} draft.head.vocab"
        )


def check_draft(found: DraftDescription, target: str, num_devices: int) -> None:
    """Raise InputError for a draft that vLLM does not load as it lies there, or reads wrongly: on CPUs the processes of
    several devices are started without `vllm_temperatures`, and so would accept by temperatures that nobody wrote."""
    if num_devices > 1 and not torch.accelerator.is_available():
        raise InputError(
            f"sampling.draft.path={found.path} on {num_devices} devices that are CPUs: vLLM reads unwritten "
            "temperatures there (its issue 55005), mended for one device alone. Leave the draft out, or use one"
        )
    if found.family not in METHODS:
        raise InputError(
            f"sampling.draft.path={found.path} is of family {found.family}, and target.runtime=vllm writes with "
            f"{' and '.join(METHODS)} drafts only; use one of these, or target.runtime=transformers, which writes with "
            "any"
        )
    _refuse_file(found.path, "sampling.draft.path")
    if found.family != "lm" and read_provenance(found.path) is not None:
        paths = shlex.join([f"target.path={target}", f"draft.path={found.path}"])
        raise InputError(
            f"sampling.draft.path={found.path} is a head in our own layout, which vLLM does not load. Export it with "
            f"`python -m train.export {paths} format=vllm output_dir=FOLDER`, and give sampling.draft.path=FOLDER"
        )
