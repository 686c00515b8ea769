"""A CPU without bfloat16 arithmetic is told of before hours are lost on it."""

import logging
from typing import Any

import pytest
import torch

from decode.config import ModelConfig
from decode.models import arithmetic
from decode.models.load import load_model
from tests.tiny import tiny_llama
from train import engine
from train.config import EngineConfig, TrainConfig


@pytest.fixture
def emulating(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that takes twenty times as long in half precision."""
    monkeypatch.setattr(arithmetic, "_seconds", lambda dtype: 1.0 if dtype == torch.float32 else 20.0)


@pytest.mark.usefixtures("emulating")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_model_in_emulated_precision_says_so(dtype: Any, tmp_path: object, caplog: pytest.LogCaptureFixture) -> None:
    tiny_llama().save_pretrained(str(tmp_path))
    with caplog.at_level(logging.WARNING):
        load_model(ModelConfig(path=str(tmp_path), dtype=dtype, device="cpu"), "draft")
    said = [one.getMessage() for one in caplog.records if "no arithmetic" in one.getMessage()]
    assert len(said) == (dtype != "float32")
    assert not said or (dtype in said[0] and "20 times" in said[0] and "draft.dtype=float32" in said[0])


@pytest.mark.usefixtures("emulating")
def test_a_gpu_is_not_suspected(caplog: pytest.LogCaptureFixture) -> None:
    arithmetic.warn_if_emulated(torch.bfloat16, torch.device("cuda"), "")
    assert not caplog.records


@pytest.mark.usefixtures("emulating")
@pytest.mark.parametrize(
    ("precision", "optimizer", "remedy"),
    [
        ("bf16", "muon", "Set engine.precision=fp32 optimizer=adamw"),
        ("bf16", "adamw", "Set engine.precision=fp32"),
        ("fp32", "muon", "Set optimizer=adamw"),
        ("fp32", "adamw", None),
    ],
)
def test_training_says_what_to_set(
    precision: Any, optimizer: Any, remedy: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = TrainConfig(
        output_dir="runs/x",
        records="r",
        target=ModelConfig(path="t"),
        engine=EngineConfig(precision=precision),
        optimizer=optimizer,
    )
    with caplog.at_level(logging.WARNING):
        engine.warn_of_emulated_products(cfg)
    said = [one.getMessage() for one in caplog.records]
    assert len(said) == (remedy is not None)
    assert remedy is None or said[0].endswith(remedy)


def test_products_are_timed() -> None:
    assert 0 < arithmetic._seconds(torch.float32) < 1
