"""Conclusions of drafts as mode=served has them: exported heads, and speeds as rows."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from decode.common.typed_config import build
from decode.config import ModelConfig
from decode.models.load import describe_model
from eval.config import EvalConfig
from eval.modes.served.folders import prepare
from eval.modes.served.schedule.conclusion import Conclusion
from eval.modes.served.schedule.of_drafts import conclusions
from tests.eval.served.test_schedule_conclusion import row
from tests.train.export.saved_heads import save_head, save_padded_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_padded_target(tmp_path_factory.mktemp("target") / "model")


def concluded(target: Path, folder: Path, rounds: int = 2) -> list[Conclusion]:
    """Of a random head; the target alone gives 100 and 400 tokens/s at the batch sizes 1 and 4."""
    save_head(folder / "head", target, "eagle3", taps=(2, 3, 4))
    content = {
        "mode": "served",
        "output_dir": str(folder / "report"),
        "target": {"path": str(target), "dtype": "float32"},
        "drafts": {"x": str(folder / "head")},
        "decode": {"num_draft_tokens": 3},
        "served": {"options": ["--enforce-eager"]},
    }
    cfg, known = build(EvalConfig, content), describe_model(ModelConfig(path=str(target)))
    draft = prepare(cfg, "x", known, folder / "report/exports/x")
    speeds = [
        *[row(None, 0, 1, 100.0), row(None, 0, 4, 400.0), row("x", 0, 1, 90.0), row("x", 0, 4, 380.0)],
        *[row("x", 3, 1, 200.0, 3.0), row("x", 3, 4, 300.0, 3.0)],
    ]
    speeds = [{**one, "tokens_per_s": one["tokens_per_s"][:rounds]} for one in speeds]
    return conclusions(cfg, [draft], speeds)


def test_a_command_serves_the_exported_folder_with_the_options_of_the_measurement(target: Path, tmp_path: Path) -> None:
    (found,) = concluded(target, tmp_path)
    vllm = found.pastes[0]
    words = shlex.split(vllm.text)
    assert words[:3] == ["vllm", "serve", str(target)]
    assert words[-3:] == ["--dtype", "float32", "--enforce-eager"]
    spoken = json.loads(words[words.index("--speculative-config") + 1])
    assert spoken["model"] == str(tmp_path / "report/exports/x")
    assert spoken["num_speculative_tokens_per_batch_size"] == [[1, 1, 3], [2, 4, 0]] == found.schedule


def test_other_engines_are_given_exports_of_their_own(target: Path, tmp_path: Path) -> None:
    (found,) = concluded(target, tmp_path)
    texts = {one.engine: one.text for one in found.pastes[1:]}
    assert {"sglang", "trtllm", "llamacpp"} <= texts.keys()
    for engine, text in texts.items():
        first = text.splitlines()[0]
        assert f"format={engine} num_draft_tokens=3 output_dir={tmp_path / 'report/exports/x'}-{engine}" in first
        assert f"exports/x-{engine}" in text.replace(first, "")


def test_one_round_concludes_nothing(target: Path, tmp_path: Path) -> None:
    assert concluded(target, tmp_path, rounds=1) == []
