"""How near our autoregressive loop comes to the memory bandwidth of a device.

python scripts/bandwidth.py runs/gpu/bandwidth

A Llama of the 8B shape is made there at random, our loop decodes with it at batch 1, and the device is timed at copying
memory. A token needs every weight once (of the embedding one row) and the keys and values of its context; nothing
decodes faster, so the figure is the share of that bound which is reached. Written as bandwidth.json and bandwidth.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from decode import generate
from decode.autotune.timing import synchronize
from decode.common.environment import environment, git_state, resolve_device
from decode.common.errors import UserError

SHAPES = {
    "8b": (4096, 14336, 32, 32, 8, 128256),
    "1b": (2048, 8192, 16, 32, 8, 128256),
    "toy": (64, 128, 2, 4, 2, 512),
}
"""Name -> width, MLP width, layers, heads, heads of keys and values, vocabulary."""
PROMPT = 128
"""Tokens in the cache at the start."""


def make_model(shape: str, device: torch.device, dtype: torch.dtype, positions: int) -> PreTrainedModel:
    """Random weights of that shape, made on the device: no file is read."""
    width, mlp_width, layers, heads, kv_heads, vocab_size = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=mlp_width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab_size,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        attn_implementation="sdpa",  # type: ignore[call-arg]
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def bytes_per_token(model: PreTrainedModel, context: float) -> int:
    """Bytes that one token at batch 1 must read: all weights but the unread rows of the embedding, and the keys and
    values of `context` tokens."""
    config = model.config.get_text_config()
    embedding = cast(torch.Tensor, model.get_input_embeddings().weight)
    weights = sum(one.nbytes for one in model.parameters()) - embedding.nbytes + embedding[0].nbytes
    head = config.hidden_size // config.num_attention_heads
    per_position = 2 * config.num_hidden_layers * config.num_key_value_heads * head * embedding.element_size()
    return weights + round(per_position * context)


def copy_bandwidth(device: torch.device, size: int, repeats: int = 12) -> float:
    """Bytes per second, read and written together, of the fastest of several copies of `size` bytes."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    goal = torch.empty_like(source)
    return max(2 * size / _timed(lambda: goal.copy_(source), device) for _ in range(repeats))


def _timed(call: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - began


def decode_speed(model: PreTrainedModel, new: int, temperature: float, repeats: int) -> float:
    """Tokens per second of our loop after the first token, median over calls after one to warm up."""
    ids = torch.arange(1, PROMPT + 1, device=model.device)[None] % model.config.get_text_config().vocab_size
    asked: dict[str, Any] = {"max_new_tokens": new, "temperature": temperature, "eos_token_id": (), "stop_strings": ()}
    every = [generate(model, None, ids, seed=turn, **asked).stats for turn in range(repeats + 1)]
    return median((one.num_tokens - 1) / (one.arrival_s[-1] - one.arrival_s[0]) for one in every[1:])


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Bandwidth, speed and the share of the bound, at temperature 0 and 1."""
    device = resolve_device(asked.device)
    model = make_model(asked.shape, device, getattr(torch, asked.dtype), PROMPT + asked.new_tokens + 64)
    moved, copied = bytes_per_token(model, PROMPT + asked.new_tokens / 2), copy_bandwidth(device, asked.copy_bytes)
    speeds = {t: decode_speed(model, asked.new_tokens, t, asked.repeats) for t in (0.0, 1.0)}
    bound = copied / moved
    known = {"shape": asked.shape, "dtype": asked.dtype, "num_parameters": model.num_parameters()}
    known |= {"prompt_tokens": PROMPT, "new_tokens": asked.new_tokens}
    rows = [{"temperature": t, "tokens_per_s": one, "bound": bound, "share": one / bound} for t, one in speeds.items()]
    about = {**environment(), "git": git_state()}
    return {"environment": about, **known, "bytes_per_token": moved, "copy_bytes_per_s": copied, "rows": rows}


def page(found: dict[str, Any]) -> str:
    """The share reached, and what it is a share of."""
    where = found["environment"]["cuda_device"] or found["environment"]["cpu"]
    rows = [
        f"| {one['temperature']:g} | {one['tokens_per_s']:.1f} | {one['bound']:.1f} | {one['share']:.0%} |"
        for one in found["rows"]
    ]
    return "\n".join(
        (
            f"# Autoregressive decoding against memory bandwidth: {where}\n",
            f"Our loop on a random Llama of the {found['shape']} shape ({found['num_parameters'] / 1e9:.2f}B "
            f"parameters, {found['dtype']}), batch 1, {found['prompt_tokens']} prompt tokens and {found['new_tokens']} "
            "new ones.\n",
            "| T | tokens/s | bound | share of the bound |\n| --- | --- | --- | --- |",
            *rows,
            f"\nA token reads {found['bytes_per_token'] / 1e9:.2f} GB; the device copies "
            f"{found['copy_bytes_per_s'] / 1e9:.0f} GB/s, read and written together. The bound is the second "
            "over the first.\n",
        )
    )


def main() -> None:
    """Measure, unless the folder holds a result; exit code 2 for bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="auto", help="as target.device")
    parser.add_argument("--new-tokens", type=int, default=256, help="at least 2: times lie between tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--copy-bytes", type=int, default=4 << 30)
    asked = parser.parse_args()
    if asked.new_tokens < 2 or min(asked.repeats, asked.copy_bytes) < 1:
        parser.error("--new-tokens is at least 2, --repeats and --copy-bytes at least 1")
    result = asked.folder / "bandwidth.json"
    if result.exists():
        sys.stderr.write(f"{result} is already finished\n")
        return
    try:
        found = measure(asked)
    except UserError as error:
        parser.error(str(error))
    asked.folder.mkdir(parents=True, exist_ok=True)
    (asked.folder / "bandwidth.md").write_text(page(found), encoding="utf-8")
    result.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(page(found))


if __name__ == "__main__":
    main()
