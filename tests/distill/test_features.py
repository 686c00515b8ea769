"""Codes of hidden states: what comes back, how far it is off, and what it costs."""

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from decode.common.errors import InputError
from distill.config import FeatureCodeName, FeatureConfig
from distill.records.feature_codes import CODES, FeatureCode, FeatureLayout, grid_of, off_grid, on_grid
from distill.records.feature_fitting import LONG, calibrate, code_bytes
from distill.records.record_shards import Record
from distill.target_passes import ModelPasses
from tests.tiny import tiny_llama

LAYERS, WIDTH = [2, 0, -1], 24
CPU = torch.device("cpu")


def states_of(seed: int, tokens: int = 600) -> Tensor:  # (N, n, d)
    """Correlated channels, layers of unlike length, one channel large in every token, and noise."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(10, len(LAYERS) * WIDTH, generator=torch.Generator().manual_seed(0))
    rows = torch.randn(tokens, 10, generator=generator) @ mixing
    rows += 0.1 * torch.randn(rows.shape, generator=generator)
    states = rows.unflatten(1, (len(LAYERS), WIDTH)) * torch.tensor([0.1, 1.0, 20.0])[:, None]
    states[:, 1, 5] += 300
    return states


def fitted(code: FeatureCodeName, states: Tensor, **options: int) -> FeatureCode:
    layout = FeatureLayout.of(FeatureConfig(LAYERS, code, **options), WIDTH)
    assert layout is not None
    return CODES[code](layout, load(code_bytes(layout, states, CPU)) if layout.is_fitted else {})


def test_bf16_keeps_the_bits() -> None:
    states = states_of(1).bfloat16()
    code = fitted("bf16", states)
    assert torch.equal(code.decode(code.encode(states), LAYERS), states)
    assert not code.squared_errors(states, code.encode(states)).any()


@pytest.mark.parametrize("code", ["bf16", "int8", "pca"])
def test_some_layers_are_read_without_the_others(code: FeatureCodeName) -> None:
    """In any order, from no more arrays than they need, with the same values as together."""
    states = states_of(1)
    one = fitted(code, states)
    arrays = one.encode(states)
    assert {name: (tuple(array.shape[1:]), array.numpy().dtype) for name, array in arrays.items()} == one.layout.shapes
    together = one.decode(arrays, LAYERS)
    for layers, places in (([-1, 2], [2, 0]), ([0], [1])):
        needed = {name: arrays[name] for name in one.layout.names_of(layers)}
        torch.testing.assert_close(one.decode(needed, layers), together[:, places], rtol=1e-2, atol=1e-3)
    assert one.layout.names_of([]) == []


def test_int8_errs_by_half_a_step_of_the_channel() -> None:
    seen, unseen = states_of(1), states_of(2)
    code = fitted("int8", seen)
    for states, is_seen in ((seen, True), (unseen, False)):
        arrays = code.encode(states)
        stretch = torch.stack([arrays[f"features.{layer}.stretch"] for layer in LAYERS], 1).float()
        error = (code.decode(arrays, LAYERS, torch.float32) - states).abs()
        bound = stretch[..., None] * code.fitted["step"] / 2
        assert (error <= bound * 1.01 + 1e-5 * states.abs()).all()
        assert (stretch == 1).all() == is_seen
        assert stretch.max() < 2
    spread = seen.amax(0) - seen.amin(0)
    torch.testing.assert_close(code.fitted["step"], spread / 254)  # of each channel, its offset set aside


def test_a_token_beyond_all_others_costs_them_nothing_and_is_kept() -> None:
    plain, odd = states_of(1), states_of(1)
    odd[::60, 2, 3] = 9000.0
    for name in ("int8", "pca"):
        code = fitted(name, odd)
        errors = code.squared_errors(odd, code.encode(odd)).sqrt()
        before = fitted(name, plain)
        usual = before.squared_errors(plain, before.encode(plain)).sqrt().mean()
        assert errors[::60, 2].max() < 0.02
        others = torch.arange(len(odd)) % 60 > 0
        assert errors[others].mean() < 1.3 * usual


def test_the_error_of_pca_is_the_dropped_variance_and_that_of_the_grid() -> None:
    """|y - y_hat|^2 = |y|^2 - |z|^2 + |z - z_hat|^2, and the first difference is the sum of the least eigenvalues."""
    states = states_of(1)
    code = fitted("pca", states, components=7)
    y = code.standardised(states).double()  # type: ignore[attr-defined]
    assert (y.norm(dim=-1) < LONG * y.norm(dim=-1).median()).all()  # else its row would have counted less in the fit
    torch.testing.assert_close(y.mean(0), torch.zeros_like(y[0]), atol=1e-4, rtol=0)
    dropped = torch.linalg.eigvalsh(y.T @ y)[:-7].sum()
    basis = code.fitted["basis"].double()
    torch.testing.assert_close(basis @ basis.T, torch.eye(7, dtype=torch.float64), atol=1e-5, rtol=0)
    decoded = code.decode(code.encode(states), LAYERS, torch.float32)
    y_hat = code.standardised(decoded).double()  # type: ignore[attr-defined]
    of_grid = (y @ basis.T - y_hat @ basis.T).square().sum()
    torch.testing.assert_close((y - y_hat).square().sum(), dropped + of_grid, rtol=1e-3, atol=0)
    assert of_grid < 0.01 * dropped
    wider = fitted("pca", states, components=10)  # as many as there are causes: what is left is noise
    assert wider.squared_errors(states, wider.encode(states)).mean() < 0.05


@pytest.mark.parametrize(("code", "size"), [("bf16", 30_720), ("int8", 15_372), ("pca", 2_562)])
def test_bytes_a_token(code: FeatureCodeName, size: int) -> None:
    """Five layers and the final state of a Qwen3-4B: n d 2, n (d + 2), n d / 6 + 2."""
    layout = FeatureLayout.of(FeatureConfig([1, 9, 17, 25, 33, -1], code), 2560)
    assert layout is not None
    assert layout.bytes_per_token == size


def test_too_few_tokens_for_the_components_are_refused() -> None:
    with pytest.raises(InputError, match="have 12 tokens, and 12 components were asked for"):
        fitted("pca", states_of(1, tokens=12))
    assert fitted("pca", states_of(1, tokens=13)).fitted["basis"].shape == (12, 72)


def test_a_row_within_the_grid_is_rounded_and_one_beyond_it_stretched() -> None:
    middle, step = torch.tensor([0.0, 10.0, 0.0]), torch.tensor([1.0, 0.5, 2.0])
    rows = torch.tensor([[100.0, 10.2, -3.2], [-254.0, 12.0, 3.6]])
    codes, stretch = on_grid(rows, middle, step)
    assert codes.tolist() == [[100, 0, -2], [-127, 2, 1]]
    assert stretch.tolist() == [1.0, 2.0]
    assert (codes.dtype, stretch.dtype) == (torch.int8, torch.float16)
    assert off_grid(codes, stretch, middle, step).tolist() == [[100.0, 10.0, -4.0], [-254.0, 12.0, 4.0]]


def test_a_grid_reaches_from_the_least_to_the_most_and_is_never_too_fine() -> None:
    """127 steps to each side; the third channel hardly moved, and gets a hundredth of the median step."""
    grid = grid_of(torch.tensor([-127.0, 0.0, 7.0]), torch.tensor([127.0, 508.0, 7.0]))
    assert grid["middle"].tolist() == [0.0, 254.0, 7.0]
    assert grid["step"].tolist() == pytest.approx([1.0, 2.0, 0.01])


def test_an_error_is_weighed_against_the_deviation_from_the_mean() -> None:
    """bfloat16 does not hold 257: 256 is kept, off by 1 where the token deviates by 2 from the mean."""
    layout = FeatureLayout([0, 4], 2, "bf16", 0)
    code = CODES["bf16"](layout, {"mean": torch.tensor([[255.0, 3.0], [0.0, 0.0]])})
    states = torch.tensor([[[257.0, 3.0], [3.0, 4.0]]])
    assert code.squared_errors(states, code.encode(states)).tolist() == [[1 / 4, 0.0]]


ORDINARY = torch.tensor([[3.0, 4.0], [3.0, -4.0], [-3.0, 4.0], [-3.0, -4.0]])


@pytest.mark.parametrize(("length", "reach"), [(17.5, 17.5), (22.5, 4.0)])
def test_a_channel_reaches_as_far_as_ordinary_tokens_do(length: float, reach: float) -> None:
    """All but one token are 5 long; 3.5 times that is ordinary, 4.5 times is not."""
    states = torch.cat([ORDINARY, ORDINARY, torch.tensor([[0.0, length]])])[:, None]
    code = load(code_bytes(FeatureLayout([0], 2, "int8", 0), states, CPU))
    assert code["step"][0].tolist() == pytest.approx([6 / 254, (4 + reach) / 254])
    assert code["middle"][0].tolist() == pytest.approx([0.0, (reach - 4) / 2])
    assert code["mean"][0].tolist() == pytest.approx([0.0, 17.5 / 9 if reach == length else 0.0])


def test_layers_count_alike_however_long_their_states_are() -> None:
    """The spread is that of ordinary tokens: sqrt((4 * 9 + 4 * 16) / 8) = sqrt(12.5), and ten times that."""
    layer = torch.cat([ORDINARY, torch.tensor([[300.0, 400.0]])])
    code = load(code_bytes(FeatureLayout([0, 1], 2, "pca", 1), torch.stack([layer, 10 * layer + 7], 1), CPU))
    assert code["spread"].tolist() == pytest.approx([12.5**0.5, 10 * 12.5**0.5])
    torch.testing.assert_close(code["mean"], torch.tensor([[0.0, 0.0], [7.0, 7.0]]))


def test_a_code_is_fitted_to_no_more_tokens_than_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of 6 tokens each: the first two begin among the first 10 tokens, the third does not."""
    monkeypatch.setattr("distill.records.feature_fitting.MOST_TOKENS", 10)
    layout, target = FeatureLayout([0], 32, "int8", 0), tiny_llama()
    texts = [Record(np.arange(6) + 6 * n, np.ones(6, dtype=bool), {"document": str(n)}) for n in range(3)]
    fits = [load(calibrate(layout, texts[:count], ModelPasses(target, [0], 2)))["mean"][0] for count in (1, 2, 3)]
    assert torch.equal(fits[1], fits[2])
    embeddings = target.model.embed_tokens.weight.detach()
    torch.testing.assert_close(fits[0], embeddings[:6].mean(0))
    torch.testing.assert_close(fits[1], embeddings[:10].mean(0))
