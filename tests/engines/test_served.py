"""`mode=served` from end to end: a user's drafts in vLLM's own server, counted there and here."""

import json
from pathlib import Path
from typing import Any

import pytest

from decode.common.typed_config import build
from eval import stage
from eval.config import EvalConfig
from tests.engines.environment import vllm_python
from tests.engines.toys import PROMPTS, Toys

pytestmark = pytest.mark.engines
DRAFTS = ("lm", "eagle3", "medusa")


def settings(toys: Toys, folder: Path, drafts: tuple[str, ...] = DRAFTS, **served: Any) -> EvalConfig:
    questions = folder / "questions.jsonl"
    texts = [" ".join(f"w{token}" for token in prompt) for prompt in PROMPTS]
    questions.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts), encoding="utf-8")
    content = {
        "mode": "served",
        "output_dir": str(folder / "report"),
        "target": {"path": str(toys.target("llama")), "dtype": "float32"},
        "drafts": {name: str(toys.run("llama", name) / "model") for name in drafts},
        "prompts": {"file": str(questions)},
        "temperatures": [0.0, 1.0],
        "decode": {"max_new_tokens": 40, "num_draft_tokens": 3},
        "served": {
            "python": vllm_python(),
            "options": ["--enforce-eager", "--num-gpu-blocks-override", "32"],
            "prompts": len(PROMPTS),
            "batch_sizes": [],
            **served,
        },
    }
    return build(EvalConfig, content)


def test_counters_are_equal_in_a_server(toys: Toys, tmp_path: Path) -> None:
    stage.run(settings(toys, tmp_path))
    results = json.loads((tmp_path / "report/results.json").read_text())
    found = {(one["draft"], one["temperature"]): one for one in results["comparisons"]}
    for name in DRAFTS:
        greedy, drawn = found[name, 0.0], found[name, 1.0]
        assert greedy["verdict"] == "equal"
        assert greedy["engine"] == greedy["ours"]
        assert greedy["equal_prompts"] == greedy["same_texts"] == len(PROMPTS)
        assert all(0 < share < 1 for share in greedy["engine"]["acceptance_by_position"])
        assert drawn["verdict"] == "within intervals"
        assert drawn["engine"]["accepted"] != greedy["engine"]["accepted"]
    assert results["engine"]["version"]
    assert "accepts of every draft what our decoder accepts" in (tmp_path / "report/summary.md").read_text()
