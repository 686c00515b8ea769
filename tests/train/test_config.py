"""What a configuration or a launcher cannot ask for; none of this imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from decode.common.errors import ConfigError
from tests.train.toy import tiny_config
from train.config import EngineConfig
from train.engine import check_launcher

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
        (TARGET, {"records": "r", "optimizer": "muon", "engine": {"name": "deepspeed_zero2"}}, "ZeRO flattens"),
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
