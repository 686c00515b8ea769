"""DSpark in the training loop: random anchors, layouts and masks; temperatures of predicted acceptance undo what is
wrong with it, and never make it worse."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from decode import generate, load_drafter
from decode.common.errors import ConfigError, InputError
from decode.config import ModelConfig
from decode.drafters.base import Batch
from decode.drafters.dspark import DSparkConfig, DSparkDraft
from decode.models.describe import describe_model
from decode.models.output_head import ends_of
from distill.objectives.target_distribution import SparseRows
from tests.tiny import tiny_llama
from tests.train.test_processes import LAUNCHER, launch
from tests.train.toy import command, data_settings, head_config, head_settings, metrics, save_target, write_corpus
from train.drafts import confidence
from train.drafts.confidence import calibrated, error, expected_calibration_error, fitted, predictions
from train.drafts.head_blueprint import head_blueprint
from train.live_target import LiveTarget
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
    config: Any = head_blueprint(cfg, known, None).config
    assert config.layout == "anchor"
    unasked = {"markov_rank": 0, "depth": 7}  # of conf/draft/dspark.yaml
    cfg = head_config(tmp_path, target, "dspark", **data, draft=draft, head=unasked)
    assert head_blueprint(cfg, known, None).config == config
    for asked in ({"layout": "fill_in"}, {"mask_token": 7}, {"depth": 6}):
        cfg = head_config(tmp_path, target, "dspark", **data, draft=draft, head={"markov_rank": 0} | asked)
        with pytest.raises(ConfigError, match=r"and the head .* has (anchor|null|3), which stays as it is"):
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


def rounds(count: int, scales: list[float]) -> tuple[Tensor, Tensor]:
    """(logits, chances) of a draft whose logits are `scales` times what they ought to be."""
    true = torch.randn(count, len(scales), generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    return true * torch.tensor(scales), true.sigmoid()


def test_the_error_is_what_the_bins_are_off_by() -> None:
    predicted = torch.tensor([[0.05, 0.05, 0.75, 0.72], [0.5, 0.5, 0.5, 0.5]])
    actual = torch.tensor([0.0, 0.3, 0.7, 0.9])
    have = expected_calibration_error(predicted, actual)
    torch.testing.assert_close(have, torch.tensor([(0.2 + 0.13) / 4, abs(2.0 - 1.9) / 4]))


def test_each_slot_gets_the_temperature_that_it_errs_by() -> None:
    scales = [3.0, 0.5, 1.0, 2.0]
    temperatures = fitted(*rounds(4000, scales))
    assert temperatures == pytest.approx(scales, rel=0.15)


def test_products_are_calibrated_better_than_before() -> None:
    logits, alphas = rounds(4000, [3.0, 2.0, 4.0])
    scaled = logits[2000:] / torch.tensor(fitted(logits[:2000], alphas[:2000]))
    assert error(scaled, alphas[2000:]) < 0.3 * error(logits[2000:], alphas[2000:])


def test_a_calibrated_draft_stays_as_it_is() -> None:
    logits, alphas = rounds(4000, [1.0, 1.0])
    assert fitted(logits, alphas) == pytest.approx([1.0, 1.0], rel=0.08)


def test_later_slots_make_up_for_earlier_ones() -> None:
    """What is calibrated is the product: a first slot that no temperature helps (all at 0, half of them meant) leaves
    the second one to settle it."""
    alphas = torch.full((500, 2), 0.9, dtype=torch.float64)
    logits = torch.tensor([0.0, 1.0], dtype=torch.float64).expand(500, 2)
    first, second = fitted(logits, alphas)
    assert first == 1.0
    assert second == 0.125


def tiny() -> tuple[DSparkDraft, LiveTarget]:
    target = tiny_llama(num_layers=3).requires_grad_(False)
    config = DSparkConfig(
        hidden_size=32, vocab_size=64, taps=(1, 2), depth=3, heads=2, kv_heads=2, head_dim=16, mlp_width=32,
        rms_norm_eps=1e-6, rope={"rope_type": "default", "rope_theta": 1e4}, max_positions=64, layers=1, markov_rank=4,
        confidence=True, anchors=64, temperatures=(9.0, 9.0, 9.0),
    )  # fmt: skip
    torch.manual_seed(0)
    return DSparkDraft(config, ends_of(target)), LiveTarget(target, config.taps)


def text(rows: int) -> Batch:
    ids = torch.randint(0, 64, (rows, 40), generator=torch.Generator().manual_seed(1))
    zeros = torch.zeros_like(ids)
    return Batch(ids, torch.arange(40).expand(rows, -1), zeros, zeros == 0)


def test_a_draft_is_calibrated_on_rounds_with_p() -> None:
    """Temperatures of an earlier training count for nothing; the rounds are those of evenly spaced anchors."""
    draft, live = tiny()
    batches = [live(text(3)), live(text(2))]
    logits, alphas = predictions(draft.eval(), batches, chunk_rows=64)
    assert logits.shape == alphas.shape == (5 * 37, 3)
    config, measured = calibrated(draft.train(), batches)
    assert not draft.training
    assert measured["confidence_ece"] < measured["confidence_ece_raw"]
    assert len(config.temperatures) == 3
    assert 9.0 not in config.temperatures
    half = len(logits) // 2
    assert measured["confidence_ece_raw"] == pytest.approx(error(logits[half:], alphas[half:]))


def test_too_few_rounds_and_text_without_p_calibrate_nothing() -> None:
    draft, live = tiny()
    for batches in ([live(text(1))], []):
        config, measured = calibrated(draft, batches)
        assert config.temperatures == ()
        assert measured == {}


def test_temperatures_that_help_only_where_they_were_fitted_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, alphas = rounds(200, [1.0, 1.0, 1.0])
    monkeypatch.setattr(confidence, "predictions", lambda *_: (logits, alphas))
    monkeypatch.setattr(confidence, "fitted", lambda *_: [8.0, 8.0, 8.0])
    config, measured = calibrated(tiny()[0], [])
    assert config.temperatures == ()
    assert measured["confidence_ece"] == measured["confidence_ece_raw"]


def halves(monkeypatch: pytest.MonkeyPatch, first: float, second: float) -> tuple[DSparkConfig, dict[str, float]]:
    """What is made of rounds whose logits are `first` and `second` times what they ought to be."""
    true = torch.randn(400, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scales = torch.tensor([first, second]).repeat_interleave(200)[:, None]
    monkeypatch.setattr(confidence, "predictions", lambda *_: (true * scales, true.sigmoid()))
    return calibrated(tiny()[0], [])


def test_temperatures_are_judged_by_rounds_that_they_were_not_fitted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second half is right as it is, and would be wrong by what the first one asks for."""
    config, measured = halves(monkeypatch, 4.0, 1.0)
    assert config.temperatures == ()
    assert measured == {"confidence_ece_raw": 0.0, "confidence_ece": 0.0, "confidence_rounds": 200}


def test_temperatures_are_fitted_on_rounds_that_they_are_not_judged_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first half asks for 4, which is too little for the second one, and better than nothing."""
    config, measured = halves(monkeypatch, 4.0, 8.0)
    assert config.temperatures == (4.0, 4.0, 4.0)
    assert 0.0 < measured["confidence_ece"] < measured["confidence_ece_raw"]
    config, measured = halves(monkeypatch, 4.0, 4.0)
    assert config.temperatures == (4.0, 4.0, 4.0)
    assert measured["confidence_ece"] == pytest.approx(0.0, abs=1e-12)


def test_chances_that_sparse_records_estimate_above_one_are_one() -> None:
    """The only token that was drawn from p stands for three times its share."""
    draft, live = tiny()
    batch = live(text(1))
    rows = batch.ids.numel()
    one = torch.ones(rows, 1)
    batch = replace(
        batch, target=SparseRows(torch.zeros(rows, 1, dtype=torch.long), -20 * one, 3 * one, torch.arange(rows))
    )
    alphas = predictions(draft.eval(), [batch], chunk_rows=64)[1]
    assert (alphas == 1.0).all()


def test_a_run_exports_what_it_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From `python -m train` to the loaded draft, with the errors beside the other measurements. Some temperatures are
    put in: whether this toy gets any is chance."""
    from train.stage import run

    found: list[dict[str, float]] = []

    def with_temperatures(*given: Any) -> tuple[DSparkConfig, dict[str, float]]:
        config, errors = calibrated(*given)
        found.append(errors)
        return replace(config, temperatures=(1.5, 2.0, 0.5)), errors

    monkeypatch.setattr("train.drafts.head_blueprint.calibrated", with_temperatures)
    target = save_target(tmp_path / "target")
    data: dict[str, Any] = {"data": data_settings(write_corpus(tmp_path / "corpus"))}
    run(head_config(tmp_path / "run", target, "dspark", **data))
    measured = json.loads((tmp_path / "run" / "result.json").read_text())
    saved = json.loads((tmp_path / "run" / "model" / "draftsmith.json").read_text())["measured"]
    for name in ("confidence_ece", "confidence_ece_raw"):
        assert measured[name] == saved[name] == found[0][name]
    from transformers import AutoModelForCausalLM

    draft = load_drafter(tmp_path / "run", AutoModelForCausalLM.from_pretrained(target))
    assert isinstance(draft, DSparkDraft)
    assert draft.config.temperatures == (1.5, 2.0, 0.5)
