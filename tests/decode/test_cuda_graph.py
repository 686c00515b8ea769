"""CUDA graphs without a GPU: what a replay holds on to, which device is recorded, and what running out of memory is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decode.forward.capture import Graph, Uncapturable, _capture_stream, capture
from decode.forward.packing import Packing
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
