"""What is reported is held-out text, and settings are chosen on other text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decode.common.typed_config import build
from distill.corpora.configured import load_corpus
from distill.corpora.tasks import task_prompts
from eval.arms.vllm_engines import Engines
from eval.config import EvalConfig
from eval.measure.cells import Cell
from eval.modes.compare import drafters, mode, texts
from eval.modes.compare.arm_set import Target
from eval.modes.compare.drafters import Drafters, LoadedDrafters
from eval.modes.compare.texts import load_texts
from eval.prompts.kinds import TextPrompts
from eval.prompts.prompt import Prompt
from eval.results.compared import Choice
from tests.eval.compare.tiny_comparison import values, write_sources
from tests.tiny import tiny_tokenizer

TEXTS = ("code", "prose", "free", "edit", "answer", "log")


def config(folder: Path) -> EvalConfig:
    return build(EvalConfig, values(folder) | {"drafts": {}})


def loaded(monkeypatch: pytest.MonkeyPatch, cfg: EvalConfig, text: str) -> TextPrompts:
    monkeypatch.setattr(texts, "chat_tokenizer", lambda _: tiny_tokenizer())
    target = Target("target", cfg.target, cast(Any, None), (text,), {}, 2048)
    return load_texts(Drafters(cfg), target)[text]


@pytest.mark.parametrize("text", TEXTS)
def test_held_out_text_is_reported_and_validation_text_settles_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    write_sources(tmp_path / "sources")
    cfg = config(tmp_path)
    found = loaded(monkeypatch, cfg, text)
    splits = {split: {one.id for one in load_corpus(cfg.data).documents(split)} for split in ("heldout", "validation")}
    assert {prompt.document for prompt in found.reported} <= splits["heldout"]
    assert {prompt.document for prompt in found.screening} <= splits["validation"]
    assert (len(found.reported), len(found.screening)) == (2, 1)


def test_a_task_is_asked_as_it_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to where the answer begins, in the tokens of the whole text."""
    write_sources(tmp_path / "sources")
    cfg, tokenizer = config(tmp_path), tiny_tokenizer()
    (prompt, *_) = loaded(monkeypatch, cfg, "edit").reported
    (task, *_) = task_prompts("edit", replace(cfg.data, name="tasks"), "heldout", 2)
    whole = tokenizer(task.prompt + task.answer, add_special_tokens=False)["input_ids"]
    assert list(prompt.ids) == whole[: len(prompt.ids)]
    assert tokenizer.decode(list(prompt.ids)) == task.prompt


def test_a_cell_chooses_on_screening_prompts_and_times_reported_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(Path("nowhere"))
    sets = TextPrompts([Prompt("reported", None, (1,))] * 4, [Prompt("screening", None, (1,))] * 4)
    target: Any = SimpleNamespace(key="target", families={}, refused={})
    loaded = LoadedDrafters(Drafters(cfg), target, cast(Any, None), {}, Engines(), {"edit": sets})
    families = {"ngram": {"k=2": SimpleNamespace(name="a"), "k=3": SimpleNamespace(name="b")}}
    seen: dict[str, list[str]] = {}

    def tried(cfg: Any, cell: Any, families: Any, prompts: Any) -> dict[str, Any]:
        seen["chosen on"] = [prompt.id for prompt in prompts]
        return {"best": {"ngram": "k=3"}}

    def timed(self: Any, cell: Any, arms: Any, drafted: Any, prompts: Any) -> dict[str, Any]:
        seen["timed"] = [prompt.id for prompt in prompts]
        return {}

    monkeypatch.setattr(drafters, "tried_settings", tried)
    for name, value in {"families": families, "warm_up": None, "warm_arms": []}.items():
        monkeypatch.setattr(LoadedDrafters, name, lambda *_, value=value: value)
    monkeypatch.setattr(mode.CellRun, "time", timed)
    cell = Cell(1, 0.0, "edit")
    mode.measure(loaded, cell, Choice.model_construct(**loaded.choose(cell)))
    assert seen == {"chosen on": ["screening"], "timed": ["reported"] * 2}
