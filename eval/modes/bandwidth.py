"""`mode=bandwidth`: how near autoregressive decoding comes to the memory bandwidth of a device.

A Llama of the 8B shape is made at random in bfloat16, our own loop decodes with it at batch 1, and the device is timed
at copying memory. A token needs every weight once (of the embedding one row) and the keys and values of its context;
nothing decodes faster, so the figure is the share of that bound which is reached.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from decode import generate
from decode.common.checked_json import write_json
from decode.common.environment import environment, git_state, resolve_device
from decode.common.progress import get_logger
from decode.common.run_folder import open_run
from eval.arms.base import AUTOREGRESSIVE, synchronize
from eval.config import EvalConfig
from eval.measure.energy import NO_METER, EnergyMeter, meter_of
from eval.render.energy import energy_table
from eval.render.formatting import Column, Table, column, columns, number, share
from eval.render.page import render_markdown
from eval.results.document import command
from eval.results.energy import energy_entry

SCHEMA = 1
log = get_logger("eval")


@dataclass(frozen=True)
class LlamaShape:
    """A Llama without weights."""

    width: int
    mlp_width: int
    layers: int
    heads: int
    kv_heads: int
    vocab_size: int


SHAPES = {
    "8b": LlamaShape(4096, 14336, 32, 32, 8, 128256),
    "1b": LlamaShape(2048, 8192, 16, 32, 8, 128256),
    "toy": LlamaShape(64, 128, 2, 4, 2, 512),
}


def make_model(shape: LlamaShape, device: torch.device, dtype: torch.dtype, positions: int) -> PreTrainedModel:
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


def decode_speed(
    model: PreTrainedModel, prompt: int, new: int, temperature: float, repeats: int, meter: EnergyMeter = NO_METER
) -> tuple[float, list[list[float]] | None]:
    """Tokens per second of our autoregressive loop after the first token, median over calls after one to warm up; and
    of each call [joules, tokens], None without a meter."""
    ids = torch.arange(1, prompt + 1, device=model.device)[None] % model.config.get_text_config().vocab_size
    speeds, spent = [], []
    for turn in range(repeats + 1):
        asked = {
            "max_new_tokens": new,
            "temperature": temperature,
            "eos_token_id": (),
            "stop_strings": (),
            "seed": turn,
        }
        done, joules = meter.around(partial(generate, model, None, ids, **asked))
        stats = done.stats
        spent.append([joules, float(stats.num_tokens)])
        speeds.append((stats.num_tokens - 1) / (stats.arrival_s[-1] - stats.arrival_s[0]))
    return median(speeds[1:]), spent[1:] if meter.counters else None


def run(cfg: EvalConfig) -> None:
    """Write bandwidth.json and bandwidth.md to cfg.output_dir; raises ConfigError before anything is made."""
    resolve_device(cfg.target.device)
    if cfg.plan:
        sys.stdout.write(f"a Llama of the {cfg.bandwidth.shape} shape in {cfg.bandwidth.dtype}, made at random\n")
        return
    with open_run(cfg.output_dir, "eval", cfg, cfg.resume) as folder:
        if folder.is_finished:
            return
        found = measure(cfg)
        write_json(folder.file("bandwidth.json"), found)
        folder.file("bandwidth.md").write_text(render(found), encoding="utf-8")
        folder.finish({"rows": len(found["rows"])})
        log.info("result: %s", folder.file("bandwidth.md"))


def measure(cfg: EvalConfig) -> dict[str, Any]:
    """Bandwidth, speed and the share of the bound, at temperature 0 and 1."""
    size, device = cfg.bandwidth, resolve_device(cfg.target.device)
    shape, dtype = SHAPES[size.shape], getattr(torch, size.dtype)
    log.info("making %s on %s", size.shape, device)
    model = make_model(shape, device, dtype, size.prompt_tokens + size.new_tokens + 64)
    moved = bytes_per_token(model, size.prompt_tokens + size.new_tokens / 2)
    copied = copy_bandwidth(device, size.copy_bytes)
    log.info("a token reads %.2f GB; the device copies %.0f GB/s", moved / 1e9, copied / 1e9)
    rows, energy, meter = [], [], meter_of(cfg.timing.watts, model)
    for temperature in (0.0, 1.0):
        speed, spent = decode_speed(model, size.prompt_tokens, size.new_tokens, temperature, size.repeats, meter)
        energy.append(energy_entry(f"batch 1, T={temperature:g}", AUTOREGRESSIVE, spent, meter, cfg.seed))
        bound = copied / moved
        rows.append({"temperature": temperature, "tokens_per_s": speed, "bound": bound, "share": speed / bound})
        log.info("T=%g: %.1f tokens/s, %.0f%% of the bound", temperature, speed, 100 * speed / bound)
    return {
        "schema": SCHEMA,
        "environment": {**environment(), "git": git_state(), "command": command()},
        "shape": {"name": size.shape, **asdict(shape), "num_parameters": model.num_parameters()},
        "dtype": size.dtype,
        "prompt_tokens": size.prompt_tokens,
        "new_tokens": size.new_tokens,
        "bytes_per_token": moved,
        "copy_bytes_per_s": copied,
        "rows": rows,
        "energy": energy,
    }


def render(found: dict[str, Any]) -> str:
    """The page: the share reached, what it is a share of, and the machine."""
    shown = columns(
        *("T", Column("tokens/s", lambda row: number(row["tokens_per_s"], 1))),
        *(Column("bound", lambda row: number(row["bound"], 1)), column("share of the bound", "share", share)),
    )
    shares, energy = Table("Share", shown, found["rows"]), energy_table(found)
    return render_markdown("bandwidth.md.j2", found=found, shares=shares, energy=energy)


def device_slug() -> str:
    """The card's name for a file, the processor's where there is no card."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
