"""Whole runs of the stage, in this process, on a toy target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from decode.common.errors import ConfigError, RunError
from distill.objectives.objective import TERMS
from tests.tiers import by_default
from tests.train.toy import data_settings, metrics, tiny_config, write_records
from train import training_loop as loop_module
from train.config import LEARNS_FROM_TEXT
from train.metric_sums import Sums
from train.stage import run


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def test_a_draft_learns_from_records(tmp_path: Path, target: Path, records: Path) -> None:
    run(tiny_config(tmp_path / "out", target, records=str(records), steps=60, validate_every=20))
    lines = metrics(tmp_path / "out", "train")
    assert [line["step"] for line in lines] == list(range(2, 61, 2))
    assert lines[-1]["alpha"] > lines[0]["alpha"]
    assert lines[-1]["loss"] < lines[0]["loss"]
    names = {"loss", "alpha", "tau", "tokens", "tokens_per_s", "eta_s", "data_wait_share", "lr", "grad_norm"}
    assert names <= lines[0].keys()
    assert result(tmp_path / "out")["alpha"] is not None


def test_a_live_target_gives_the_p_that_full_records_hold(tmp_path: Path, target: Path, full_records: Path) -> None:
    shared: dict[str, Any] = {"records": str(full_records), "objective": {"name": "reverse_kl"}}
    run(tiny_config(tmp_path / "stored", target, **shared))
    run(tiny_config(tmp_path / "live", target, **shared, target_source="live"))
    stored, live = (metrics(tmp_path / name, "train") for name in ("stored", "live"))
    for ours, theirs in zip(stored, live, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-2)
        assert ours["alpha"] == pytest.approx(theirs["alpha"], rel=1e-3)


@pytest.mark.slow
def test_recorded_hidden_states_go_through_the_targets_head(tmp_path: Path, target: Path, corpus: Path) -> None:
    records = write_records(tmp_path / "records", target, corpus, ["last_hidden"])
    shared: dict[str, Any] = {"records": str(records), "objective": {"name": "jsd"}, "steps": 2}
    run(tiny_config(tmp_path / "stored", target, **shared))
    run(tiny_config(tmp_path / "live", target, **shared, target_source="live"))
    stored, live = (result(tmp_path / name) for name in ("stored", "live"))
    assert stored["alpha"] == pytest.approx(live["alpha"], rel=1e-2)


@pytest.mark.parametrize("objective", by_default(3, sorted([*TERMS, "lk_hybrid"])))
def test_every_objective_trains_on_dense_records(
    tmp_path: Path, target: Path, full_records: Path, objective: str
) -> None:
    changes: dict[str, Any] = {"objective": {"name": objective}, "validate_every": 1}
    run(tiny_config(tmp_path / "out", target, records=str(full_records), **changes))
    trained, validated = (metrics(tmp_path / "out", kind) for kind in ("train", "validation"))
    assert trained[-1]["loss"] < trained[0]["loss"]
    if objective != LEARNS_FROM_TEXT:  # text alone says little about p in six steps
        assert validated[-1]["alpha"] > validated[0]["alpha"] + 0.01


@pytest.mark.slow
def test_a_target_is_trained_on_text_with_a_tokenizer_of_its_own(tmp_path: Path, corpus: Path) -> None:
    changes: dict[str, Any] = {
        "data": data_settings(corpus),
        "tokenizer": {"train_entries": 300},
        "objective": {"name": "cross_entropy"},
        "optimizer": "muon",
        "gradient_accumulation": 2,
        "steps": 30,
    }
    run(tiny_config(tmp_path / "out", None, **changes))
    lines = metrics(tmp_path / "out", "train")
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    assert lines[-1]["alpha"] is None
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
    assert model.config.vocab_size == len(tokenizer) == 300
    assert tokenizer.decode(tokenizer("def class return")["input_ids"]) == "def class return"


def test_a_tokenizer_that_a_kill_cut_short_is_not_taken_for_a_whole_one(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text: dict[str, Any] = {"data": data_settings(corpus), "objective": {"name": "cross_entropy"}, "steps": 2}
    cfg = tiny_config(tmp_path / "out", None, **text, tokenizer={"train_entries": 300}, resume="auto")

    def killed(self: PreTrainedTokenizerFast, folder: Path) -> None:
        Path(folder).mkdir()
        (Path(folder) / "tokenizer_config.json").write_text("{")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerFast, "save_pretrained", killed)
        with pytest.raises(KeyboardInterrupt):
            run(cfg)
    run(cfg)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out" / "model")) == 300


def test_the_kept_weights_are_those_of_the_best_tau_not_of_the_lowest_loss(
    tmp_path: Path, target: Path, records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted = iter([(2.0, 3.0), (1.0, 2.5), (0.5, 2.0)])  # (loss, tau): loss falls while acceptance falls

    def evaluate(self: loop_module.TrainingLoop) -> Sums:
        loss, tau = next(scripted)
        return Sums(loss=loss, loss_count=1, alpha=0.5, alpha_count=1, tau=tau, tau_count=1, tokens=1)

    monkeypatch.setattr(loop_module.TrainingLoop, "evaluate", evaluate)
    run(tiny_config(tmp_path / "out", target, records=str(records), steps=6, validate_every=2, keep_checkpoints=3))
    kept = result(tmp_path / "out")
    assert kept["step"] == 2
    assert kept["rule"] == "highest validation tau estimate"
    assert [path.name for path in (tmp_path / "out" / "checkpoints").glob("best_*")] == ["best_00000002"]


def test_lora_trains_adapters_saves_them_in_peft_format_and_merges_them(
    tmp_path: Path, target: Path, records: Path
) -> None:
    draft = {"init_from": str(target), "lora": {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "v_proj"]}}
    run(tiny_config(tmp_path / "out", target, records=str(records), draft=draft, objective={"name": "cross_entropy"}))
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(target)
    embedding = base.get_parameter("model.embed_tokens.weight").clone()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert torch.equal(merged.get_parameter("model.embed_tokens.weight"), embedding)
    ids = torch.arange(8)[None]
    plain = base(ids).logits
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "out" / "adapter"))(ids).logits
    torch.testing.assert_close(merged(ids).logits, adapted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(adapted, plain)


def test_a_pretrained_draft_starts_where_it_was(tmp_path: Path, target: Path, records: Path) -> None:
    run(tiny_config(tmp_path / "out", target, records=str(records), draft={"init_from": str(target)}, lr=1e-9))
    assert result(tmp_path / "out")["alpha"] > 0.98  # an unbiased estimate of 1


def test_a_plan_runs_nothing_and_says_what_a_budget_is_good_for(
    tmp_path: Path, target: Path, records: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tiny_config(tmp_path / "out", target, records=str(records), plan=True))
    assert not (tmp_path / "out").exists()
    assert "far too few to serve with" in caplog.text
    assert "AdamW at 0.01" in caplog.text


@pytest.mark.parametrize("emulated", [True, False])
def test_a_plan_names_a_precision_that_this_cpu_emulates(
    emulated: bool,
    tmp_path: Path,
    target: Path,
    records: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("decode.models.arithmetic.is_emulated", lambda *_: emulated)
    engine = {"device": "cpu", "precision": "bf16"}
    run(tiny_config(tmp_path / "out", target, records=str(records), plan=True, engine=engine))
    assert ("Set engine.precision=fp32" in caplog.text) == emulated


def test_a_loss_that_is_not_a_number_stops_the_run_and_names_the_batch(
    tmp_path: Path, target: Path, records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = loop_module.TrainingLoop._account

    def poisoned(self: loop_module.TrainingLoop, step: int, sums: torch.Tensor) -> None:
        account(self, step, sums * float("nan") if step == 4 else sums)

    monkeypatch.setattr(loop_module.TrainingLoop, "_account", poisoned)
    with pytest.raises(RunError, match=r"loss is not finite at step 5.*\.txt.*step_00000003"):
        run(tiny_config(tmp_path / "out", target, records=str(records)))
    assert [path.name for path in (tmp_path / "out" / "checkpoints").glob("step_*")] == ["step_00000003"]
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_finished_run_is_not_trained_again(tmp_path: Path, target: Path, records: Path) -> None:
    cfg = tiny_config(tmp_path / "out", target, records=str(records), steps=2)
    run(cfg)
    written = (tmp_path / "out" / "manifest.json").stat().st_mtime_ns
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        run(cfg)
    cfg.resume = "auto"
    run(cfg)
    assert (tmp_path / "out" / "manifest.json").stat().st_mtime_ns == written


def test_a_run_that_was_killed_before_it_took_over_its_checkpoint_still_starts_from_it(
    tmp_path: Path, target: Path, records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder holds no checkpoint yet, but says which one it is to start from."""
    changes: dict[str, Any] = {"records": str(records), "steps": 2, "log_every": 1}
    run(tiny_config(tmp_path / "first", target, **changes))
    changes |= {"steps": 3, "lr": 1e-3}
    source = tmp_path / "first" / "checkpoints" / "step_00000002"

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("train.stage.adopt", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tiny_config(tmp_path / "second", target, **changes, resume=str(source)))
    run(tiny_config(tmp_path / "second", target, **changes, resume="auto"))
    first, second = (metrics(tmp_path / folder, "train") for folder in ("first", "second"))
    assert [line["loss"] for line in second[:2]] == [line["loss"] for line in first]
    assert [line["step"] for line in second] == [1, 2, 3]


def test_a_checkpoint_can_be_continued_in_another_folder(tmp_path: Path, target: Path, records: Path) -> None:
    changes: dict[str, Any] = {"records": str(records), "keep_checkpoints": 9}
    run(tiny_config(tmp_path / "whole", target, **changes))
    source = tmp_path / "whole" / "checkpoints" / "step_00000003"
    run(tiny_config(tmp_path / "rest", target, **changes, resume=str(source)))
    for name in ("loss", "alpha", "step"):
        ours, theirs = (metrics(tmp_path / folder) for folder in ("whole", "rest"))
        assert [line[name] for line in ours] == [line[name] for line in theirs]
    ours, theirs = ((tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "rest"))
    assert ours == theirs


def test_the_objective_takes_over_when_alpha_has_risen_and_a_resumed_run_remembers(
    tmp_path: Path, target: Path, full_records: Path
) -> None:
    """Logged losses tell which one is minimised: cross-entropy lies above 1, a total variation never does."""
    warm = {"name": "tv", "warm_up": "cross_entropy", "switch_at": 0.01}
    changes: dict[str, Any] = {"records": str(full_records), "objective": warm, "log_every": 1, "keep_checkpoints": 9}
    run(tiny_config(tmp_path / "whole", target, **changes))
    losses = [line["loss"] for line in metrics(tmp_path / "whole", "train")]
    assert min(losses[:3]) > 1 > max(losses[3:])
    assert result(tmp_path / "whole")["switched_at"] == 3
    later = str(min((tmp_path / "whole" / "checkpoints").glob("step_*")))
    run(tiny_config(tmp_path / "resumed", target, **changes, resume=later))
    assert [line["loss"] for line in metrics(tmp_path / "resumed", "train")][-3:] == losses[3:]


def test_a_switch_that_comes_with_the_last_step_is_none(
    tmp_path: Path, target: Path, full_records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would be minimised by the objective, whatever the log said."""
    warm = {"name": "tv", "warm_up": "cross_entropy", "switch_at": 0.5}
    found = iter([Sums(1.0, 1.0, 0.4, 1.0, 2.0, 1.0), Sums(1.0, 1.0, 0.6, 1.0, 3.0, 1.0)])  # alphas of 0.4 and 0.6
    monkeypatch.setattr(loop_module.TrainingLoop, "evaluate", lambda self: next(found))
    run(tiny_config(tmp_path / "out", target, records=str(full_records), objective=warm))
    assert "switched_at" not in result(tmp_path / "out")
    assert "cross_entropy, nats" in (tmp_path / "out" / "model" / "README.md").read_text()


def test_a_warm_up_that_never_ends_is_said(
    tmp_path: Path, target: Path, full_records: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warm = {"name": "tv", "warm_up": "cross_entropy", "switch_at": 0.99}
    run(tiny_config(tmp_path / "out", target, records=str(full_records), objective=warm))
    assert "never reached objective.switch_at=0.99" in caplog.text
    assert "switched_at" not in result(tmp_path / "out")
    of_text = warm | {"name": "cross_entropy", "warm_up": "tv"}
    with pytest.raises(ConfigError, match="text holds none"):
        tiny_config(tmp_path / "out", target, data=data_settings(tmp_path), objective=of_text)
    with pytest.raises(ConfigError, match="is after the last step"):
        tiny_config(tmp_path / "out", target, records="r", objective=warm, validate_every=6)


def test_a_checkpoint_of_another_optimizer_is_refused_where_both_said_auto(
    tmp_path: Path, target: Path, records: Path
) -> None:
    """A rate of AdamW's chooses AdamW, whose state is not Muon's."""
    auto: dict[str, Any] = {"records": str(records), "optimizer": "auto", "muon_lr": None}
    run(tiny_config(tmp_path / "first", target, **auto, lr=None))
    checkpoint = str(max((tmp_path / "first" / "checkpoints").glob("step_*")))
    with pytest.raises(ConfigError, match="optimizer=muon, and this run has adamw"):
        run(tiny_config(tmp_path / "second", target, **auto, lr=1e-2, resume=checkpoint, steps=8))
    run(tiny_config(tmp_path / "second", target, **auto, lr=None, resume=checkpoint, steps=8))
