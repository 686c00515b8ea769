"""A tiny target with a chat template, and a run on chats with it."""

import json
from datetime import date
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from distill.config import DistillConfig, PromptConfig
from distill.corpora.config import DataConfig
from distill.prompts import run_chats
from tests.distill.runs import tiny_config
from tests.tiny import save_tiny_target

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if think is defined and not think %}<think></think>{% endif %}"
    "{% endif %}"
)
DATED = "{{ strftime_now('%d %b %Y') }}\n" + CHATML
WITHOUT_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML


def set_template(folder: Path, template: str) -> None:
    """Give the target in `folder`, which is made where it is missing, this chat template."""
    if not folder.exists():
        save_tiny_target(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def write_chats(folder: Path, system: str | None = None, count: int = 40) -> Path:
    """Chats of one question and one answer."""
    file = folder / "chats.jsonl"
    opening = [] if system is None else [{"role": "system", "content": system}]
    chats = [
        [*opening, {"role": "user", "content": f"def f{n}"}, {"role": "assistant", "content": f"return {n}"}]
        for n in range(count)
    ]
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return file


def chats_of(folder: Path, **data: object) -> DataConfig:
    """The corpus that `write_chats` wrote, or writes now."""
    file = folder / "chats.jsonl"
    path = file if file.exists() else write_chats(folder)
    return DataConfig(name="jsonl", path=str(path), validation_share=0.2, heldout_share=0.2, **data)  # type: ignore[arg-type]


def chat_config(
    folder: Path, template: str = CHATML, data: DataConfig | None = None, **fields: object
) -> DistillConfig:
    """A run on chats of the target in `folder`, which has `template` if it is made now."""
    if not (folder / "target").exists():
        set_template(folder / "target", template)
    base = {"data": data or chats_of(folder), "prompts": PromptConfig(count=10, validation_count=3)}
    return tiny_config(folder, **base | fields)  # type: ignore[arg-type]


def on_day(day: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the clock says from now on."""

    class Frozen(date):
        @classmethod
        def today(cls) -> date:
            return date.fromisoformat(day)

    monkeypatch.setattr(run_chats, "date", Frozen)
