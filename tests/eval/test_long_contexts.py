"""A target of 4,096 positions with two drafts, one of which attends over a window: trained, decoded and reported."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from decode.common.checked_json import read_json
from decode.common.typed_config import build
from eval import stage
from eval.config import EvalConfig
from eval.results.schema import read_results
from tests.tiny import save_tiny_target
from tests.train.toy import WORDS, data_settings, tiny_config, write_corpus
from train.stage import run as train

PROMPTS = (20, 20, 90, 90, 150, 150, 400, 400, 900, 900)
"""Words; the tokenizer makes several tokens of each."""


def write_prompts(file: Path) -> str:
    draw = random.Random(1)
    texts = [" ".join(draw.choice(WORDS) for _ in range(words)) for words in PROMPTS]
    lines = [{"question_id": number, "category": "words", "turns": [text]} for number, text in enumerate(texts)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return str(file)


@pytest.mark.slow
def test_a_window_from_training_to_a_report_by_length_of_the_context(tmp_path: Path) -> None:
    target = save_tiny_target(tmp_path / "target", num_layers=2, max_position_embeddings=4096, initializer_range=0.1)
    corpus = write_corpus(tmp_path / "corpus", documents=20, words=400)
    for name, draft in (("full", {}), ("window", {"window": 64, "sinks": 4})):
        changes = {"target_source": "live", "data": data_settings(corpus), "sequence_length": 512, "draft": draft}
        train(tiny_config(tmp_path / name, target, **changes))
    saved = read_json(tmp_path / "window/model/config.json")
    assert (saved["draft_window"], saved["draft_sinks"]) == (64, 4)
    report = {
        "output_dir": str(tmp_path / "report"),
        "target": {"path": str(target)},
        "drafts": {name: str(tmp_path / name) for name in ("window", "full")},
        "prompts": {"file": write_prompts(tmp_path / "prompts.jsonl")},
        "temperatures": [1.0],
        "curve_temperatures": [],
        "decode": {"max_new_tokens": 24, "num_draft_tokens": 3},
        "timing": {"prompts": 8, "rounds": 1, "screening_prompts": 2, "choose_k": [], "sweep": [], "cost_repeats": 1},
        "lossless": {"prompts": 8, "tokens": 16, "other_prompts": 8, "other_tokens": 16, "batch_size": 4},
    }
    stage.run(build(EvalConfig, report))
    results = read_results(tmp_path / "report/results.json")
    for row in (row for row in results["rows"] if row["category"] is None):
        found = row["tau_by_context"]
        assert row["mismatches"] == row["uncached_mismatches"] == 0
        assert [one["context_from"] for one in found] == sorted({one["context_from"] for one in found})
        assert found[-1]["context_from"] >= 1024
        assert len(found) > 2
        assert sum(one["passes"] for one in found) == sum(passes for _, passes in row["passes_by_prompt"])
        assert all(one["tau_ci95"] is not None for one in found if one["prompts"] > 1)
    assert "By length of the context" in (tmp_path / "report/summary.md").read_text()
    assert "draft.window" in results["peers_left_out"]
