"""What a training takes of a device's memory: sizes that are known, and a step that is rehearsed with one row and with
two, before the target is loaded."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from decode.common.environment import memory_bytes, resolve_device
from decode.common.errors import ConfigError
from decode.drafters.base import Batch
from decode.models.checkpoint_check import is_quantised
from decode.models.output_head import Ends
from decode.models.small import load_ends
from distill.objectives.target_distribution import HiddenRows
from train.config import TrainConfig
from train.loss import DraftLoss
from train.optimizers import build_optimizers
from train.training_inputs import Inputs

GB = 1e9
WIDE = 4  # bytes of a weight, of its gradient and of each average, all in float32


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each device."""

    held: dict[str, int]
    """What is there all the time, by what it is."""
    one_row: int
    """What a step of one row adds: activations, scores, logits, rows of p."""
    further_row: int
    """What each row more adds to that."""
    update: int
    """What the optimizer adds, when the rows are gone."""
    room: int
    """Of the device."""

    def total(self, rows: int) -> int:
        """With so many rows in a micro-step."""
        return sum(self.held.values()) + max(self.update, self.one_row + (rows - 1) * self.further_row)

    def line(self, rows: int) -> str:
        """For people."""
        step = self.total(rows) - sum(self.held.values())
        parts = [*self.held.items(), (f"activations and logits of {rows} rows", step)]
        named = ", ".join(f"{name} {size / GB:.2f}" for name, size in parts if size)
        return f"memory on a device: {self.total(rows) / GB:.2f} GB of {self.room / GB:.0f} ({named})"

    def fits(self, rows: int) -> bool:
        """With so many rows in a micro-step."""
        return self.total(rows) <= self.room


def memory_lines(cfg: TrainConfig, inputs: Inputs, processes: int) -> list[str]:
    """What the training takes, and, where that is more than there is, the first setting that takes less and fits.
    Nothing is said where weights are kept in other forms or places: by DeepSpeed, quantised, by a device map."""
    target = inputs.target
    elsewhere = cfg.target.device_map or cfg.target.quantization or (target and is_quantised(target.config))
    if cfg.engine.zero_stage or elsewhere:
        return []
    plan = planned(cfg, inputs, processes)
    lines = [plan.line(cfg.batch_size)]
    if plan.fits(cfg.batch_size):
        return lines
    for change, leaner in _leaner(cfg, inputs, processes, plan):
        fitting = [one for one in range(1, cfg.batch_size + 1) if cfg.batch_size % one == 0 and leaner.fits(one)]
        if fitting:  # a divisor, so that a step has as many rows
            told = " ".join([*change, *_smaller(cfg, fitting[-1])])
            return [*lines, f"that does not fit. {told} would: {leaner.line(fitting[-1])}"]
    return [*lines, "that does not fit, and nor would a single row with engine.recompute=true; use a smaller draft"]


def _smaller(cfg: TrainConfig, rows: int) -> list[str]:
    if rows == cfg.batch_size:
        return []
    return [f"batch_size={rows}", f"gradient_accumulation={cfg.gradient_accumulation * cfg.batch_size // rows}"]


def _leaner(
    cfg: TrainConfig, inputs: Inputs, processes: int, plan: MemoryPlan
) -> Iterator[tuple[list[str], MemoryPlan]]:
    """Settings that change nothing of what is learned, from the cheapest on."""
    yield [], plan
    found, change = cfg, []
    if not cfg.engine.recompute:
        found, change = replace(cfg, engine=replace(cfg.engine, recompute=True)), ["engine.recompute=true"]
        try:
            yield change, planned(found, inputs, processes)
        except ConfigError:  # a model without it
            found, change = cfg, []
    if processes > 1 and cfg.engine.name != "fsdp2":
        sharded = replace(found, optimizer="adamw", engine=replace(found.engine, name="fsdp2"))
        yield ["engine=fsdp2", "optimizer=adamw", *change], planned(sharded, inputs, processes)


def planned(cfg: TrainConfig, inputs: Inputs, processes: int) -> MemoryPlan:
    """By a step of the draft on the device itself, over the first rows of the training split."""
    device, ends = resolve_device(cfg.engine.device), None
    if inputs.blueprint.layers_read or cfg.makes_p or inputs.needs_target_weights:
        ends = load_ends(replace(cfg.target, device="cpu", device_map=None))
    draft = inputs.blueprint.build(ends if inputs.blueprint.layers_read else None)
    if cfg.engine.recompute:
        draft.recompute()
    loss = DraftLoss(draft.module, cfg.objective, inputs.window_along_rows)
    held = _held(cfg, inputs, loss, _bytes_of_state(loss, draft.token_tables(), cfg), processes)
    trained = [weight.numel() * WIDE for weight in loss.parameters() if weight.requires_grad]
    update = sum(trained) if device.type == "cuda" else 2 * max(trained)  # of all weights at once, or one by one
    room = _free_of(device) if device.type == "cuda" else memory_bytes()
    found = []
    for rows in (1, 2):
        try:
            if ends is not None:
                ends.head.model.to(device)  # type: ignore[arg-type]
            found.append(_rehearsed(cfg, inputs, loss.to(device), ends, rows))
        except torch.OutOfMemoryError:
            found.append(room)
    return MemoryPlan(held, found[0], max(0, found[1] - found[0]), update, room)


def _free_of(device: torch.device) -> int:
    """Bytes that are free to this process: the context of CUDA, and what others hold, are not."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def _held(cfg: TrainConfig, inputs: Inputs, loss: DraftLoss, state: int, processes: int) -> dict[str, int]:
    trained = sum(weight.numel() for weight in loss.parameters() if weight.requires_grad) * WIDE
    weights = sum(weight.numel() for weight in loss.parameters()) * WIDE
    parts = processes if cfg.engine.name == "fsdp2" else 1
    held = {"weights": weights // parts, "gradients": trained // parts, "optimizer": state // parts}
    if parts > 1:
        held["weights and gradients where they are gathered"] = weights + trained
    elif processes > 1:
        held["gradients on their way"] = trained  # the buckets of DDP
    return held | _of_target(cfg, inputs, parts)


def _of_target(cfg: TrainConfig, inputs: Inputs, parts: int) -> dict[str, int]:
    if not (inputs.blueprint.layers_read or cfg.makes_p or inputs.needs_target_weights):
        return {}
    assert inputs.target is not None
    size = getattr(torch, inputs.target.dtype_name).itemsize
    text = inputs.target.config.get_text_config()
    ends = (1 if text.tie_word_embeddings else 2) * text.vocab_size * text.hidden_size * size
    if cfg.target_source == "live":
        return {"the target": ends + (inputs.target.num_parameters * size - ends) // parts}
    if inputs.blueprint.layers_read or cfg.makes_p:
        return {"the target's embedding and output head": ends}
    return {"the target": inputs.target.num_parameters * size}


def _bytes_of_state(loss: DraftLoss, token_tables: list[Any], cfg: TrainConfig) -> int:
    """Two averages a weight of AdamW, one of Muon."""
    optimizers = build_optimizers(loss, token_tables, cfg)
    return sum(
        weight.numel() * WIDE * (2 if isinstance(optimizer, AdamW) else 1)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for weight in group["params"]
    )


def _rehearsed(cfg: TrainConfig, inputs: Inputs, loss: DraftLoss, ends: Ends | None, rows: int) -> int:
    """Bytes that a forward and a backward pass over so many rows add at their peak to the gradients of all weights,
    which are there from the first micro-step on."""
    device, learned = next(loss.parameters()).device, [one for one in loss.parameters() if one.requires_grad]
    loss.train()
    is_first = cfg.gradient_accumulation == 1
    for weight in learned:
        weight.grad = None if is_first else torch.zeros_like(weight)
    with peak_bytes(device) as peak:
        batch = _batch(cfg, inputs, ends, rows).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=cfg.engine.precision == "bf16"):
            total, _ = loss(batch)
        total.backward()
        del batch, total
    loss.zero_grad()
    return max(0, peak[0] - sum(one.numel() for one in learned) * WIDE) if is_first else peak[0]


def _batch(cfg: TrainConfig, inputs: Inputs, ends: Ends | None, rows: int) -> Batch:
    """The first rows, with random states where the target would make them."""
    numbers = [number % len(inputs.train.rows) for number in range(rows)]
    batch = inputs.train.batch(numbers, None if ends is None else ends.head)
    if not cfg.makes_p:
        return batch
    assert ends is not None
    assert inputs.target is not None
    weight = ends.head.weight
    made = {"dtype": weight.dtype, "device": weight.device}
    hidden = torch.randn(batch.ids.numel(), inputs.target.hidden_size, **made)
    layers = len(inputs.blueprint.layers_read)
    features = torch.randn(*batch.ids.shape, layers, inputs.target.hidden_size, **made) if layers else None
    p = HiddenRows(hidden, ends.head, torch.arange(len(hidden), device=weight.device))
    return replace(batch, target=p, features=features)


@contextmanager
def peak_bytes(device: torch.device) -> Iterator[list[int]]:
    """A list that gets, at the end, the most bytes that tensors made inside have held at one time."""
    peak = [0]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak[0] = torch.cuda.max_memory_allocated(device) - before
        return
    with _Living() as living:
        yield peak
    peak[0] = living.peak


class _Living(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside, as long as they live: a CPU keeps no such count."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, Tensor) and one.untyped_storage()._cdata not in given:
                self._take(one)
        return made

    def _take(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())

    def _drop(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.now -= size
