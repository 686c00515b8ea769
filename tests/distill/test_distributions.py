"""p as it is recorded: sparse estimates are unbiased by enumeration, and rows leave their stores as they came in."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distill.objectives.row_losses import acceptance, forward_kl, tv
from distill.objectives.target_distribution import Dense, FullRows, HiddenRows, Sparse, SparseRows
from distill.records import head_tail as sparse
from distill.records.distribution_stores import Layout

P = torch.tensor([0.36, 0.05, 0.3, 0.02, 0.15, 0.12], dtype=torch.float64)


def every_tail(head: int, draws: int) -> list[tuple[float, Sparse]]:
    """Every record of p that `draws` tail draws can give, with its probability; p_hat and log p are not coded."""
    head_ids = P.topk(head).indices
    tail_ids = [v for v in range(len(P)) if v not in head_ids.tolist()]
    mass = P[tail_ids].sum()
    found = []
    for drawn in product(tail_ids, repeat=draws):
        ids = torch.cat([head_ids, torch.tensor(drawn)])
        weight = torch.cat([P[head_ids], (mass / draws).expand(draws)])
        chance = float((P[list(drawn)] / mass).prod())
        found.append((chance, Sparse(ids[None], P[ids].log()[None], weight[None])))
    return found


@pytest.mark.parametrize(("head", "draws"), [(2, 1), (2, 3), (3, 2)])
def test_acceptance_and_forward_kl_are_unbiased_over_every_tail_draw(head: int, draws: int) -> None:
    logits = torch.tensor([[0.3, -1.0, 0.8, 1.2, -0.4, 0.1]], dtype=torch.float64)
    nothing = torch.zeros(1, dtype=torch.long)
    log_q, dense = logits.log_softmax(-1), Dense(P.log()[None])
    for objective in (forward_kl, tv):
        expected = torch.zeros(2, dtype=torch.float64)
        expected_gradient = torch.zeros_like(logits)
        for chance, distribution in every_tail(head, draws):
            q = logits.clone().requires_grad_()
            loss = objective(q.log_softmax(-1), distribution, nothing)
            loss.sum().backward()
            assert q.grad is not None
            expected += chance * torch.stack([loss.detach().sum(), acceptance(log_q, distribution).sum()])
            expected_gradient += chance * q.grad
        exact = logits.clone().requires_grad_()
        loss = objective(exact.log_softmax(-1), dense, nothing)
        loss.sum().backward()
        assert torch.allclose(expected, torch.stack([loss.detach().sum(), acceptance(log_q, dense).sum()]), atol=1e-12)
        assert exact.grad is not None
        assert torch.allclose(expected_gradient, exact.grad, atol=1e-12)


def test_a_renormalised_top_k_is_biased_where_head_and_tail_is_not() -> None:
    log_q = torch.tensor([[0.3, -1.0, 0.8, 1.2, -0.4, 0.1]], dtype=torch.float64).log_softmax(-1)
    ids = P.topk(2).indices
    renormalised = Sparse(ids[None], (P[ids] / P[ids].sum()).log()[None], (P[ids] / P[ids].sum())[None])
    exact = acceptance(log_q, Dense(P.log()[None]))
    assert abs(float(acceptance(log_q, renormalised) - exact)) > 0.05


def test_tail_draws_follow_p_over_the_tail() -> None:
    """A fine grid of uniforms gives each tail token its share of p."""
    n = 100_000
    grid = ((torch.arange(n, dtype=torch.float64) + 0.5) / n)[None]
    head = P.topk(2).indices[None]
    ids, mass = sparse.draw_tail(P.float().log()[None], head, grid)
    share = torch.bincount(ids[0], minlength=len(P)) / n
    tail = P.clone()
    tail[head[0]] = 0
    assert float(mass) == pytest.approx(float(tail.sum()), abs=1e-6)
    assert torch.allclose(share.double(), tail / tail.sum(), atol=2e-5)


def test_the_largest_uniform_and_zero_probabilities_are_never_a_forbidden_token() -> None:
    log_p = torch.tensor([[0.7, 0.0, 0.2, 0.0, 0.1, 0.0]]).log()
    uniforms = torch.tensor([[0.0, 1 - 2.0**-53, 0.5, 1 - 2.0**-25]], dtype=torch.float64)
    ids, _ = sparse.draw_tail(log_p, torch.tensor([[0]]), uniforms)
    assert set(ids[0].tolist()) <= {2, 4}


def tails(rows: int, vocab_size: int, spread: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log p, head ids, uniforms of 64 draws)."""
    generator = torch.Generator().manual_seed(round(spread))
    log_p = (spread * torch.randn(rows, vocab_size, generator=generator)).log_softmax(-1)
    uniforms = torch.rand(rows, 64, generator=generator, dtype=torch.float64)
    return log_p, log_p.topk(8).indices, uniforms


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0, 12.0])
@pytest.mark.parametrize("vocab_size", [300, 50_000])
def test_tails_are_those_of_every_folder_written_so_far(
    monkeypatch: pytest.MonkeyPatch, vocab_size: int, spread: float
) -> None:
    """On a CPU, where a sum of fp32 numbers is kept in fp64 and rounded at the end."""
    given = tails(20, vocab_size, spread)
    now = sparse.draw_tail(*given)
    monkeypatch.setattr(sparse, "running_sum", lambda p: p.cumsum(-1))
    for ours, theirs in zip(now, sparse.draw_tail(*given), strict=True):
        assert torch.equal(ours, theirs)


def test_a_tail_is_summed_in_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which add up alike in any order: on a GPU a float cumsum differs from run to run."""

    def integers_alone(name: str) -> Any:
        plain = getattr(torch.Tensor, name)

        def checked(values: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
            assert not values.is_floating_point()
            return plain(values, *rest, **named)

        return checked

    for name in ("cumsum", "cumsum_"):
        monkeypatch.setattr(torch.Tensor, name, integers_alone(name))
    monkeypatch.setattr(torch, "cumsum", lambda *_: pytest.fail("a float cumsum"))
    sparse.encode(tails(3, 300, 4.0)[0], 8, torch.rand(3, 4, dtype=torch.float64))


def test_a_running_sum_never_falls_and_knows_empty_rows() -> None:
    """Of tails of any size, down to none at all."""
    p = torch.stack([10.0**-power * torch.rand(1000).pow(8) for power in (0, 3, 9, 20, 37)] + [torch.zeros(1000)])
    found = sparse.running_sum(p)
    assert (found.diff(dim=-1) >= 0).all()
    torch.testing.assert_close(found[:4].double(), p[:4].double().cumsum(-1), rtol=1e-6, atol=0.0)
    assert (found[-1] == 0).all()
    assert torch.isfinite(found).all()


def test_a_record_holds_log_p_to_half_a_percent() -> None:
    torch.manual_seed(0)
    log_p = (3 * torch.randn(50, 300)).log_softmax(-1)
    ids, kept, weight = sparse.decode(sparse.encode(log_p, 8, torch.rand(50, 4, dtype=torch.float64)), 8, 4)
    exact = log_p.gather(-1, ids)
    assert float(((kept - exact).exp() - 1).abs().max()) <= 0.005
    assert torch.allclose(weight[:, :8], exact[:, :8].exp(), rtol=0.005)
    tail_mass = 1 - exact[:, :8].exp().sum(-1)
    assert torch.allclose(weight[:, 8:].sum(-1), tail_mass, rtol=0.006, atol=1e-6)


@pytest.mark.parametrize("vocab_size", [3, 8, 9])
def test_a_vocabulary_no_larger_than_the_head_has_no_tail(vocab_size: int) -> None:
    log_p = torch.randn(5, vocab_size).log_softmax(-1)
    ids, kept, weight = sparse.decode(sparse.encode(log_p, 8, torch.rand(5, 4, dtype=torch.float64)), 8, 4)
    assert int(ids.max()) < vocab_size
    assert torch.isfinite(kept).all()
    assert torch.allclose(weight.sum(-1), torch.ones(5), atol=0.006)


def test_a_one_hot_distribution_is_kept_without_nan() -> None:
    log_p = torch.full((1, 40), -200.0)
    log_p[0, 7] = 0.0
    ids, kept, weight = sparse.decode(sparse.encode(log_p, 8, torch.rand(1, 4, dtype=torch.float64)), 8, 4)
    assert torch.isfinite(kept).all()
    assert ids[0, 0] == 7
    assert weight[0].tolist() == [1.0] + [0.0] * 11


@given(st.integers(0, 5), st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_codes_survive_packing(rows: int, columns: int, seed: int) -> None:
    """Also of no rows: a batch in which nothing is learned."""
    codes = np.random.default_rng(seed).integers(0, 4096, (rows, columns))
    assert sparse.unpack_codes(sparse.pack_codes(codes)).shape == (rows, columns + columns % 2)
    assert (sparse.unpack_codes(sparse.pack_codes(codes))[:, :columns] == codes).all()


@pytest.mark.parametrize(("vocab_size", "width"), [(100, 2), (65_536, 2), (65_537, 3), (151_936, 3)])
def test_ids_survive_packing(vocab_size: int, width: int) -> None:
    ids = np.array([[0, 1, vocab_size - 1], [vocab_size // 2, 255, 99]])
    packed = sparse.pack_ids(ids, vocab_size)
    assert (sparse.unpack_ids(packed) == ids).all()
    assert packed.nbytes == ids.size * width


@pytest.mark.parametrize(("vocab_size", "size"), [(4096, 48), (151_936, 61)])
def test_head_and_tail_take_at_most_64_bytes_a_token(vocab_size: int, size: int) -> None:
    """The token's id and mask, twelve ids of 2 or 3 bytes, and 13 codes of a byte and a half each."""
    layout = Layout(["head_tail"], vocab_size, 512, "bfloat16", head=8, tail=4, topk=64)
    assert layout.bytes_per_token == size


def test_the_codes_of_log_p_are_those_of_every_folder_written_so_far() -> None:
    """102 to the nat, rounded; the last code stands for everything below exp(-40)."""
    log_p = torch.tensor([0.0, -1.0, -0.0146, -0.0148, -40.0, -50.0, -torch.inf])
    assert sparse.code(log_p).tolist() == [0, 102, 1, 2, 4080, 4095, 4095]
    packed = sparse.pack_codes(np.array([[0xABC, 0x123, 0x00F]]))
    assert packed.tolist() == [[0xAB, 0xC1, 0x23, 0x00, 0xF0, 0x00]]
    assert sparse.pack_ids(np.array([[0x0BCDEF]]), 1 << 20).tolist() == [[[0xEF, 0xCD, 0x0B]]]


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
    for temperature in (1.0, 0.75):
        distribution = HiddenRows(logits, lambda h: h, torch.tensor([0]), temperature).chunk(torch.tensor([0]))
        assert isinstance(distribution, Dense)
        assert distribution.log_p.dtype == torch.float32
        assert torch.allclose(distribution.log_p.double(), (logits.double() / temperature).log_softmax(-1), atol=1e-5)


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
