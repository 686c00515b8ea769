"""CUDA graphs without a GPU: what a replay holds on to, which device is recorded, and what running out of memory is."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decode import generate
from decode.forward.capture import Graph, Uncapturable, _capture_stream, capture
from decode.forward.packing import Packing
from tests.decode.checks import ragged_prompts
from tests.decode.heads import random_head
from tests.tiny import tiny_llama


class Pass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slots = torch.arange(4)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x + self.slots,)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """A backend that records nothing; the devices that were made current, while something was recorded."""
    current: list[object] = []
    recorded: list[object] = []

    @contextmanager
    def device(one: object) -> Iterator[None]:
        current.append(one)
        yield
        current.pop()

    def graph(*args: object, **kwargs: object) -> Any:
        recorded.extend(current)
        assert kwargs["stream"] is stream, "torch's own lies on the device that captured first"
        return nullcontext()

    stream = SimpleNamespace(wait_stream=lambda other: None)
    _capture_stream.cache_clear()
    for name, stub in {
        "Stream": lambda *device: stream,
        "current_stream": lambda: stream,
        "stream": lambda one: nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "graph": graph,
        "device": device,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    yield recorded
    _capture_stream.cache_clear()


def test_a_replay_holds_the_module_whose_tensors_it_reads(devices: list[object]) -> None:
    """Freed, their memory is given to others, and the replay reads what they wrote."""
    module = Pass()
    slots = weakref.ref(module.slots)
    replay = Graph(module, (torch.zeros(4),), None)
    del module
    gc.collect()
    assert slots() is not None
    assert replay(torch.ones(4))[0].tolist() == [0, 1, 2, 3]  # the stub recorded nothing: results as they were
    del replay
    gc.collect()
    assert slots() is None


def test_the_device_of_the_inputs_is_recorded(devices: list[object]) -> None:
    Graph(Pass(), (torch.zeros(4),), None)
    assert devices == [torch.device("cpu")]


def test_running_out_of_memory_is_not_read_as_uncapturable(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("decode.forward.capture.Trace", full)
    with pytest.raises(torch.OutOfMemoryError):
        capture(Pass(), (torch.zeros(4),), (torch.ones(4),), Packing(nn.Module()))


def test_a_model_over_several_devices_is_not_captured() -> None:
    model = tiny_llama()
    model.model.layers[1].to("meta")
    with pytest.raises(Uncapturable, match="several devices \\(cpu, meta\\)"):
        capture(model, (torch.zeros(1, 1),), (torch.zeros(1, 1),), Packing(nn.Module()))


ULP = 2.0**-7
"""Of bfloat16, relative to the largest score."""


class Draws(nn.Module):
    """x (B, d) -> the likeliest token of each row, the likeliest three, and the scores; what was read is kept."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(8, 32, bias=False, dtype=torch.bfloat16)
        self.cache = torch.zeros(2, 8)
        self.written = (self.cache,)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        self.cache.copy_(x)
        scores = self.head(x.bfloat16()).float()
        return scores.argmax(-1, keepdim=True), scores.topk(3).indices, scores

    def tied(self, gap: float) -> Draws:
        """The first two tokens are the likeliest, `gap` ulps apart, and the others follow with a margin."""
        with torch.no_grad():
            self.head.weight.copy_(0.76 - 0.03 * torch.arange(32)[:, None])
            self.head.weight[:2] = 1.0
            self.head.weight[1] -= gap * ULP
        return self


def replayed(monkeypatch: pytest.MonkeyPatch, module: nn.Module, change: Any) -> Any:
    """`module` captured on a card whose graphs give what `change` makes of the module's own results."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    made = lambda module, inputs, pool: lambda *given: change(*module(*given))  # noqa: E731
    monkeypatch.setattr("decode.forward.capture.Graph", made)
    inputs = (torch.ones(2, 8), 2 * torch.ones(2, 8))
    return capture(module, inputs[:1], inputs[1:], Packing(nn.Module()))


def swapped(first: Tensor, three: Tensor, scores: Tensor) -> tuple[Tensor, ...]:
    return 1 - first, three[:, [1, 0, 2]], scores


def off_by(ulps: float) -> Any:
    return lambda first, three, scores: (first, three, scores + ulps * ULP * scores.abs().max())


def test_a_graph_may_round_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries may choose other kernels inside a graph: scores an ulp apart, and another token at a near-tie."""
    assert replayed(monkeypatch, Draws().tied(30), off_by(1))
    assert replayed(monkeypatch, Draws().tied(1), swapped)


@pytest.mark.parametrize(
    ("gap", "change"),
    [
        (30, swapped),  # of two that are not near
        (1, lambda first, three, scores: (first, three[:, [0, 2, 1]], scores)),
        (30, off_by(8)),
        (1, lambda first, three, scores: (first, three, scores.roll(1, -1))),
    ],
)
def test_a_graph_that_gives_other_results_is_refused(monkeypatch: pytest.MonkeyPatch, gap: float, change: Any) -> None:
    with pytest.raises(Uncapturable, match="changes the result"):
        replayed(monkeypatch, Draws().tied(gap), change)


@pytest.mark.parametrize(("apart", "is_taken"), [(0.0, True), (2**-8, True), (0.5, False)])
def test_what_a_graph_writes_is_compared(monkeypatch: pytest.MonkeyPatch, apart: float, is_taken: bool) -> None:
    module = Draws()

    def writes(*found: Tensor) -> tuple[Tensor, ...]:
        module.cache[1] += apart
        return found

    if is_taken:
        assert replayed(monkeypatch, module, writes)
    else:
        with pytest.raises(Uncapturable, match="changes the result"):
            replayed(monkeypatch, module, writes)


@pytest.mark.parametrize("loses", [None, "keys", "values"])
def test_keys_and_values_that_a_graph_writes_are_compared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, loses: str | None
) -> None:
    """A graph of a whole pass, of which one layer's keys are lost after they were read."""
    model = tiny_llama().requires_grad_(False)
    ids, _ = ragged_prompts(1)
    draft = random_head("eagle3", model)

    def made(module: nn.Module, inputs: tuple[Tensor, ...], pool: Any) -> Any:
        def replay(*given: Tensor) -> tuple[Tensor, ...]:
            found = module(*given)
            runner = draft.runner
            if loses is not None and runner.cache.num_slots:
                getattr(runner.cache.slot_layers[0], loses).zero_()
            return found

        return replay

    logging.getLogger("draftsmith").propagate = True
    plain = generate(model, None, ids, max_new_tokens=24, eos_token_id=(), seed=0).sequences

    def on_a_card(*given: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
            return capture(*given)

    monkeypatch.setattr("decode.forward.runner.capture", on_a_card)
    monkeypatch.setattr("decode.forward.capture.Graph", made)
    out = generate(model, draft, ids, max_new_tokens=24, eos_token_id=(), seed=0)
    assert ("a capture changes the result" in caplog.text) == (loses is not None)
    assert torch.equal(out.sequences, plain)
