"""Folders of heads that are not whole, not of this version, or not this target's: refused before a weight is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from decode import load_drafter
from decode.drafters.describe import describe_draft
from decode.drafters.load import describe_loaded
from decode.house.errors import UserError
from tests.decode.heads import random_head
from tests.tiny import tiny_llama

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = tmp_path_factory.mktemp("target")
    tiny_llama(num_layers=6, eos_token_id=3).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture
def folder(tmp_path: Path, target: PreTrainedModel) -> Path:
    head = random_head("eagle3", target)
    known = describe_loaded(target)
    (tmp_path / "config.json").write_text(json.dumps(asdict(head.config)))
    save_file(head.state_dict(), tmp_path / "model.safetensors")
    provenance = {"schema": 1, "family": "eagle3", "target": {"path": known.path, "fingerprint": known.fingerprint}}
    (tmp_path / "draftsmith.json").write_text(json.dumps(provenance))
    return tmp_path


def test_a_whole_folder_is_loaded(folder: Path, target: PreTrainedModel) -> None:
    draft = describe_draft(str(folder), describe_loaded(target))
    head = load_drafter(folder, target=target)
    assert draft.family == "eagle3"
    assert draft.num_parameters == sum(weight.numel() for weight in head.parameters())  # type: ignore[attr-defined]


def edited(name: str, **fields: object) -> Damage:
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | fields))

    return edit


def truncated(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def emptied(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def without_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["fc.weight"]
    save_file(weights, folder / "model.safetensors")


DAMAGES: dict[str, tuple[Damage, str]] = {
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "lacks model.safetensors"),
    "half of the weights": (truncated, "damaged"),
    "a tensor less": (without_a_tensor, "fc.weight missing"),
    "an empty configuration": (emptied, "family=None"),
    "another family": (edited("config.json", family="zzz"), "family='zzz'"),
    "a field too many": (edited("config.json", more=1), "do not share the fields more"),
    "another width": (edited("config.json", mlp_width=48), "mlp.up_proj.weight"),
    "no draft tokens": (edited("config.json", depth=0), "depth=0"),
    "hidden states that are not there": (edited("config.json", taps=[0, 1, 40]), "which has 6 layers"),
    "no target": (edited("draftsmith.json", target={}), "another|trained on the hidden states of None"),
    "another target": (edited("draftsmith.json", target={"path": "x", "fingerprint": "y"}), "fingerprint y"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused(folder: Path, target: PreTrainedModel, damage: str) -> None:
    change, message = DAMAGES[damage]
    change(folder)
    with pytest.raises(UserError, match=message):
        describe_draft(str(folder), describe_loaded(target))
    with pytest.raises(UserError, match=message):
        load_drafter(folder, target=target)


def test_a_vocabulary_without_an_end_is_refused(folder: Path, target: PreTrainedModel) -> None:
    head = random_head("eagle3", target, vocab=torch.arange(0, 64, 2))
    (folder / "config.json").write_text(json.dumps(asdict(head.config)))
    save_file(head.state_dict(), folder / "model.safetensors")
    with pytest.raises(UserError, match=r"lacks the end of text \[3\]"):
        load_drafter(folder, target=target)


def test_a_target_that_came_from_nowhere_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="built in memory"):
        load_drafter(folder, target=tiny_llama(num_layers=6))
