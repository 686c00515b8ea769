"""What is reported is held-out text, and settings are chosen on other text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from decode.common.typed_config import build
from distill.corpora import load_corpus
from distill.corpora.tasks import task_prompts
from eval.config import EvalConfig
from eval.measure.cells import Cell
from eval.modes.drafters import arms
from eval.modes.drafters.texts import load_texts
from eval.prompts.kinds import TextPrompts
from eval.prompts.prompt import Prompt
from tests.eval.drafters.tiny_comparison import values, write_sources
from tests.tiny import tiny_tokenizer

TEXTS = ("code", "free", "edit", "answer", "log")


def config(folder: Path) -> EvalConfig:
    return build(EvalConfig, values(folder) | {"drafts": {}})


@pytest.mark.parametrize("text", TEXTS)
def test_held_out_text_is_reported_and_validation_text_settles_settings(tmp_path: Path, text: str) -> None:
    write_sources(tmp_path / "sources")
    cfg = config(tmp_path)
    found = load_texts(cfg, [text], tiny_tokenizer(), 2048)[text]
    splits = {split: {one.id for one in load_corpus(cfg.data).documents(split)} for split in ("heldout", "validation")}
    assert {prompt.document for prompt in found.reported} <= splits["heldout"]
    assert {prompt.document for prompt in found.screening} <= splits["validation"]
    assert (len(found.reported), len(found.screening)) == (2, 1)


def test_a_task_is_asked_as_it_was_trained(tmp_path: Path) -> None:
    """Up to where the answer begins, in the tokens of the whole text."""
    write_sources(tmp_path / "sources")
    cfg, tokenizer = config(tmp_path), tiny_tokenizer()
    (prompt, *_) = load_texts(cfg, ["edit"], tokenizer, 2048)["edit"].reported
    (task, *_) = task_prompts("edit", replace(cfg.data, name="tasks"), "heldout", 2)
    whole = tokenizer(task.prompt + task.answer, add_special_tokens=False)["input_ids"]
    assert list(prompt.ids) == whole[: len(prompt.ids)]
    assert tokenizer.decode(list(prompt.ids)) == task.prompt


def test_a_cell_chooses_on_screening_prompts_and_times_reported_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(Path("nowhere"))
    sets = TextPrompts([Prompt("reported", None, (1,))] * 4, [Prompt("screening", None, (1,))] * 4)
    stock: Any = SimpleNamespace(
        cfg=cfg,
        texts={"edit": sets},
        families=lambda cell: {"ngram": {"k=2": SimpleNamespace(name="a"), "k=3": SimpleNamespace(name="b")}},
        warm_up=lambda *_: None,
        target=SimpleNamespace(ways=lambda *_: [], key="target"),
        model=None,
        engines=SimpleNamespace(version=None),
    )
    seen: dict[str, list[str]] = {}

    def tried(cfg: Any, cell: Any, families: Any, prompts: Any) -> dict[str, Any]:
        seen["chosen on"] = [prompt.id for prompt in prompts]
        return {"best": {"ngram": "k=3"}}

    def timed(self: Any, cell: Any, arms: Any, drafted: Any, prompts: Any) -> dict[str, Any]:
        seen["timed"] = [prompt.id for prompt in prompts]
        return {}

    monkeypatch.setattr(arms, "tried_settings", tried)
    monkeypatch.setattr(arms, "warm_arms", lambda *_: [])
    monkeypatch.setattr(arms, "left_out", lambda *_: {})
    monkeypatch.setattr(arms.CellRun, "time", timed)
    cell = Cell(1, 0.0, "edit")
    arms.measure(stock, cell, arms.choose(stock, cell))
    assert seen == {"chosen on": ["screening"], "timed": ["reported"] * 2}
