"""Attention of steps that are trained together: the numbers and gradients of the dense mask, in memory of the text."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from decode.drafters import unrolled
from decode.drafters.layers import Mix, under
from decode.drafters.unrolled import Unrolled
from decode.forward import fused_kernels, merged_attention
from decode.forward.window import Window

PACKED = [[0] * 5 + [1] * 9 + [-1] * 2, [2] * 16, [3] + [4] * 12 + [-1] * 3]
WINDOWS = {"all": None, "window": Window(4, 0), "sinks": Window(3, 2), "one step": Window(1, 0), "wide": Window(99, 1)}


def rows(documents: list[list[int]]) -> tuple[Tensor, Tensor]:
    """(document, positions) of packed rows."""
    document = torch.tensor(documents)
    same = document[:, :, None] == document[:, None, :]
    return document, same.tril().sum(-1) - 1


def mixed(unrolled: Unrolled, steps: int, leaves: list[Tensor], dense: bool, heads: int) -> Tensor:
    """What `steps` steps mix, one after another; leaves (B, H + 2 H_kv, T, d) are each step's query, key and value."""
    found, known = [], list[Tensor]()
    for step in range(steps):
        kv_heads = (leaves[step].shape[1] - heads) // 2
        query, key, value = leaves[step].split([heads, kv_heads, kv_heads], 1)
        known += [key, value]
        mix: Mix = unrolled.mix(*known)
        if dense:
            mix = under(torch.cat(known[0::2], 2), torch.cat(known[1::2], 2), unrolled.visible(step))
        found.append(mix(query))
    return torch.stack(found)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_numbers_and_gradients_are_those_of_the_dense_mask(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, name: str, kv_heads: int
) -> None:
    monkeypatch.setattr(merged_attention, "BLOCK", 6)
    document, positions = rows(PACKED)
    torch.manual_seed(0)
    leaves = [torch.randn(3, 4 + 2 * kv_heads, 16, 8, dtype=dtype, requires_grad=True) for _ in range(3)]
    weight = torch.randn(3, 3, 16, 4, 8, dtype=dtype) * (document >= 0)[None, :, :, None, None]
    found = []
    for dense in (False, True):
        out = mixed(Unrolled(document, positions, WINDOWS[name]), 3, leaves, dense, 4)
        found.append([out * (weight != 0), *torch.autograd.grad((out * weight).sum(), leaves)])
    exact = 1e-12 if dtype == torch.float64 else 1e-6
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=exact * float(theirs.detach().abs().max()))


def scores_of(query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool) -> Tensor:
    assert (bias is None) == is_causal
    scores = (query @ key.transpose(2, 3)) * query.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1) & is_causal
    return (scores if bias is None else scores + bias).masked_fill(hidden, -torch.inf)


def gradients_of(scores: Tensor, whole: Tensor, given: tuple[Tensor, ...]) -> list[Tensor]:
    """As FlashAttention makes them: of probabilities from a log-sum-exp, and of what they came to."""
    gradient, query, key, value, out = given
    chance = (scores - whole[..., None]).exp()
    slope = chance * (gradient @ value.transpose(2, 3) - (gradient * out).sum(-1, keepdim=True))
    slope = slope * query.shape[-1] ** -0.5
    return [slope @ key, slope.transpose(2, 3) @ query, chance.transpose(2, 3) @ gradient]


def check_layout(*given: Tensor) -> None:
    """Of CUDA's kernels, which read 16 bytes at once from wherever a slot begins."""
    for one in given:
        assert one.stride(3) == 1
        assert all(place * one.itemsize % 16 == 0 for place in (*one.stride()[1:3], one.storage_offset()))


def check_bias(bias: Tensor | None, query: Tensor, key: Tensor) -> None:
    if bias is not None:
        assert bias.shape == (1, query.shape[1], query.shape[2], key.shape[2])
        assert bias.dtype == query.dtype
        assert bias.stride(3) == 1
        assert bias.stride(2) % 16 == bias.storage_offset() % 16 == 0
        in_powers_of_two = (bias.float() * 1.4427).isfinite()
        assert in_powers_of_two.all(), "a row of such would have a log-sum-exp of 0"


def efficient(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, lse: bool, dropout: float, is_causal: bool
) -> tuple[Tensor, ...]:
    """CUDA's memory-efficient kernel, in arithmetic of a CPU."""
    assert lse
    check_layout(query, key, value)
    check_bias(bias, query, key)
    scores = scores_of(query, key, bias, is_causal)
    whole = torch.nn.functional.pad(scores.logsumexp(-1), (0, -query.shape[2] % 32), value=torch.inf)
    return scores.softmax(-1) @ value, whole, torch.zeros(()), torch.zeros(())


def efficient_back(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, out: Tensor, whole: Tensor,
    seed: Tensor, offset: Tensor, dropout: float, wanted: list[bool], is_causal: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """It goes over out by the heads and their width, and over the log-sum-exp by blocks of 32."""
    length = query.shape[2]
    check_layout(query, key, value)
    check_bias(bias, query, key)
    assert out.stride()[1:] == (out.shape[3], out.shape[1] * out.shape[3], 1)
    assert whole.shape == (1, query.shape[1], -(-length // 32) * 32)
    assert whole.is_contiguous()
    assert (whole[..., length:] == torch.inf).all()
    assert wanted == [True, True, True, False]
    scores = scores_of(query, key, bias, is_causal)
    return (*gradients_of(scores, whole[..., :length], (gradient, query, key, value, out)), None)


def flash(query: Tensor, key: Tensor, value: Tensor, dropout: float, is_causal: bool) -> tuple[Any, ...]:
    """CUDA's FlashAttention, in arithmetic of a CPU."""
    check_layout(query, key, value)
    scores = scores_of(query, key, None, is_causal)
    return scores.softmax(-1) @ value, scores.logsumexp(-1), None, None, query.shape[2], key.shape[2], None, None, None


def flash_back(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, whole: Tensor, begins: None, ends: None,
    longest: int, most_keys: int, dropout: float, is_causal: bool, seed: Tensor, offset: Tensor,
) -> list[Tensor]:  # fmt: skip
    check_layout(query, key, value, out)
    assert (longest, most_keys) == (query.shape[2], key.shape[2])
    assert whole.shape == query.shape[:3]
    assert whole.is_contiguous()
    return gradients_of(scores_of(query, key, None, is_causal), whole, (gradient, query, key, value, out))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("name", WINDOWS)
def test_kernels_of_a_gpu_are_given_what_they_ask_for(monkeypatch: pytest.MonkeyPatch, name: str, fast: bool) -> None:
    """What the kernels say of themselves, where a GPU would read past its end or merge a row of nothing."""
    for made in (efficient, efficient_back, flash, flash_back):
        monkeypatch.setattr(fused_kernels, made.__name__.upper(), made)
    kernels = {False: fused_kernels.ON_CUDA_FAST if fast else fused_kernels.ON_CUDA, True: fused_kernels.ON_CUDA}
    monkeypatch.setattr(merged_attention, "kernel_for", lambda query, masked: kernels[masked])
    test_numbers_and_gradients_are_those_of_the_dense_mask(monkeypatch, torch.float32, name, 2)


@pytest.mark.parametrize("is_masked", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_is_tried_before_it_is_trusted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dtype: torch.dtype, is_masked: bool
) -> None:
    tried, key = unrolled.is_proved.__wrapped__, (torch.device("cpu"), dtype, 16, is_masked)
    state = torch.get_rng_state()
    with torch.no_grad():
        assert tried(*key)
    assert torch.equal(torch.get_rng_state(), state)
    real = fused_kernels.ON_CPU

    def refused(*given: Any) -> Any:
        raise RuntimeError("no kernel image")

    def swapped(*given: Any) -> Any:
        of_query, of_key, of_value = real.backward(*given)
        return of_query, of_value, of_key

    for kernel in (fused_kernels.Kernel(refused, refused), fused_kernels.Kernel(real.forward, swapped)):
        monkeypatch.setattr(merged_attention, "kernel_for", lambda query, masked, kernel=kernel: kernel)
        assert not tried(*key)
    assert "no kernel image" in caplog.text
    assert "gives other numbers or gradients; memory will grow" in caplog.text


class Largest(TorchDispatchMode):
    """Entries of the largest tensor that comes up, forward and backward."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple | list) else [found]:
            if isinstance(one, Tensor):
                self.entries = max(self.entries, one.numel())
        return found


@pytest.mark.parametrize("name", ["all", "sinks"])
def test_no_tensor_grows_with_the_square_of_the_text(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(merged_attention, "BLOCK", 16)
    largest = []
    for length in (128, 256):
        document, positions = rows([[0] * length])
        leaves = [torch.randn(1, 3, length, 8, requires_grad=True) for _ in range(3)]
        with Largest() as seen:
            mixed(Unrolled(document, positions, WINDOWS[name]), 3, leaves, False, 1).sum().backward()
        largest.append(seen.entries)
    assert largest[1] <= 2.1 * largest[0]
    assert largest[1] < 256 * 256


@pytest.mark.slow
def test_long_texts_take_less_time_than_under_the_dense_mask() -> None:
    """7 steps over 2,048 tokens, 9 heads of 64 over 3 groups: 6.3 and 7.6 times on two cores (AVX2)."""
    document, positions = rows([[0] * 2048])
    seconds = []
    for dense in (False, True):
        leaves = [torch.randn(1, 15, 2048, 64, requires_grad=True) for _ in range(7)]
        began = time.perf_counter()
        mixed(Unrolled(document, positions, None), 7, leaves, dense, 9).sum().backward()
        seconds.append(time.perf_counter() - began)
    assert seconds[1] > 3 * seconds[0]


def test_half_precision_stays_half_and_under_autocast_as_sdpa_does() -> None:
    document, positions = rows([[0] * 12])
    leaves = [torch.randn(1, 6, 12, 8, requires_grad=True) for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16):
        ours = mixed(Unrolled(document, positions, None), 2, leaves, False, 2)
        dense = mixed(Unrolled(document, positions, None), 2, leaves, True, 2)
    assert ours.dtype == dense.dtype == torch.bfloat16
    torch.testing.assert_close(ours, dense, rtol=2e-2, atol=2e-2)
    ours.float().sum().backward()
    assert all(one.grad is not None and one.grad.dtype == torch.float32 for one in leaves)
