"""Models quantised as they are loaded: what is refused, that it happens, that rows stay apart, that output is equal."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from decode import generate, load_drafter
from decode.common.errors import ConfigError, InputError
from decode.config import DrafterConfig, ModelConfig, Scheme
from decode.drafters.saved_draft import describe_draft
from decode.forward import quantised_linear
from decode.forward.packing import Packing
from decode.forward.quantised_linear import FloatLinear, Int8DynamicLinear, Int8Linear, kind_of
from decode.forward.runner import captured_at_once
from decode.models.describe import describe_loaded, describe_model
from decode.models.fingerprint import weights_fingerprint
from decode.models.load import load_model
from decode.models.quantisation import torchao_schemes
from eval.modes.compare.drafters_config import DraftersConfig
from tests.decode.checks import VOCAB, ragged_prompts
from tests.tiers import by_default
from tests.tiny import save_tiny_target, tiny_llama
from tests.train.export.saved_heads import save_head, save_padded_target

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
SCHEMES: tuple[Scheme, ...] = ("int8", "int4", "int8_dynamic")
BYTES = {"int8": 1.3, "int4": 0.9, "int8_dynamic": 1.3}
"""At most so many for a weight, scales included (int4: one and a zero point of four bytes for 32 weights)."""
STEP = 1e-4
"""Far below what another scale does to logits, far above what another order of sums does in float32."""


@cache
def folder() -> Path:
    """A tiny target, whose layers int4 can take."""
    path = Path(mkdtemp()) / "target"
    tiny_llama(VOCAB, hidden_size=64).save_pretrained(path)
    return path


@cache
def quantised(scheme: Scheme) -> PreTrainedModel:
    """It in float32, quantised."""
    return load_model(ModelConfig(path=str(folder()), dtype="float32", quantization=scheme))


def layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Linear layers but the output head."""
    return {name: one for name, one in model.model.named_modules() if isinstance(one, nn.Linear)}  # type: ignore[union-attr]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_are_quantised_and_both_ends_are_not(scheme: Scheme) -> None:
    model = quantised(scheme)
    for layer in layers(model).values():
        weight: Any = layer.weight.data
        parts = [getattr(weight, name) for name in (*weight.tensor_data_names, "zero_point") if hasattr(weight, name)]
        assert sum(part.nbytes for part in parts if part is not None) / weight.numel() < BYTES[scheme]
    assert len(layers(model)) == 14
    assert all(type(one.weight.data) is Tensor for one in (model.lm_head, model.get_input_embeddings()))  # type: ignore[union-attr]
    ids = ragged_prompts(1)[0]
    plain = AutoModelForCausalLM.from_pretrained(folder())
    with torch.no_grad():
        moved = (model(ids).logits - plain(ids).logits).abs().max()
    assert 1e-3 < moved < 10


def check_rows_apart(scheme: Scheme = "int8_dynamic") -> None:
    """A row's logits, alone and beside others whose activations are a thousand times larger, by the model's own modules
    and by what a capture is made of."""
    pytest.importorskip("torchao")  # `mutants` calls this, too
    model = quantised(scheme)
    ids = torch.randint(0, VOCAB, (3, 9), generator=torch.Generator().manual_seed(0))
    states = model.get_input_embeddings()(ids)
    states[1:] *= 1000
    with torch.no_grad():
        for _ in range(2):
            alone, beside = model(inputs_embeds=states[:1]).logits[0], model(inputs_embeds=states).logits[0]
            assert (alone - beside).abs().max() < STEP
            with Packing(model).in_place():
                alone, beside = model(inputs_embeds=states[:1]).logits[0], model(inputs_embeds=states).logits[0]
            assert (alone - beside).abs().max() < STEP


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_row_does_not_depend_on_those_beside_it(scheme: Scheme) -> None:
    check_rows_apart(scheme)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_captures_run_gives_the_layer_s_own_result(scheme: Scheme, rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    pair = nn.Sequential(nn.Linear(64, 128), nn.Linear(64, 64)).to(dtype).requires_grad_(False)
    floating = kind_of(pair[0])  # type: ignore[arg-type]
    torchao_schemes.quantise(pair, scheme, torch.device("cpu"))
    kind, x = kind_of(pair[0]), torch.randn(2, rows, 64).to(dtype)  # type: ignore[arg-type]
    assert floating in (None, FloatLinear)
    assert kind is not None
    assert kind is not FloatLinear
    assert quantised_linear.can_join([*pair])  # type: ignore[list-item]
    wanted = torch.cat([layer(x) for layer in pair], -1)
    tolerance = 0 if kind is Int8DynamicLinear else 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(kind([*pair])(x), wanted, rtol=tolerance, atol=tolerance)  # type: ignore[list-item]


@pytest.mark.parametrize("width", [24, 40, 100])
@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic"])
def test_any_width_and_number_of_rows_gives_the_same(scheme: Scheme, width: int) -> None:
    """torch's kernel for int8 weights reads beyond widths that 16 does not divide, and rounds otherwise than others."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(width, 48)).bfloat16().requires_grad_(False)
    torchao_schemes.quantise(layer, scheme, torch.device("cpu"))
    kind, x = kind_of(layer[0]), torch.randn(9, width).bfloat16()  # type: ignore[arg-type]
    assert kind is not None
    packed = kind([layer[0]])  # type: ignore[list-item]
    every = packed(x)
    torch.testing.assert_close(every, layer(x), rtol=2**-6, atol=2**-6)
    for rows in (1, 2, 5):
        parted = (packed(x[:rows]) != every[:rows]).float().mean()
        assert parted < 0.02, "the same function for any number of rows, but for the order of sums"


@pytest.mark.parametrize("scheme", by_default(1, SCHEMES))
@pytest.mark.parametrize("temperature", by_default(1, [1.0, 0.0]))
def test_output_with_a_draft_is_output_without(scheme: Scheme, temperature: float) -> None:
    model, (ids, mask) = quantised(scheme), ragged_prompts(3)
    strict = scheme == "int8_dynamic"  # the last bit of a sum may move an activation by a whole step
    settings: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 24, "eos_token_id": (), "seed": 0}
    settings |= {"temperature": temperature, "strict": strict, "audit": True}
    plain = generate(model, None, ids, **settings).sequences
    for draft in (load_drafter(folder(), target=model, quantization="int8"), load_drafter(folder(), target=model)):
        out = generate(model, draft, ids, **settings)
        assert torch.equal(out.sequences, plain)
        assert out.stats.tau > 1.5


def test_an_arm_of_a_comparison_quantises_its_draft() -> None:
    arm = DraftersConfig(arms={"one": {"draft": str(folder()), "settings": {"quantization": "int8"}}}, draft_arms={})
    (way,) = arm.ways({})
    target = describe_model(ModelConfig(path=str(folder())))
    assert describe_draft(way.draft, target, settings=way.settings).fingerprint.endswith(" in int8")
    draft = load_drafter(way.draft, target=quantised("int8"), **way.settings)
    assert all(kind_of(layer) is Int8Linear for layer in layers(draft.model).values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", by_default(1, ["eagle3", "medusa"]))
def test_heads_are_quantised(family: str, tmp_path: Path) -> None:
    save_padded_target(tmp_path / "target", hidden_size=64)
    save_head(tmp_path / "head", tmp_path / "target", family)
    model = load_model(ModelConfig(path=str(tmp_path / "target")))
    plain = load_drafter(tmp_path / "head", target=model)
    draft = load_drafter(tmp_path / "head", target=model, quantization="int8")
    linears = [one for one in draft.modules() if isinstance(one, nn.Linear)]  # type: ignore[attr-defined]
    assert linears
    assert all(kind_of(one) is Int8Linear for one in linears)
    assert type(model.lm_head.weight.data) is Tensor  # type: ignore[union-attr]
    ids, settings = ragged_prompts(1)[0], {"max_new_tokens": 12, "seed": 0, "eos_token_id": ()}
    texts = [generate(model, one, ids, **settings).sequences for one in (draft, plain, None)]  # type: ignore[arg-type]
    assert torch.equal(texts[0], texts[2])
    assert torch.equal(texts[1], texts[2])


def test_passes_are_captured(caplog: pytest.LogCaptureFixture) -> None:
    model = quantised("int8_dynamic")
    with captured_at_once():
        generate(model, load_drafter(folder(), target=model), ragged_prompts(1)[0], max_new_tokens=4)
    assert "uncaptured" not in caplog.text


def test_a_quantised_model_has_an_identity_of_its_own() -> None:
    described = {one: describe_model(ModelConfig(path=str(folder()), quantization=one)) for one in (None, *SCHEMES)}
    assert len({one.identity for one in described.values()}) == 4
    assert len({one.fingerprint for one in described.values()}) == 1
    prints = {weights_fingerprint(quantised(one)) for one in SCHEMES}
    assert len({str(one).partition(":")[0] for one in prints}) == 3
    assert describe_loaded(quantised("int4")).quantization == "int4"


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no kernel": (
        lambda path: describe_model(ModelConfig(path=str(path), dtype="float64", quantization="int8")),
        "target.quantization=int8 does not run here, on cpu in torch.float64: .*float64",
    ),
    "sizes": (
        lambda path: describe_model(ModelConfig(path=str(_narrow(path)), quantization="int4")),
        "int4 shares a scale among 32 weights .* of target.path=.* is 48 x 48",
    ),
    "twice": (
        lambda path: describe_model(ModelConfig(path=str(_gptq(path)), quantization="int8")),
        "target.quantization=int8, and target.path=.*quantised already by gptq",
    ),
    "no folder": (
        lambda path: load_drafter("ngram", target=tiny_llama(VOCAB), quantization="int8"),
        "quantization=int8 rounds the weights of a draft .*'ngram' is none",
    ),
    "no such scheme": (
        lambda path: load_drafter(path, target=tiny_llama(VOCAB), quantization=cast(Any, "int9")),
        "quantization='int9' is no scheme; use one of int8, int4, int8_dynamic",
    ),
    "no draft": (
        lambda path: DrafterConfig(path="ngram", quantization="int8"),
        "draft.quantization=int8 .* draft.path=ngram has none",
    ),
}


def _narrow(path: Path) -> Path:
    tiny_llama(VOCAB, hidden_size=48).save_pretrained(path / "narrow")
    return path / "narrow"


def _gptq(path: Path) -> Path:
    model = tiny_llama(VOCAB)
    model.save_pretrained(path / "gptq")
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}  # type: ignore[assignment]
    model.config.save_pretrained(path / "gptq")
    return path / "gptq"


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_quantised_is_refused_before_weights_are_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, words = REFUSED[name]
    save_tiny_target(tmp_path, num_layers=1)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights are read"))
    with pytest.raises((ConfigError, InputError), match=words):
        make(tmp_path)


def test_torchao_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.common.extras.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"target.quantization=int8 needs the package torchao.*draftsmith\[quantiz"):
        describe_model(ModelConfig(path=str(folder()), quantization="int8"))
