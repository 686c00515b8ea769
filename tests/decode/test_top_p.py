"""Top-p, alone and behind top-k, keeps what a stable sort of the whole vocabulary keeps, without reading a value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from decode.forward.capture import capture, host_reads
from decode.forward.packing import Packing
from decode.sampling.warp import Sampling, warp

MANY_TIES, BFLOAT16, SPREAD = "many ties", "bfloat16", "spread"


def by_sort(scores: Tensor, top_k: int, top_p: float) -> Tensor:
    if 0 < top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(top_k).values[..., -1:], -torch.inf)
    order = scores.sort(dim=-1, stable=True).indices
    dropped = scores.softmax(-1).gather(-1, order).cumsum(-1) <= 1 - top_p
    dropped[..., -1] = False
    return scores.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)


def logits(kind: str, dtype: torch.dtype, *shape: int) -> Tensor:
    found = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype) * 3
    if kind == MANY_TIES:
        return found.round()
    return found.bfloat16().to(dtype) if kind == BFLOAT16 else found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [MANY_TIES, BFLOAT16, SPREAD])
@pytest.mark.parametrize("shape", [(4, 3, 33), (7, 1), (2, 5, 8192), (1, 2, 151_936)])
def test_what_is_kept_is_what_a_stable_sort_keeps(kind: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    scores = logits(kind, dtype, *shape)
    for top_p in (0.05, 0.8, 0.95):
        for top_k in (0, 1, 20):
            assert torch.equal(warp(scores, Sampling(top_k=top_k, top_p=top_p)), by_sort(scores, top_k, top_p))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_that_are_excluded_already_stay_so_and_count_nothing(dtype: torch.dtype) -> None:
    scores = logits(MANY_TIES, dtype, 40, 60)
    scores[:, ::3] = -torch.inf
    scores[0, 1:] = -torch.inf  # a single one is left
    for top_k in (0, 5, 50):  # 50 are more than are left
        assert torch.equal(warp(scores, Sampling(top_k=top_k, top_p=0.7)), by_sort(scores, top_k, 0.7))


def test_of_equal_tokens_the_first_are_dropped_and_as_many_as_the_rule_says() -> None:
    """0.25 of mass may go; by top_k=2, which keeps all six likely ones as ties, a mass of 1 / 4 is one of six."""
    scores = torch.tensor([[0.0] * 4 + [-torch.inf] * 2])
    assert warp(scores, Sampling(top_p=0.75))[0].isfinite().tolist() == [False, True, True, True, False, False]
    scores = torch.tensor([[1.0, -0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]])
    kept = warp(scores, Sampling(top_k=2, top_p=0.75))[0].isfinite()
    assert kept.tolist() == [False, False, True, False, True, True, True, True]


@pytest.mark.parametrize("top_k", [0, 3])
def test_the_likeliest_is_never_dropped_and_rounding_is_transformers_own(top_k: int) -> None:
    scores = torch.log(torch.tensor([[0.1] * 10, [0.91] + [0.01] * 9, [0.2, 0.8] + [1e-30] * 8]))
    for top_p in (1e-9, 0.2, 0.8, 0.9):  # 1 - 0.9 is less than 0.1 in float64, and equal to it in float32
        assert torch.equal(warp(scores, Sampling(top_k=top_k, top_p=top_p)), by_sort(scores, top_k, top_p))


def test_both_filters_in_a_row_are_those_of_transformers() -> None:
    scores = logits(SPREAD, torch.float32, 50, 500)
    theirs = LogitsProcessorList([TopKLogitsWarper(40), TopPLogitsWarper(0.9)])
    assert torch.equal(warp(scores, Sampling(top_k=40, top_p=0.9)), theirs(None, scores.clone()))  # type: ignore[arg-type]


class Warped(nn.Module):
    """Scores as they are sampled, to be captured."""

    def __init__(self, sampling: Sampling) -> None:
        super().__init__()
        self.sampling = sampling

    def forward(self, scores: Tensor) -> tuple[Tensor]:
        """(B, W, V) -> (B, W, V)."""
        return (warp(scores, self.sampling),)


@pytest.mark.parametrize("sampling", [Sampling(top_p=0.9), Sampling(top_k=20, top_p=0.9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_value_is_read_and_a_capture_serves_other_scores(sampling: Sampling, dtype: torch.dtype) -> None:
    module, first, other = Warped(sampling), logits(SPREAD, dtype, 2, 5, 999), logits(BFLOAT16, dtype, 2, 5, 999)
    assert host_reads(module, (first,)) == []
    captured: Callable[[Tensor], tuple[Tensor, ...]] = capture(module, (first,), (first + 1,), Packing(nn.Module()))
    assert torch.equal(captured(other)[0], by_sort(other, sampling.top_k, sampling.top_p))
    assert module(first.to("meta"))[0].shape == first.shape


@pytest.mark.parametrize("top_k", [0, 20])
def test_scores_that_are_no_numbers_still_show(top_k: int) -> None:
    scores = logits(SPREAD, torch.float32, 3, 50)
    scores[1] = torch.nan
    found = warp(scores, Sampling(top_k=top_k, top_p=0.9))
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], by_sort(scores[[0, 2]], top_k, 0.9))
