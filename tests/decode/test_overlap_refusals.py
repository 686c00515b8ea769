"""Who cannot draft ahead, or on a device of its own, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from decode import generate, load_drafter
from decode.common.environment import resolve_device
from decode.common.errors import ConfigError, InputError
from decode.config import DecodeConfig, DrafterConfig, ModelConfig, SamplingConfig
from decode.drafters.beside.refusals import REASONS, UNNAMED
from decode.drafters.lm import LMDraft
from decode.drafters.untrained.config import UNTRAINED
from decode.stage import run
from tests.decode.drafters import Oracle
from tests.decode.heads import random_head
from tests.tiny import save_tiny_target, tiny_llama
from tests.train.export.saved_heads import save_head

IDS = torch.tensor([[1, 2, 3]])
CONFIDENT: dict[str, Any] = {"adaptive": True, "confidence": True}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("ngram", "looks its tokens up"),
        ("jacobi", "in the target's own passes"),
        ("medusa", "hidden states"),
        ("oracle", "is no draft language model"),
    ],
)
def test_other_drafters_say_why(name: str, why: str) -> None:
    model: PreTrainedModel = tiny_llama()
    drafter: Any = Oracle([], 64) if name == "oracle" else None
    drafter = random_head(name, model) if name == "medusa" else drafter or load_drafter(name, target=model)
    with pytest.raises(ConfigError, match=f"overlap=true .*{why}"):
        generate(model, drafter, IDS, overlap=True)


@pytest.mark.parametrize("settings", [{"tree": "2x1"}, {"adaptive": True}, CONFIDENT])
def test_only_chains_of_one_length_are_drafted_ahead(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="overlap=true"):
        SamplingConfig(overlap=True, **settings)


def test_a_head_is_found_out_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_target(tmp_path / "target")
    save_head(tmp_path / "head", tmp_path / "target", "medusa")
    monkeypatch.setattr("decode.stage.load_model", lambda *_: pytest.fail("weights were loaded"))
    target = ModelConfig(path=str(tmp_path / "target"))
    cases: list[tuple[str | None, dict[str, Any], str]] = [
        (None, {"overlap": True}, "hidden states"),
        ("cpu", {}, "device of its own"),
        (None, CONFIDENT, r"decode\.confidence=true.*predicts nothing"),
    ]
    for device, settings, message in cases:
        draft = DrafterConfig(path=str(tmp_path / "head"), device=device)
        with pytest.raises(ConfigError, match=message):
            run(DecodeConfig(target, draft, SamplingConfig(**settings), prompt="a"))


@pytest.mark.parametrize("name", ["lm", "medusa", "dflash", "ngram"])
def test_no_round_ends_by_what_a_draft_does_not_predict(name: str) -> None:
    model: Any = tiny_llama(num_layers=6)
    made = {"lm": lambda: LMDraft(tiny_llama()), "ngram": lambda: load_drafter("ngram", target=model)}
    drafter: Any = made.get(name, lambda: random_head(name, model))()
    with pytest.raises(ConfigError, match="confidence=true .*predicts nothing.*adaptive=true alone"):
        generate(model, drafter, IDS, **CONFIDENT)


def test_a_draft_is_loaded_where_it_is_asked_for(tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path, tiny_llama(), check=False, device="cpu")
    assert isinstance(loaded, LMDraft)
    assert loaded.device == torch.device("cpu")
    with pytest.raises(InputError, match=r"on cpu in .*, and meta and .* are asked for"):
        load_drafter(model, tiny_llama(), device="meta")
    with pytest.raises(ConfigError, match=r"device=cpu, and ngram is no draft language model"):
        load_drafter("ngram", model, device="cpu")


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_device("cuda") == torch.device("cuda")
    with pytest.raises(InputError, match="device=cuda:1, but torch sees 1 CUDA devices"):
        resolve_device("cuda:1")


def test_every_drafter_without_training_has_a_reason() -> None:
    assert set(REASONS) - {UNNAMED} == set(UNTRAINED)
