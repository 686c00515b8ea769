"""Packed linear layers: the same products, in place only while a capture is made."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from decode.forward.packed_linear import PackedLinear, Packing
from tests.tiny import tiny_llama

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN is not in this build")


@needs_onednn
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_packed_products_are_those_of_the_layer(rows: int) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(48, 33), torch.randn(2, rows, 48)
    torch.testing.assert_close(PackedLinear(layer)(x), layer(x))


@needs_onednn
def test_packed_layers_leave_when_the_capture_is_made() -> None:
    model = tiny_llama()
    own = dict(model.named_modules())
    packing = Packing(model)
    with packing.in_place():
        packed = [name for name, module in model.named_modules() if isinstance(module, PackedLinear)]
    assert packed == [name for name, module in own.items() if type(module) is nn.Linear]
    assert all(own[name] is module for name, module in model.named_modules())


def test_layers_that_the_kernels_do_not_know_stay() -> None:
    model = tiny_llama(dtype=torch.float64)
    with Packing(model).in_place():
        assert not any(isinstance(module, PackedLinear) for module in model.modules())
