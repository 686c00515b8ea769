"""How near autoregressive decoding comes to the memory bandwidth of a card, on a model made there at random.

`python -m eval.modes.bandwidth docs/results/bandwidth` makes a Llama of the 8B shape in bfloat16, decodes with our own
loop at batch 1, measures how fast the device copies memory, and writes NAME.json and NAME.md with the share reached. A
token needs every weight once (of the embedding one row) and the keys and values of its context; nothing decodes faster.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from decode import generate
from decode.common.checked_json import write_json
from decode.common.environment import environment, git_state
from decode.common.errors import InputError, UserError
from decode.common.progress import get_logger
from decode.models.load import resolve_device
from eval.arms.base import synchronize
from eval.render.columns import Column, Table, column, columns
from eval.render.formatting import number, share
from eval.render.templates import render_markdown

SCHEMA = 1
GOAL = 0.75
log = get_logger("eval")


@dataclass(frozen=True)
class Shape:
    """A Llama without weights."""

    width: int
    mlp_width: int
    layers: int
    heads: int
    kv_heads: int
    vocab_size: int


SHAPES = {
    "8b": Shape(4096, 14336, 32, 32, 8, 128256),
    "1b": Shape(2048, 8192, 16, 32, 8, 128256),
    "toy": Shape(64, 128, 2, 4, 2, 512),
}


def make_model(shape: Shape, device: torch.device, dtype: torch.dtype, positions: int) -> PreTrainedModel:
    """Random weights of that shape, made on the device: no file is read."""
    config = LlamaConfig(
        hidden_size=shape.width,
        intermediate_size=shape.mlp_width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocab_size,
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


def decode_speed(model: PreTrainedModel, prompt: int, new: int, temperature: float, repeats: int) -> float:
    """Tokens per second of our autoregressive loop after the first token; median over calls, after one to warm up."""
    ids = torch.arange(1, prompt + 1, device=model.device)[None] % model.config.get_text_config().vocab_size
    speeds = []
    for turn in range(repeats + 1):
        stats = generate(
            model, None, ids, max_new_tokens=new, temperature=temperature, eos_token_id=(), stop_strings=(), seed=turn
        ).stats
        speeds.append((stats.num_tokens - 1) / (stats.arrival_s[-1] - stats.arrival_s[0]))
    return median(speeds[1:])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Bandwidth, speed and the share of the bound, at temperature 0 and 1."""
    device, shape = resolve_device(options.device), SHAPES[options.shape]
    dtype = getattr(torch, options.dtype)
    log.info("making %s on %s", options.shape, device)
    model = make_model(shape, device, dtype, options.prompt + options.new + 64)
    moved = bytes_per_token(model, options.prompt + options.new / 2)
    copied = copy_bandwidth(device, options.copy_bytes)
    log.info("a token reads %.2f GB; the device copies %.0f GB/s", moved / 1e9, copied / 1e9)
    rows = []
    for temperature in (0.0, 1.0):
        speed = decode_speed(model, options.prompt, options.new, temperature, options.repeats)
        rows.append(
            {
                "temperature": temperature,
                "tokens_per_s": speed,
                "bound": copied / moved,
                "share": speed * moved / copied,
            }
        )
        log.info("T=%g: %.1f tokens/s, %.0f%% of the bound", temperature, speed, 100 * speed * moved / copied)
    return {
        "schema": SCHEMA,
        "environment": {
            **environment(),
            "git": git_state(),
            "command": " ".join(["python -m eval.modes.bandwidth", *sys.argv[1:]]),
        },
        "shape": {"name": options.shape, **asdict(shape), "num_parameters": model.num_parameters()},
        "dtype": options.dtype,
        "prompt_tokens": options.prompt,
        "new_tokens": options.new,
        "bytes_per_token": moved,
        "copy_bytes_per_s": copied,
        "goal_share": GOAL,
        "rows": rows,
    }


def render(found: dict[str, Any]) -> str:
    """The page: the share reached, what it is a share of, and the machine."""
    shown = columns(
        *("T", Column("tokens/s", lambda row: number(row["tokens_per_s"], 1))),
        *(Column("bound", lambda row: number(row["bound"], 1)), column("share of the bound", "share", share)),
        Column("goal", lambda _: share(found["goal_share"])),
    )
    return render_markdown("bandwidth.md.j2", found=found, shares=Table("Share", shown, found["rows"]))


def device_slug() -> str:
    """The card's name for a file, the processor's where there is no card."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def main() -> None:
    """Entry point of `python -m eval.modes.bandwidth`; exit code 2 for bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("destination", type=Path, help="path of the result without suffix; the card's name is added")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompt", type=int, default=128, help="tokens in the cache at the start")
    parser.add_argument("--new", type=int, default=256, help="tokens decoded")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--copy-bytes", type=int, default=4 << 30, help="size of the buffer that is copied")
    options = parser.parse_args()
    try:
        if min(options.prompt, options.repeats, options.copy_bytes) < 1 or options.new < 2:
            raise InputError(
                f"--prompt={options.prompt} --new={options.new} --repeats={options.repeats} "
                f"--copy-bytes={options.copy_bytes}: use at least 1 each, and 2 new tokens, or there is nothing to time"
            )
        found = measure(options)
    except UserError as error:
        sys.stderr.write(f"draftsmith bandwidth: error: {error}\n")
        sys.exit(2)
    destination = options.destination.with_name(f"{options.destination.name}_{device_slug()}")
    destination.parent.mkdir(parents=True, exist_ok=True)
    write_json(destination.with_suffix(".json"), found)
    destination.with_suffix(".md").write_text(render(found), encoding="utf-8")
    log.info("result: %s", destination.with_suffix(".md"))


if __name__ == "__main__":
    main()
