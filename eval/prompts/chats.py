"""The chats among a run's prompts: written as its `data` says, and as those that its drafts were made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from decode.common.errors import InputError
from decode.common.progress import get_logger
from decode.drafters.provenance import TextOrigin, read_provenance
from decode.models.chat_template import settled
from decode.models.compatibility import load_tokenizer
from decode.models.describe import ModelDescription
from distill.corpora.config import TEXT_ALONE, DataConfig
from eval.config import EvalConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = get_logger("eval")


def check_chats_of_draft(cfg: EvalConfig, who: str, draft: str, target: ModelDescription) -> None:
    """Raise InputError where the draft learned from chats that were written otherwise than this run's prompts."""
    known = read_provenance(draft)
    if known is not None and known.data is not None and known.target is not None:
        check_same_chats(cfg, known.data, known.target.chat_template_hash, target, f"{who}={draft}")


def check_same_chats(
    cfg: EvalConfig, origin: TextOrigin, template: str | None, target: ModelDescription, who: str
) -> None:
    """The same for anything made of `origin`, by the chat template with that hash (None: not known); nothing is said of
    plain text, which has no template. Chats of other days are the same."""
    if origin.name in TEXT_ALONE or not has_chats(cfg):
        return
    here = target.chat_template_hash
    if template not in (None, here):
        raise InputError(
            f"{who} was made of chats by the chat template with hash {template}, and that of "
            f"target.path={target.path} has {here}. Give the target with the first template, or train anew on chats "
            "by the second"
        )
    for key in ("template", "system"):
        there, now = getattr(origin, key, getattr(DataConfig(), key)), getattr(cfg.data, key)
        if there != now:
            raise InputError(
                f"{who} was made of chats with data.{key}={there}, and this report asks with data.{key}={now}: it "
                f"would be judged on prompts of a kind that it never saw. Give data.{key}={there}"
            )


def has_chats(cfg: EvalConfig) -> bool:
    """Whether some of the prompts may be chats."""
    return cfg.prompts.file is not None or cfg.data.has_chats


def chat_tokenizer(cfg: EvalConfig) -> PreTrainedTokenizerBase:
    """The target's, which writes chats as `cfg.data` says; raises as `settled`."""
    return settled(load_tokenizer(cfg.target), cfg.data, cfg.data.system)
