"""Rows of p: found where they are stored, whole again after half precision, and free of what training does."""

import pytest
import torch

from distill.objectives.target_distribution import Dense, FullRows, HiddenRows, Sparse, SparseRows

INDEX = torch.tensor([2, -1, 0, 1])


def test_hidden_rows_give_p_through_the_head() -> None:
    hidden, weight = torch.randn(3, 4), torch.randn(7, 4)
    source = HiddenRows(hidden, lambda h: h @ weight.T, INDEX, temperature=0.5)
    distribution = source.chunk(torch.tensor([0, 2]))
    assert isinstance(distribution, Dense)
    expected = ((hidden[[2, 0]] @ weight.T) / 0.5).log_softmax(-1)
    assert torch.allclose(distribution.log_p, expected)
    assert source.num_rows == 4
    assert source.has(torch.arange(4)).tolist() == [True, False, True, True]
    with pytest.raises(AssertionError, match="without a record"):
        source.chunk(torch.tensor([1]))


def test_p_is_taken_at_temperature_1_unless_another_is_asked_for() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
    distribution = HiddenRows(logits, lambda h: h, torch.tensor([0])).chunk(torch.tensor([0]))
    assert isinstance(distribution, Dense)
    assert distribution.log_p.exp().tolist() == [pytest.approx([0.5, 0.25, 0.25])]


def test_a_distribution_of_all_tokens_serves_objectives_that_need_it() -> None:
    """reverse_kl and jsd are refused by this alone."""
    assert FullRows.is_dense
    assert HiddenRows.is_dense
    assert not SparseRows.is_dense


def test_the_target_s_head_is_not_trained_through_its_distribution() -> None:
    weight = torch.randn(7, 4, requires_grad=True)
    distribution = HiddenRows(torch.randn(3, 4), lambda h: h @ weight.T, INDEX).chunk(torch.tensor([0, 3]))
    assert isinstance(distribution, Dense)
    assert not distribution.log_p.requires_grad


def test_the_target_s_distribution_is_not_rounded_to_what_the_draft_is_trained_in() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(3, 64, generator=generator), torch.randn(7, 64, generator=generator)
    with torch.autocast("cpu", torch.bfloat16):
        distribution = HiddenRows(hidden, lambda h: h @ weight.T, INDEX).chunk(torch.tensor([2]))
    assert isinstance(distribution, Dense)
    expected = (hidden[:1].double() @ weight.double().T).log_softmax(-1)
    assert torch.allclose(distribution.log_p.double(), expected, atol=1e-4)


def test_logits_in_bfloat16_give_a_distribution_in_float32() -> None:
    logits = torch.tensor([[8.0, 7.5, -3.0, 2.0]], dtype=torch.bfloat16)
    distribution = HiddenRows(logits, lambda h: h, torch.tensor([0]), temperature=0.75).chunk(torch.tensor([0]))
    assert isinstance(distribution, Dense)
    assert distribution.log_p.dtype == torch.float32
    assert torch.allclose(distribution.log_p.double(), (logits.double() / 0.75).log_softmax(-1), atol=1e-5)


def test_full_rows_sum_to_1_again_after_half_precision() -> None:
    log_p = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)).log_softmax(-1).half()
    assert float((log_p.double().exp().sum(-1) - 1).abs().max()) > 1e-5
    distribution = FullRows(log_p, INDEX).chunk(torch.tensor([0, 2, 3]))
    assert isinstance(distribution, Dense)
    assert distribution.log_p.dtype == torch.float32
    assert torch.allclose(distribution.log_p.double().exp().sum(-1), torch.ones(3, dtype=torch.float64), atol=1e-6)
    assert torch.allclose(distribution.log_p, log_p[[2, 0, 1]].float(), atol=1e-3)


def test_sparse_rows_are_found_where_they_are_stored() -> None:
    ids, p = torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.tensor([[0.6, 0.1], [0.7, 0.2], [0.8, 0.1]])
    distribution = SparseRows(ids, p.log(), 2 * p, INDEX).chunk(torch.tensor([3, 0]))
    assert isinstance(distribution, Sparse)
    assert distribution.ids.tolist() == [[3, 4], [5, 6]]
    assert torch.equal(distribution.log_p, p[[1, 2]].log())
    assert torch.equal(distribution.weight, 2 * p[[1, 2]])
    nothing = SparseRows(ids, p.log(), p, INDEX).chunk(torch.tensor([], dtype=torch.long))
    assert isinstance(nothing, Sparse)
    assert nothing.ids.shape == (0, 2)
