"""Adapters for early_exit are trained, kept, resumed, loaded and refused as other heads are."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from decode import generate, load_drafter
from decode.__main__ import main
from decode.common.errors import InputError, UserError
from decode.config import ModelConfig
from decode.drafters.exit_adapter import ExitAdapter
from decode.drafters.saved_draft import describe_draft
from decode.drafters.untrained.early_exit import EarlyExitDrafter
from decode.models.describe import describe_model
from tests.tiny import save_tiny_target
from tests.train.export.saved_heads import save_head
from tests.train.toy import data_settings, head_config, metrics, tiny_config
from train.export.config import ExportConfig, SavedDraftConfig
from train.export.stage import run as export
from train.stage import run


@pytest.mark.slow
def test_recorded_states_bring_the_exit_nearer_to_the_target(
    tmp_path: Path, target: Path, feature_records: Path
) -> None:
    """By KL, on documents that are not learned; what is drafted afterwards stands more often."""
    settings: dict[str, Any] = {"objective": {"name": "forward_kl"}, "steps": 12, "validate_every": 3}
    run(head_config(tmp_path / "out", target, "exit_adapter", records=str(feature_records), **settings))
    losses = [line["loss"] for line in metrics(tmp_path / "out", "validation")]
    assert losses[-1] < 0.9 * losses[0]
    model, ids = AutoModelForCausalLM.from_pretrained(target), torch.arange(10, 18)[None]
    asked: dict[str, Any] = {"max_new_tokens": 96, "eos_token_id": (), "num_draft_tokens": 3, "seed": 0}
    plain = generate(model, EarlyExitDrafter(model, 1), ids, **asked)
    trained = generate(model, load_drafter(tmp_path / "out", target=model), ids, **asked)
    assert torch.equal(trained.sequences, plain.sequences)
    assert trained.stats.tau > plain.stats.tau


def test_a_resumed_adapter_equals_an_uninterrupted_one(tmp_path: Path, target: Path, feature_records: Path) -> None:
    changes: dict[str, Any] = {"records": str(feature_records), "keep_checkpoints": 9}
    run(head_config(tmp_path / "whole", target, "exit_adapter", **changes))
    source = tmp_path / "whole" / "checkpoints" / "step_00000003"
    run(head_config(tmp_path / "rest", target, "exit_adapter", **changes, resume=str(source)))
    whole, rest = ((tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "rest"))
    assert whole == rest


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of three layers in `target`, and in `draft` an adapter behind its first one."""
    folder = tmp_path_factory.mktemp("pair")
    save_tiny_target(folder / "target", num_layers=3)
    save_head(folder / "draft", folder / "target", "exit_adapter")
    return folder


def test_a_saved_adapter_is_the_one_that_was_trained(pair: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(pair / "target")
    drafter = load_drafter(pair / "draft", target=model)
    assert isinstance(drafter, ExitAdapter)
    known = describe_draft(str(pair / "draft"), describe_model(ModelConfig(path=str(pair / "target"))))
    assert known.family == "exit_adapter"
    assert known.num_parameters == sum(weight.numel() for weight in drafter.parameters())
    card = json.loads((pair / "draft" / "config.json").read_text())
    assert (card["taps"], drafter.config.exit_layer) == ([1], 1)


def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *given: str) -> str:
    """What the command says that ends before the target is loaded."""
    monkeypatch.setattr("decode.stage.load_model", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(sys, "argv", ["decode", *given, "prompt=a b"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("other", "message"),
    [({"num_layers": 3, "seed": 1}, "trained on the hidden states of"), ({"hidden_size": 64}, "fingerprint")],
)
def test_other_targets_are_refused(
    pair: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, other: dict[str, int], message: str
) -> None:
    save_tiny_target(tmp_path / "other", **other)
    said = refused(capsys, monkeypatch, f"target.path={tmp_path / 'other'}", f"draft.path={pair / 'draft'}")
    assert message in said


def test_a_mixture_refuses_it(pair: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    members = f"draft.settings.members=[ngram,{pair / 'draft'}]"
    said = refused(capsys, monkeypatch, f"target.path={pair / 'target'}", "draft=mixture", members)
    assert "is an exit adapter" in said


def test_a_target_that_is_too_shallow_for_it_is_refused(pair: Path, tmp_path: Path) -> None:
    """Also where its weights are not compared."""
    save_tiny_target(tmp_path / "one", num_layers=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    with pytest.raises(InputError, match="has one layer"):
        load_drafter(pair / "draft", target=model, check=False)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({"taps": None}, r"taps=None.*draft.head.taps=\[2\]"),
        ({"taps": [0]}, r"taps=\[0\].*counted from 1"),
        ({"taps": [-1]}, r"taps=\[-1\]"),
        ({"taps": [1, 2]}, r"taps=\[1, 2\]"),
        ({"taps": [1], "depth": 3}, "head.depth=3 is for draft=medusa"),
        ({"taps": [1], "vocab": 20}, "head.vocab=20 is for draft=medusa"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(head: dict[str, Any], message: str) -> None:
    draft = {"width": None, "family": "exit_adapter", "head": head}
    with pytest.raises(UserError, match=message):
        tiny_config(Path("out"), Path("t"), records="r", draft=draft)


@pytest.mark.parametrize("layer", [2, 3])
def test_an_exit_that_leaves_no_layer_is_refused_before_training(
    tmp_path: Path, target: Path, corpus: Path, layer: int
) -> None:
    with pytest.raises(InputError, match="2 layers"):
        run(head_config(tmp_path / "out", target, "exit_adapter", head={"taps": [layer]}, data=data_settings(corpus)))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["vllm", "sglang", "tgi", "all"])
def test_no_engine_loads_it(pair: Path, tmp_path: Path, form: Any) -> None:
    with pytest.raises(InputError, match="no engine drafts with its target's first layers|Medusa heads alone"):
        export(
            ExportConfig(
                format=form, output_dir=str(tmp_path / "out"), draft=SavedDraftConfig(path=str(pair / "draft"))
            )
        )
    assert not (tmp_path / "out").exists()
