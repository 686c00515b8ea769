"""Random anchors in the training loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.train.toy import data_settings, head_config, metrics
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
