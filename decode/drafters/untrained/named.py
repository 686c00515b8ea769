"""The drafters that a name alone makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from decode.common.errors import InputError
from decode.config import ModelConfig
from decode.drafters.base import Drafter
from decode.drafters.untrained.config import EditConfig
from decode.drafters.untrained.edit import EditDrafter
from decode.drafters.untrained.ngram import NgramDrafter
from decode.models.compatibility import load_tokenizer


def _edit(config: EditConfig, target: PreTrainedModel) -> EditDrafter:
    if config.source is None:
        return EditDrafter()
    try:
        text = Path(config.source).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"source={config.source} is not UTF-8 text: {error}. Convert it first") from error
    tokenizer = load_tokenizer(ModelConfig(path=target.config.name_or_path))
    return EditDrafter(tokenizer(text, add_special_tokens=False)["input_ids"])


DRAFTERS: dict[str, Callable[[Any, PreTrainedModel], Drafter]] = {
    "ngram": lambda config, target: NgramDrafter(config),
    "edit": _edit,
}
"""Name -> what makes it from its settings (`config.UNTRAINED`) for a target."""
