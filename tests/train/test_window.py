"""Trainings with a window of attention, from settings to the saved draft and its exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from decode import load_drafter
from decode.common.checked_json import read_json
from decode.common.errors import ConfigError, InputError
from decode.config import ModelConfig
from decode.drafters.base import Batch
from decode.drafters.eagle3 import Eagle3Draft
from decode.drafters.lm import LMDraft
from decode.forward.window import Window, window_in
from decode.models.describe import describe_model
from distill.engines.vllm_support import drafting_with_model
from eval.arms.ours import assisted_arms, assisted_refusal
from eval.config import EvalConfig
from tests.train.export.saved_heads import save_head
from tests.train.toy import tiny_config
from train.drafts.draft_config import DraftConfig, HeadSettings
from train.drafts.registry import FAMILIES
from train.export.config import ExportConfig, SavedDraftConfig
from train.export.stage import run as export
from train.stage import run as train

STEPS = {"steps": 1, "validate_every": 1, "checkpoint_every": 1, "export_dtype": "float32"}


def trained(folder: Path, target: Path, records: Path, **draft: Any) -> Path:
    """`draft` settings in place of the toy's own."""
    like = tiny_config(folder, target, records=str(records), **STEPS)
    for name, value in draft.items():
        setattr(like.draft, name, value)
    train(like)
    return folder / "model"


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory, target: Path, records: Path) -> Path:
    return trained(tmp_path_factory.mktemp("sliding") / "run", target, records, window=5, sinks=0)


@pytest.fixture(scope="module")
def sunk(tmp_path_factory: pytest.TempPathFactory, target: Path, records: Path) -> Path:
    return trained(tmp_path_factory.mktemp("sunk") / "run", target, records, window=5, sinks=2)


def wanted(draft: Path, form: str, output: Path) -> ExportConfig:
    return ExportConfig(format=form, output_dir=str(output), draft=SavedDraftConfig(path=str(draft)))  # type: ignore[arg-type]


def test_the_saved_draft_is_loaded_with_its_window(sunk: Path, target: Path) -> None:
    drafter = load_drafter(sunk, target=AutoModelForCausalLM.from_pretrained(target))
    assert isinstance(drafter, LMDraft)
    assert drafter.window == Window(5, 2)
    card = (sunk / "README.md").read_text()
    assert "first 2 and the last 5 positions" in card
    assert "vllm" not in card


def test_training_goes_on_with_the_saved_window_or_another(
    sunk: Path, target: Path, records: Path, tmp_path: Path
) -> None:
    again = trained(tmp_path / "again", target, records, init_from=str(sunk))
    other = trained(tmp_path / "other", target, records, init_from=str(sunk), window=7, sinks=1)
    found = [window_in(read_json(one / "config.json")) for one in (again, other)]
    assert found == [Window(5, 2), Window(7, 1)]


def test_without_sinks_transformers_gets_a_mistral_of_the_same_logits(
    sliding: Path, target: Path, tmp_path: Path
) -> None:
    export(wanted(sliding, "transformers", tmp_path / "out"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    drafter = load_drafter(sliding, target=AutoModelForCausalLM.from_pretrained(target))
    assert isinstance(drafter, LMDraft)
    ids = torch.arange(5, 45)[None]
    batch = Batch(ids, torch.arange(40)[None], torch.zeros_like(ids), torch.ones_like(ids).bool())
    with torch.no_grad():
        ours = drafter.head(drafter.hidden_states(batch))
        torch.testing.assert_close(theirs(ids).logits, ours, rtol=1e-5, atol=1e-5)
        unaware = AutoModelForCausalLM.from_pretrained(sliding)(ids).logits
    assert (unaware - ours).abs().max() > 1e-3  # what the export is for


@pytest.mark.parametrize("form", ["vllm", "llamacpp", "sglang"])
def test_other_engines_are_refused(sliding: Path, form: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="first 0 and last 5 positions.*was not tried with drafts that have a window"):
        export(wanted(sliding, form, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_sinks_are_refused_by_all(sunk: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no sinks before its windows"):
        export(wanted(sunk, "all", tmp_path / "out"))


def test_nothing_that_heeds_no_window_drafts_with_one(sunk: Path, target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(target)
    drafter = load_drafter(sunk, target=model)
    cfg = EvalConfig(target=ModelConfig(path=str(target)), drafts={"one": str(sunk)}, output_dir="nowhere")
    assert "draft.window" in str(assisted_refusal(cfg, drafter))
    assert assisted_arms(cfg, model, drafter, 1.0) == {}
    with pytest.raises(InputError, match="first 2 and last 5 positions, and vLLM"):
        drafting_with_model(str(sunk), 4)


def test_a_head_keeps_its_window(target: Path, tmp_path: Path) -> None:
    save_head(tmp_path / "head", target, "eagle3-window")
    loaded = load_drafter(tmp_path / "head", target=AutoModelForCausalLM.from_pretrained(target))
    assert isinstance(loaded, Eagle3Draft)
    assert loaded.config.attends == Window(3, 2)
    with pytest.raises(InputError, match="first 2 and last 3 positions"):
        export(wanted(tmp_path / "head", "vllm", tmp_path / "out"))


@pytest.mark.parametrize("source", [None, "eagle3", "eagle3-window"])
def test_a_head_is_built_with_the_window_that_is_asked_for(target: Path, tmp_path: Path, source: str | None) -> None:
    if source is not None:
        save_head(tmp_path / "head", target, source)
    like = tiny_config(tmp_path / "run", target, records="nowhere", **STEPS)
    draft = DraftConfig(
        "eagle3",
        init_from=None if source is None else str(tmp_path / "head"),
        head=HeadSettings(taps=[0, 1, -1]),
        window=9,
        sinks=1,
    )
    like.draft = draft
    known = describe_model(ModelConfig(path=str(target)))
    assert FAMILIES["eagle3"](like, known, None).attends == Window(9, 1)


def test_a_window_longer_than_the_context_is_refused(target: Path, tmp_path: Path) -> None:
    known = describe_model(ModelConfig(path=str(target)))
    for family in ("lm", "eagle3"):
        like = tiny_config(tmp_path / "run", target, records="nowhere", **STEPS)
        like.draft = DraftConfig(family, head=HeadSettings(taps=[0, 1, -1]), window=known.max_positions + 1)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"draft.window={known.max_positions + 1} is longer than.*context"):
            FAMILIES[family](like, known, None)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"window": 0}, "window=0"),
        ({"window": 8, "sinks": -1}, "sinks=-1"),
        ({"sinks": 2}, "draft.window is null"),
        ({"window": 8, "max_positions": 4}, "longer than draft.max_positions=4"),
        ({"window": 8, "family": "medusa"}, "has no attention"),
        ({"window": 8, "family": "dspark"}, "attends to the whole text"),
    ],
)
def test_what_cannot_be_is_refused_at_once(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        DraftConfig(**given)


@pytest.mark.parametrize(("length", "is_told"), [(9, True), (10, False)])
def test_training_sequences_within_the_window_are_warned_of(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, length: int, is_told: bool
) -> None:
    like = tiny_config(tmp_path / "run", target, records="nowhere", sequence_length=length, draft={"window": 9})
    FAMILIES["lm"](like, describe_model(ModelConfig(path=str(target))), None)
    assert ("draft.window=9 and sequence_length=9" in caplog.text) == is_told
