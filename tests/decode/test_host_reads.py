"""Passes that look at values on the host are noticed, and run as they are; so are captures that change a result."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import JetMoeConfig, JetMoeForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from decode import generate
from decode.forward.capture import Trace, Uncapturable, capture, host_reads
from decode.forward.packing import Packing
from decode.forward.runner import CAPTURE_AFTER, Runner
from tests.tiny import tiny_llama


class Reads(nn.Module):
    """x (N,) -> a tensor made in one of the ways below."""

    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.way(x),)


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "tolist": lambda x: x + len(x.tolist()),
    "numpy": lambda x: x + int(x.numpy().sum()),
    "_local_scalar_dense": lambda x: x * 2 if x.sum() > 0 else x,
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(x > 1),
    "index": lambda x: x[x > 1],
    "repeat_interleave": lambda x: x.repeat_interleave(x),
    "_unique2": lambda x: x.unique(),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_of_values_is_named_and_never_captured(name: str) -> None:
    x = torch.arange(1, 4)
    assert name in host_reads(Reads(READS[name]), (x,))
    with pytest.raises(Uncapturable, match=name):
        capture(Reads(READS[name]), (x,), (x + 1,), Packing(nn.Module()))


def test_passes_of_shapes_alone_read_nothing() -> None:
    def way(x: Tensor) -> Tensor:
        return x.repeat_interleave(2)[: x.shape[0]].scatter(0, x - 1, x)[torch.arange(len(x))] + x.topk(1).values

    assert host_reads(Reads(way), (torch.arange(1, 4),)) == []


def jetmoe() -> PreTrainedModel:
    torch.manual_seed(0)
    config = JetMoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, kv_channels=8, num_key_value_heads=2,
        num_local_experts=3, num_experts_per_tok=2, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    return JetMoeForCausalLM(config).double().eval().requires_grad_(False)


def mixtral(experts: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    model = MixtralForCausalLM(config).eval().requires_grad_(False)
    model.set_experts_implementation(experts)
    return model


def uncached(model: PreTrainedModel, ids: Tensor, new: int) -> Tensor:
    for _ in range(new):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids


def runner_of(model: PreTrainedModel) -> Runner:
    (runner,) = vars(model)["_draftsmith_runners"]._kept.values()
    return runner


@pytest.mark.parametrize("make", [jetmoe, lambda: mixtral("eager")])
def test_experts_that_are_sorted_on_the_host_are_run_as_they_are(
    make: Callable[[], PreTrainedModel], caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    logging.getLogger("draftsmith").propagate = True
    ids = torch.tensor([[5, 9, 2], [33, 7, 60]])
    out = generate(model, None, ids, max_new_tokens=3 * CAPTURE_AFTER, temperature=0, eos_token_id=(), seed=0)
    assert torch.equal(out.sequences, uncached(model, ids, 3 * CAPTURE_AFTER))
    assert not any(isinstance(one, Trace) for one in runner_of(model)._passes.values())
    assert caplog.text.count("passes run uncaptured, which is slower: the model reads values") == 1


def test_grouped_experts_are_captured() -> None:
    model = mixtral("grouped_mm")
    ids = torch.tensor([[5, 9, 2]])
    out = generate(model, None, ids, max_new_tokens=3 * CAPTURE_AFTER, temperature=0, eos_token_id=(), seed=0)
    assert torch.equal(out.sequences, uncached(model, ids, 3 * CAPTURE_AFTER))
    assert any(isinstance(one, Trace) for one in runner_of(model)._passes.values())


def test_a_capture_that_has_baked_tokens_in_is_found_by_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a read goes unnoticed: the same tokens again would agree."""
    monkeypatch.setattr("decode.forward.capture.host_reads", lambda module, inputs: [])
    bakes = Reads(lambda x: x + sum(x.tolist()))
    with pytest.raises(Uncapturable, match="changes the result"):
        capture(bakes, (torch.arange(3),), (torch.arange(3) + 1,), Packing(nn.Module()))


@pytest.mark.parametrize("error", [RuntimeError, TypeError, IndexError])
def test_a_capture_that_breaks_when_it_is_used_is_not(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    class Breaks:
        def __init__(self, *args: object) -> None: ...

        def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
            raise error("Expected 3 elements in a list but found 2")

    monkeypatch.setattr("decode.forward.capture.Trace", Breaks)
    model = tiny_llama().requires_grad_(False)
    ids = torch.tensor([[5, 9, 2]])
    out = generate(model, None, ids, max_new_tokens=3 * CAPTURE_AFTER, temperature=0, eos_token_id=(), seed=0)
    assert torch.equal(out.sequences, uncached(model, ids, 3 * CAPTURE_AFTER))
