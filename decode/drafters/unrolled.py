"""Keys and values of the steps that a recursive head is unrolled to in training (training-time test)."""

from __future__ import annotations

from functools import cached_property, lru_cache, partial

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from decode.common.progress import get_logger
from decode.drafters.layers import Mix, under
from decode.forward.attention import packed_visibility
from decode.forward.fused_kernels import computed_in, has_kernel
from decode.forward.merged_attention import Reach, Run, merged, runs_of
from decode.forward.window import Window

log = get_logger("decode")
FARTHEST = 0.03
"""Of their size that merged numbers may be from the dense mask's: sixteen bits round, float32 may be TF32."""
LONG = 2048
"""Slots from which a GPU merges. Merged, each document is some calls a step, which it waits for; a dense mask is one
call, of T x s T entries that are made, kept for backward and mostly hidden."""


class Unrolled:
    """A query of step s sees the true keys (step 0) of its document up to its own slot, and of later steps its own slot
    alone; all of them within the window, for which step s stands s places on."""

    def __init__(self, document: Tensor, positions: Tensor, window: Window | None) -> None:  # (B, T) both
        self.document, self.positions, self.window = document, positions, window

    def mix(self, *known: Tensor) -> Mix:
        """How a step mixes: known are keys and values (B, H_kv, T, d_head) of each step before, and of its own."""
        return self.merged(*known) if self._merges(known[0]) else self.dense(*known)

    def merged(self, *known: Tensor) -> Mix:
        """In memory of the text."""
        keys, values = known[0::2], known[1::2]
        reach = Reach.of(self.runs, self.positions, self.window, len(keys) - 1)
        return partial(merged, keys=keys, values=values, reach=reach)

    def dense(self, *known: Tensor) -> Mix:
        """Under a mask of all slots against all."""
        keys, values = known[0::2], known[1::2]
        return under(torch.cat(keys, 2), torch.cat(values, 2), self.visible(len(keys) - 1))

    @cached_property
    def runs(self) -> list[Run]:
        """Documents, looked up once for all steps."""
        return runs_of(self.document, self.positions, self.window)

    def visible(self, step: int) -> Tensor:  # (B, T, (step + 1) T) bool
        """What slots of a step see, of all keys so far."""
        causal = packed_visibility(self.document)
        own = torch.eye(causal.shape[1], dtype=torch.bool, device=causal.device).expand_as(causal)
        visible = torch.cat([causal, *[own] * step], 2)
        if self.window is not None:
            places = torch.cat([self.positions + one for one in range(step + 1)], 1)
            visible &= self.window.sees(self.positions + step, places)
        return visible

    def _merges(self, keys: Tensor) -> bool:  # (B, H_kv, T, d_head)
        if keys.device.type == "cpu":
            return True
        is_long = has_kernel(keys) and keys.shape[2] >= LONG
        return is_long and is_proved(keys.device, computed_in(keys), keys.shape[3], self.window is not None)


@lru_cache(maxsize=64)
def is_proved(device: torch.device, dtype: torch.dtype, width: int, is_masked: bool) -> bool:
    """Whether a device's kernels give what the dense mask gives, tried once on two short documents: they check little
    of what they are given, and wrong gradients would train a draft in silence."""
    why = "the dense mask gives other numbers or gradients"
    try:
        ours, theirs = _tried(device, dtype, width, is_masked), _tried(device, torch.float32, width, is_masked, True)
        apart = [float((one.float() - other).norm() / other.norm()) for one, other in zip(ours, theirs, strict=True)]
        if all(one < FARTHEST for one in apart):
            return True
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # of a kernel that refuses
        why = str(error)
    effect = "memory will grow with the square of the text"
    log.warning("fused attention of %s on %s is not used, since %s; %s", dtype, device, why, effect)
    return False


def _tried(device: torch.device, dtype: torch.dtype, width: int, is_masked: bool, dense: bool = False) -> list[Tensor]:
    """Outputs and gradients of three steps."""
    places = torch.cat([torch.arange(41), torch.arange(29)])[None]
    document = torch.tensor([[0] * 41 + [1] * 29], device=device)
    unrolled = Unrolled(document, places.to(device), Window(16, 2) if is_masked else None)
    numbers = torch.randn(3, 4, 1, 2, 70, width, generator=torch.Generator().manual_seed(0))  # not the run's own
    saved = saved_tensors_hooks(lambda one: one, lambda one: one)  # not with what a recomputed layer saves
    with torch.enable_grad(), torch.autocast(device.type, enabled=False), saved:
        leaves = [one.to(device, dtype).requires_grad_() for one in numbers[:, :3].flatten(0, 1)]
        mix = unrolled.dense if dense else unrolled.merged
        known = [leaves[3 * step + part] for step in range(3) for part in (1, 2)]
        out = torch.stack([mix(*known[: 2 * step + 2])(leaves[3 * step]) for step in range(3)])
        weight = numbers[:, 3].transpose(2, 3).to(device)
        return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]
