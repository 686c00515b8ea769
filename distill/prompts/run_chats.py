"""What a run's chats are bound to when it is interrupted and goes on: the day that they speak of, and the tokenizer."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from decode.common.progress import get_logger
from decode.common.run_folder import RUN
from decode.models.chat_template import reads_clock
from decode.models.compatibility import chat_template_hash
from distill.corpora.config import DataConfig
from distill.prompts.tokenizer import tokenizer_hash

log = get_logger("distill")


def with_day(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase | None, output_dir: Path | str, has_chats: bool = False
) -> DataConfig:
    """`data` with the day on which the run in `output_dir` began, where its chat template writes the date and `data`
    names none: a run that goes over midnight, or goes on next week, would hold two kinds of prompts. `has_chats` says
    that there are some besides the corpus."""
    if data.date is not None or not (has_chats or data.has_chats) or not reads_clock(tokenizer):
        return data
    run = Path(output_dir) / "run.json"
    begun = (RUN.read(run).config.get("data") or {}).get("date") if run.is_file() else None
    found = replace(data, date=begun or date.today().isoformat())
    log.info("the chat template writes the date: all chats of this run are of %s (data.date names another)", found.date)
    return found


def bound_to(tokenizer: PreTrainedTokenizerBase | None) -> dict[str, str | None]:
    """What makes tokens of a run's texts, for `open_run`; {} without a tokenizer."""
    if tokenizer is None:
        return {}
    return {"chat_template_hash": chat_template_hash(tokenizer), "tokenizer_hash": tokenizer_hash(tokenizer)}
