"""Stores: rows that go in come out again, in the precision that is promised."""

import numpy as np
import pytest
import torch

from distill.objectives.target_distribution import Dense, Sparse
from distill.records.distribution_stores import Layout

ROWS = torch.arange(3)
UNIFORMS = torch.tensor([[0.1, 0.9], [0.5, 0.2], [0.3, 0.6]], dtype=torch.float64)


def layout(dtype: str = "float32") -> Layout:
    return Layout(["full"], 6, 4, dtype, head=2, tail=2, topk=3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_hidden_states_come_back_to_the_bit(dtype: str) -> None:
    hidden = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    store = layout(dtype).store_named("last_hidden")
    found = store.distribution(store.encode(hidden, None, UNIFORMS), ROWS, lambda states: states.double()).chunk(ROWS)
    assert isinstance(found, Dense)
    expected = hidden.float().log_softmax(-1)
    assert torch.equal(found.log_p, expected)


def test_probabilities_too_small_for_a_half_are_kept_finite() -> None:
    log_p = torch.tensor([[0.0, -torch.inf, -1e6, -9.0, -torch.inf, -20.0]])
    store = layout().store_named("full")
    arrays = store.encode(torch.zeros(1, 4), log_p, UNIFORMS[:1])
    assert np.isfinite(arrays["full.log_p"]).all()
    found = store.distribution(arrays, torch.tensor([0]), None).chunk(torch.tensor([0]))
    assert isinstance(found, Dense)
    assert torch.isfinite(found.log_p).all()
    assert found.log_p[0, 3].item() == pytest.approx(-9.0, abs=0.01)


@pytest.mark.parametrize(("name", "shapes"), [("head_tail", [(4,), (9,)]), ("topk", [(3,), (6,)])])
def test_sparse_rows_have_the_shapes_that_are_planned(name: str, shapes: list[tuple[int, ...]]) -> None:
    """Four ids and the codes of five numbers (the tail's mass is one); three ids and the codes of three."""
    log_p = torch.randn(3, 6, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    store = layout().store_named(name)
    arrays = store.encode(torch.zeros(3, 4), log_p, UNIFORMS)
    assert [array.shape[1:] for array in arrays.values()] == shapes == [shape for shape, _ in store.shapes.values()]
    assert [array.dtype for array in arrays.values()] == [np.uint16, np.uint8]
    distribution = store.distribution(arrays, ROWS, None).chunk(ROWS)
    assert isinstance(distribution, Sparse)
    head = log_p.topk(2).indices
    assert torch.equal(distribution.ids[:, :2], head)
    if name == "topk":
        kept = log_p.topk(3).values.exp()
        assert torch.allclose(distribution.weight, kept, rtol=0.006)  # not renormalised
    else:
        mass = 1 - log_p.gather(-1, head).exp().sum(-1, keepdim=True)
        assert torch.allclose(distribution.weight[:, 2:], (mass / 2).expand(-1, 2), rtol=0.01)


def test_each_row_is_drawn_from_with_its_own_uniforms() -> None:
    """p is alike in all rows; a small uniform gives the tail's first token, a large one its last."""
    log_p = torch.tensor([[0.4, 0.3, 0.1, 0.1, 0.05, 0.05]]).log().expand(3, -1)
    uniforms = torch.tensor([[0.01, 0.99], [0.99, 0.5], [0.4, 0.01]], dtype=torch.float64)
    arrays = layout().store_named("head_tail").encode(torch.zeros(3, 4), log_p, uniforms)
    assert arrays["head_tail.ids"][:, 2:].tolist() == [[2, 5], [5, 3], [3, 2]]
