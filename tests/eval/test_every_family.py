"""Every family of drafts, on two architectures, goes through everything that is measured of a draft: a report with its
curves, a certificate, a profile. A report on a head once ended in the measurement of alpha."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from decode.common.typed_config import build
from decode.models.describe import describe_loaded
from eval import stage
from eval.config import EvalConfig
from eval.modes.profile import calls, mode
from tests.decode.heads import VARIANTS, random_head
from tests.eval.test_report import write_questions
from tests.tiny import save_tiny_target, tiny_tokenizer

FAMILIES = ("lm", "medusa", "hydra", "eagle3", "mtp", "peagle", "dspark", "dflash", "dflash2", "lilicorr")
DRAFT_LM = "draft_lm"


def llama(folder: Path) -> None:
    save_tiny_target(folder, num_layers=3)


def qwen3(folder: Path) -> None:
    tokenizer, shape = tiny_tokenizer(), {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=len(tokenizer), initializer_range=0.3, eos_token_id=tokenizer.eos_token_id, **shape)  # type: ignore[arg-type]
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


TARGETS: dict[str, Callable[[Path], None]] = {"llama": llama, "qwen3": qwen3}


def save_head(family: str, target: PreTrainedModel, folder: Path) -> None:
    """With random weights, as training would export it."""
    head, known = random_head(family, target), describe_loaded(target)
    folder.mkdir()
    save_file(head.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(asdict(head.config)))
    trained_on = {"path": known.path, "fingerprint": known.fingerprint, "weights": known.weights_fingerprint}
    provenance = {"schema": 1, "family": VARIANTS[family][0], "target": trained_on}
    (folder / "draftsmith.json").write_text(json.dumps(provenance))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Architecture -> a folder with a target of it, its drafts and prompts."""
    found = {}
    for name, save in TARGETS.items():
        found[name] = folder = tmp_path_factory.mktemp(name)
        save(folder / "target")
        save_tiny_target(folder / DRAFT_LM, num_layers=1, seed=1)
        write_questions(folder / "questions.jsonl")
        target = AutoModelForCausalLM.from_pretrained(folder / "target")
        for family in FAMILIES:
            if family != "lm":
                save_head(family, target, folder / family)
    return found


def config(folder: Path, family: str, output: Path, **changes: Any) -> EvalConfig:
    """The family's draft first, so that headline, sweep, choice of a length and peers are about it."""
    drafts = {family: str(folder / family), "other": str(folder / DRAFT_LM)}
    values = {
        "output_dir": str(output),
        "target": {"path": str(folder / "target")},
        "drafts": {"lm": drafts["other"]} if family == "lm" else drafts,
        "prompts": {"file": str(folder / "questions.jsonl")},
        "decode": {"max_new_tokens": 8, "num_draft_tokens": 2},
        "timing": {
            **{"prompts": 2, "rounds": 1, "screening_prompts": 1, "screening_tokens": 4, "sweep": [1, 3]},
            **{"choose_k": [2, 3], "cost_repeats": 1},
        },
        "peers": {"num_assistant_tokens": [2], "confidence_threshold": [0.0]},
        "lossless": {"prompts": 3, "tokens": 8, "other_prompts": 2, "other_tokens": 6, "batch_size": 3},
        "certificate": {"tokens": 24, "other_tokens": 12},
        "profile": {"prompts": 1, "max_new_tokens": 6},
        "curve_temperatures": [0.0, 0.7, 1.0],
    }
    return build(EvalConfig, {**values, **changes})


def check_report(folder: Path, family: str) -> None:
    results = json.loads((folder / "results.json").read_text())
    rows = [row for row in results["rows"] if row["draft"] == family and row["category"] is None]
    assert [row["temperature"] for row in rows] == [1.0, 0.0]
    assert {row["drafter"] for row in rows} == {VARIANTS[family][0] if family != "lm" else "lm"}
    for row in rows:
        assert 0 <= row["alpha"] <= 1.0001
        assert (row["mismatches"], row["uncached_mismatches"]) == (0, 0)
        assert row["tokens_checked"] > 0
        assert row["tau"] >= 1
    points = [one for one in results["sweeps"]["temperature"]["points"] if one["draft"] == family]
    assert [one["temperature"] for one in points] == [0.0, 0.7, 1.0]
    assert all(0 <= one["alpha"] <= 1.0001 and one["tau"] >= 1 for one in points)
    assert {1, 3} <= {one["num_draft_tokens"] for one in results["sweeps"]["num_draft_tokens"]["points"]}
    assert bool(results["peers"]) == (family == "lm")
    assert "<svg" in (folder / "index.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("architecture", TARGETS)
def test_a_draft_of_every_family_is_reported_certified_and_profiled(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, family: str
) -> None:
    monkeypatch.setattr("decode.forward.runner.CAPTURE_AFTER", 10**9)  # captures would cost more than the passes do
    monkeypatch.setattr(mode, "TURNS", 1)
    monkeypatch.setattr(calls, "COST_REPEATS", 1)
    folder = folders[architecture]
    stage.run(config(folder, family, tmp_path / "report"))
    check_report(tmp_path / "report", family)
    stage.run(config(folder, family, tmp_path / "certificate", mode="certificate"))
    assert json.loads((tmp_path / "certificate/certificate.json").read_text())["failures"] == []
    stage.run(config(folder, family, tmp_path / "profile", mode="profile"))
    arms = json.loads((tmp_path / "profile/profile.json").read_text())["arms"]
    assert [arm["name"] for arm in arms] == ["own autoregressive loop", f"{family} k=2"]
