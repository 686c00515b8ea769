"""Whether a capture gives what its pass gives.

On a CPU both run the same kernels: integers are equal, numbers too but for the order of sums. On a GPU libraries may
choose other kernels inside a graph, and an ulp makes another token of a near-tie: numbers agree up to rounding, and
integers wherever the choices between scores have a margin above it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}  # else 1e-2: packed weights sum in another order
ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-3}  # of the largest number; else 2**-5
DISTANCE = ROUNDING  # of the length of a row; else 2**-3
Results = Sequence[Tensor]


def alike(have: Results, want: Results) -> bool:
    """Whether they are the same, but for the order of sums."""
    return all(_same(one, other) for one, other in zip(have, want, strict=True))


def _same(have: Tensor, want: Tensor) -> bool:
    if not have.is_floating_point():
        return torch.equal(have, want)
    tolerance = TOLERANCE.get(have.dtype, 1e-2)
    return torch.allclose(have, want, rtol=tolerance, atol=tolerance)


def near(have: Tensor, want: Tensor) -> bool:
    """Up to rounding, by the length of each row and by the largest number. In bfloat16 logits of packed weights and of
    a model's own differed by 1 to 7 % of a row's length (SmolLM2-135M, 30 layers), and single ones by 1.1 where the
    largest was 26."""
    if not have.is_floating_point():
        return torch.equal(have, want)
    same, limit = have == want, DISTANCE.get(have.dtype, 2**-3)
    apart = (have.double() - want.double()).abs().masked_fill(same, 0)  # infinite where one of them alone is
    length = want.double().masked_fill(~want.isfinite(), 0).norm(dim=-1)
    return bool((apart.norm(dim=-1) <= limit * length).all() and (apart <= limit * _largest(want)).all())


def alike_but_for_near_ties(have: Results, want: Results, otherwise: Callable[[], Results], dtype: torch.dtype) -> bool:
    """Whether each entry of `have` is that of `want`, up to the rounding of `dtype`, or follows from a near-tie:
    `otherwise()` makes `want` anew with near-ties falling `the_other_way`. Some entry must follow from none."""
    fits = [_near(one, other, dtype) for one, other in zip(have, want, strict=True)]
    if all(one.all() for one in fits):
        return True
    decided = [_near(one, other, dtype) for one, other in zip(otherwise(), want, strict=True)]
    pairs = [*zip(fits, decided, strict=True)]
    return all((one | ~sure).all() for one, sure in pairs) and any(sure.any() for sure in decided)


def _near(have: Tensor, want: Tensor, dtype: torch.dtype) -> Tensor:
    """Entry by entry."""
    if not have.is_floating_point():
        return have == want
    limit = _largest(want) * ROUNDING.get(dtype, 2**-5)
    return (have == want) | ((have - want).abs() <= limit)


def _largest(numbers: Tensor) -> Tensor:
    return numbers.masked_fill(~numbers.isfinite(), 0).abs().amax() if numbers.numel() else numbers.new_zeros(())


def precision_of(module: nn.Module, results: Results) -> torch.dtype:
    """The coarsest type that numbers of a pass go through: log p in float32 has the rounding of bfloat16 weights."""
    types = [one.dtype for one in (*module.parameters(), *results) if one.is_floating_point()]
    return max(types, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def shadow(numbers: Tensor) -> Tensor:
    """(..., d) -> (...): enough to compare caches by, where there is no room for a copy of them."""
    return numbers @ torch.arange(1, numbers.shape[-1] + 1, device=numbers.device).cos().to(numbers.dtype)


class the_other_way(TorchFunctionMode):  # noqa: N801
    """Inside, each choice between scores that rounding in `dtype` may order otherwise falls on another one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.tolerance = 2 * TOLERANCE.get(dtype, 1e-2)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        choice = {"argmax": self._argmax, "topk": self._topk, "sort": self._sort}.get(getattr(func, "__name__", ""))
        if choice is None or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            return func(*args, **given)
        return choice(*args, **given)

    def _argmax(self, scores: Tensor, dim: int = -1, keepdim: bool = False) -> Tensor:
        index = self._topk(scores, 1, dim).indices
        return index if keepdim else index.squeeze(dim)

    def _topk(self, scores: Tensor, k: int, dim: int = -1) -> torch.return_types.topk:
        best = scores.topk(min(k + 1, scores.shape[dim]), dim)  # the last one may be near to what was left out
        values, index = self._turned(*best, scores, dim)
        return torch.return_types.topk((values.narrow(dim, 0, k), index.narrow(dim, 0, k)))

    def _sort(self, scores: Tensor, dim: int = -1, **given: bool) -> torch.return_types.sort:
        return torch.return_types.sort(self._turned(*scores.sort(dim=dim, **given), scores, dim))

    def _turned(self, values: Tensor, index: Tensor, scores: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Each run of neighbours by near-ties, of values in order, turned by one place."""
        values, index = values.movedim(dim, -1), index.movedim(dim, -1)
        is_near = values.diff(dim=-1).abs() <= self.tolerance * _largest(scores)
        none = torch.zeros_like(is_near[..., :1]) if is_near.shape[-1] else values.new_zeros(values.shape).bool()
        place = torch.arange(values.shape[-1], device=values.device)
        first = torch.where(torch.cat([none, is_near], -1), 0, place).cummax(-1).values
        source = torch.where(torch.cat([is_near, none], -1), place + 1, first)
        return values.gather(-1, source).movedim(-1, dim), index.gather(-1, source).movedim(-1, dim)
