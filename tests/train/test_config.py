"""What a configuration, a launcher or a CPU cannot do; reading a configuration imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Muon
from torch.utils._python_dispatch import TorchDispatchMode

from decode.common.errors import ConfigError
from decode.config import ModelConfig
from decode.models import arithmetic
from decode.models.load import load_model
from distill.corpora.config import DataConfig
from tests.tiny import tiny_llama
from tests.train.toy import tiny_config
from train import engine
from train.config import EngineConfig, TrainConfig
from train.engine import check_launcher
from train.optimizers import build_optimizers

TARGET, TEXT = Path("some/target"), {"name": "python_stdlib"}


@pytest.mark.parametrize(
    ("target", "changes", "message"),
    [
        (TARGET, {}, "nothing to train on"),
        (TARGET, {"data": TEXT}, "text holds none"),
        (TARGET, {"records": "r", "data": TEXT}, "records=r hold the texts to train on, and their splits"),
        (TARGET, {"records": "r", "tokenizer": {"train_entries": 4096}}, "must use its target's tokens"),
        (None, {"data": TEXT}, "target.path is null"),
        (None, {"data": TEXT, "objective": {"name": "cross_entropy"}}, "tokens are undefined"),
        (None, {"records": "r", "objective": {"name": "cross_entropy"}}, "belong to a target"),
        (TARGET, {"records": "r", "optimizer": "muon", "engine": {"name": "deepspeed_zero2"}}, "which shards the"),
        (TARGET, {"records": "r", "optimizer": "muon", "engine": {"name": "fsdp2"}}, "which shards the matrices"),
        (TARGET, {"data": TEXT, "target_source": "served"}, "name none. Set both"),
        (TARGET, {"records": "r", "servers": {"urls": ["http://x/v1"]}}, "target_source=records asks for none"),
        (None, {"data": TEXT, "target_source": "served", "servers": {"urls": ["u"], "states_folder": "s"}}, "is null"),
        (TARGET, {"records": "r", "draft": {"lora": {"rank": 4}}}, "would stay random"),
        (TARGET, {"records": "r", "draft": {"width": 18, "heads": 4}}, "does not divide"),
        (TARGET, {"records": "r", "draft": {"width": 20, "heads": 4}}, "width=20 does not divide into 4 even heads"),
        (TARGET, {"records": "r", "draft": {"heads": 2, "kv_heads": 4}}, "heads=2 is not a multiple of kv_heads=4"),
        (TARGET, {"records": "r", "draft": {"lora": {"rank": -1}}}, "rank=-1 must be at least 0"),
        (TARGET, {"records": "r", "steps": 0}, "at least 1"),
        (TARGET, {"data": TEXT, "objective": {"name": "cross_entropy", "credit": "dpace"}}, "text holds no p"),
        (TARGET, {"records": "r", "objective": {"credit": "e2e_tv"}}, "objective=forward_kl is not a TV"),
        (TARGET, {"records": "r", "objective": {"decay": 0.0}}, "objective.decay=0.0 is outside"),
        (TARGET, {"records": "r", "seed": -1}, "seed=-1"),
        (TARGET, {"records": "r", "seed": 1 << 32}, "seed=4294967296"),
        (TARGET, {"records": "r", "warmup": 1.5}, "is a share"),
        (TARGET, {"records": "r", "engine": {"offload_optimizer": True}}, "DeepSpeed engine"),
    ],
)
def test_contradictions_are_named(target: Path | None, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(Path("out"), target, **changes)


@pytest.mark.parametrize(
    ("engine", "environment", "message"),
    [
        ("single", {"WORLD_SIZE": "2"}, "started 2 processes, but engine=single"),
        ("ddp", {"ACCELERATE_USE_DEEPSPEED": "true"}, "asks for DeepSpeed ZeRO stage 2, but engine=ddp"),
        ("ddp", {"ACCELERATE_USE_FSDP": "true"}, "asks for FSDP, but engine=ddp"),
        (
            "deepspeed_zero3",
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
            "ZeRO stage 2, but engine=deepspeed_zero3",
        ),
    ],
)
def test_a_launcher_that_asks_for_another_engine_is_refused(engine: Any, environment: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_launcher(EngineConfig(name=engine), environment)


@pytest.mark.parametrize(
    ("engine", "environment"),
    [
        ("single", {}),
        ("ddp", {"WORLD_SIZE": "2"}),
        ("deepspeed_zero2", {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}),
    ],
)
def test_a_launcher_that_fits_is_accepted(engine: Any, environment: dict) -> None:
    check_launcher(EngineConfig(name=engine), environment)


@pytest.fixture
def emulating(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU without kernels for half precision."""
    arithmetic.is_emulated.cache_clear()
    for name in ("bf16", "fp16"):
        monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", lambda: False, raising=False)
    yield
    arithmetic.is_emulated.cache_clear()


@pytest.mark.usefixtures("emulating")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_model_in_emulated_precision_says_so(dtype: Any, tmp_path: object, caplog: pytest.LogCaptureFixture) -> None:
    tiny_llama().save_pretrained(str(tmp_path))
    with caplog.at_level(logging.WARNING):
        load_model(ModelConfig(path=str(tmp_path), dtype=dtype, device="cpu"), "draft")
    said = [one.getMessage() for one in caplog.records if "no arithmetic" in one.getMessage()]
    assert len(said) == (dtype != "float32")
    assert not said or (dtype in said[0] and "draft.dtype=float32" in said[0])


@pytest.mark.usefixtures("emulating")
def test_a_gpu_is_not_suspected(caplog: pytest.LogCaptureFixture) -> None:
    arithmetic.warn_if_emulated(torch.bfloat16, torch.device("cuda"), "")
    assert not caplog.records


@pytest.mark.usefixtures("emulating")
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_training_says_what_to_set(precision: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine.warn_of_emulated_products(EngineConfig(device="cpu", precision=precision))
    said = [one.getMessage() for one in caplog.records]
    assert len(said) == (precision == "bf16")
    assert not said or said[0].endswith("Set engine.precision=fp32")


class Halves(TorchDispatchMode):
    """Operators whose result is in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype == torch.bfloat16:
            self.seen.append(str(func))
        return made


@pytest.mark.parametrize("changes", [{"device_map": "auto"}, {"quantization": "int8"}])
def test_a_live_target_is_sharded_as_it_is(changes: dict[str, Any]) -> None:
    target, engine = ModelConfig(path="t", **changes), EngineConfig("fsdp2")
    with pytest.raises(ConfigError, match="engine=fsdp2 shards a live target as it is"):
        TrainConfig("x", target, engine=engine, data=DataConfig(), target_source="live")
    TrainConfig("x", target, engine=engine, records="r")


@pytest.mark.usefixtures("emulating")
def test_muon_goes_without_it() -> None:
    """Step by step as torch's, but for rounding; gradients stay as they are."""
    torch.manual_seed(0)
    cfg = TrainConfig(output_dir="x", records="r", target=ModelConfig(path="t"), optimizer="muon", lr=0.01, muon_lr=0.1)
    own, other = nn.Linear(24, 16, bias=False), nn.Linear(24, 16, bias=False)
    other.load_state_dict(own.state_dict())
    (wide,) = build_optimizers(own, (), cfg)
    narrow = Muon(other.parameters(), lr=0.1, weight_decay=cfg.weight_decay, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        own.weight.grad = torch.randn(16, 24)
        other.weight.grad = own.weight.grad.clone()
        with Halves() as halves:
            wide.step()
        assert not halves.seen
        assert own.weight.grad.equal(other.weight.grad)
        with Halves() as halves:
            narrow.step()
        assert halves.seen
    torch.testing.assert_close(own.weight, other.weight, rtol=0, atol=0.02)
    assert (own.weight - other.weight).abs().max() > 0


def test_muon_is_torch_s_own_where_the_machine_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.optimizers.is_emulated", lambda *_: False)
    cfg = TrainConfig(output_dir="x", records="r", target=ModelConfig(path="t"), optimizer="muon", lr=0.01, muon_lr=0.1)
    (one,) = build_optimizers(nn.Linear(4, 4, bias=False), (), cfg)
    assert type(one) is Muon


@pytest.mark.usefixtures("emulating")
@pytest.mark.parametrize(("slower", "is_emulated"), [(20.0, True), (2.0, False)])
def test_builds_without_onednn_are_timed(slower: float, is_emulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < arithmetic._seconds(torch.float32) < 1
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(arithmetic, "_seconds", lambda dtype: 1.0 if dtype == torch.float32 else slower)
    assert arithmetic.is_emulated(torch.bfloat16, torch.device("cpu")) == is_emulated
