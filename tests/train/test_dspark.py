"""Random anchors, layouts and masks in the training loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from decode import generate, load_drafter
from decode.common.errors import ConfigError, InputError
from decode.config import ModelConfig
from decode.models.load import describe_model
from tests.train.test_engines import LAUNCHER, launch
from tests.train.toy import command, data_settings, head_config, head_settings, metrics
from train.drafts.head_blueprint import head_blueprint
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


FILL_IN: dict[str, Any] = {"layout": "fill_in", "markov_rank": 0, "mask_token": 60}


def test_fill_in_blocks_learn_and_go_on_as_they_are(tmp_path: Path, target: Path, corpus: Path) -> None:
    """Behind a frozen mask; from the saved head training goes on in its layout unless another is asked for."""
    data: dict[str, Any] = {"data": data_settings(corpus)}
    run(head_config(tmp_path / "first", target, "dspark", **data, head=FILL_IN, steps=8, validate_every=8))
    lines = metrics(tmp_path / "first", "train")
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["alpha"] > lines[0]["alpha"]
    model, ids = AutoModelForCausalLM.from_pretrained(target), torch.arange(10, 18)[None]
    settings: dict[str, Any] = {"max_new_tokens": 96, "eos_token_id": (), "seed": 0}
    drafter = load_drafter(tmp_path / "first", target=model)
    drafted = generate(model, drafter, ids, num_draft_tokens=3, **settings)
    assert torch.equal(drafted.sequences, generate(model, None, ids, **settings).sequences)
    assert drafted.stats.tau > 1.7
    known, draft = describe_model(ModelConfig(path=str(target))), {"init_from": str(tmp_path / "first")}

    def config(**head: Any) -> Any:
        cfg = head_config(tmp_path, target, "dspark", **data, draft=draft, head={"markov_rank": 0} | head)
        return head_blueprint(cfg, known, None).config

    assert (config().layout, config().mask_token) == ("fill_in", 60)
    assert config(layout="fill_in", mask_token=60) == config()
    with pytest.raises(ConfigError, match="draft.head.layout=anchor, and the head .* has fill_in"):
        config(layout="anchor")
    with pytest.raises(ConfigError, match="draft.head.mask_token=61, and the head .* has 60"):
        config(mask_token=61)


def test_a_saved_block_of_a_learned_mask_takes_no_other(tmp_path: Path, target: Path, corpus: Path) -> None:
    """Nor one of before layouts a layout: it was an anchor's, and stays one although new DFlash heads fill in."""
    data: dict[str, Any] = {"data": data_settings(corpus), "steps": 1}
    run(head_config(tmp_path / "first", target, "dspark", **data, head={"markov_rank": 0, "layout": "anchor"}))
    known, draft = describe_model(ModelConfig(path=str(target))), {"init_from": str(tmp_path / "first")}
    cfg = head_config(tmp_path, target, "dspark", **data, draft=draft, head={"markov_rank": 0})
    assert head_blueprint(cfg, known, None).config.layout == "anchor"  # type: ignore[attr-defined]
    for asked in ({"layout": "fill_in"}, {"mask_token": 7}):
        cfg = head_config(tmp_path, target, "dspark", **data, draft=draft, head={"markov_rank": 0} | asked)
        with pytest.raises(ConfigError, match=r"and the head .* has (anchor|null), which stays as it is"):
            head_blueprint(cfg, known, None)


def test_a_mask_of_zeros_is_refused(tmp_path: Path, target: Path, corpus: Path) -> None:
    pad = AutoModelForCausalLM.from_pretrained(target).config.pad_token_id
    cfg = head_config(tmp_path / "run", target, "dspark", data=data_settings(corpus), head={"mask_token": pad})
    with pytest.raises(InputError, match=f"mask_token={pad}, and the embedding of that token in .* is all zeros"):
        run(cfg)


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
