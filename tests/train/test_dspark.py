"""Random anchors in the training loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.train.test_engines import LAUNCHER, launch
from tests.train.toy import command, data_settings, head_config, head_settings, metrics
from train.stage import run


def test_resumed_training_draws_the_anchors_that_uninterrupted_training_draws(
    tmp_path: Path, target: Path, corpus: Path
) -> None:
    """Few anchors of many tokens, and a validation in between, which must not draw any."""
    changes: dict[str, Any] = {"data": data_settings(corpus), "keep_checkpoints": 9, "head": {"anchors": 4}}
    run(head_config(tmp_path / "whole", target, "dspark", **changes))
    source = tmp_path / "whole" / "checkpoints" / "step_00000003"
    run(head_config(tmp_path / "rest", target, "dspark", **changes, resume=str(source)))
    run(head_config(tmp_path / "seldom", target, "dspark", **changes, validate_every=6))
    whole, rest, seldom = (metrics(tmp_path / name, "train") for name in ("whole", "rest", "seldom"))
    losses = [line["loss"] for line in whole]
    assert losses == [line["loss"] for line in rest] == [line["loss"] for line in seldom]
    whole, rest = ((tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "rest"))
    assert whole == rest


@pytest.mark.engines
@pytest.mark.parametrize("engine", ["ddp", "deepspeed_zero3"])
def test_two_ranks_train_blocks_as_one_would(tmp_path: Path, target: Path, feature_records: Path, engine: str) -> None:
    """Every weight is used through its module, so that sharded ones are gathered; with an anchor at every token."""
    source: dict[str, Any] = {"records": str(feature_records), "head": {"vocab": 250}, "lr": 3e-3}
    run(head_config(tmp_path / "one", target, "dspark", **source, batch_size=2))
    changes: dict[str, Any] = source | {"engine": {"name": engine}, "batch_size": 1}
    launch(command(head_settings(tmp_path / "two", target, "dspark", **changes), LAUNCHER, "tests.train.probe"))
    for ours, theirs in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        for name in ("loss", "alpha", "tau", "confidence_loss"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-2), (engine, name)
