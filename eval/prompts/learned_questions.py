"""Questions of prompts.file that the drafts have learned from: what is measured of them says nothing of new text."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from decode.common.errors import InputError
from decode.common.progress import get_logger
from distill.corpora.config import DataConfig
from eval.prompts.questions import Question, questions_of

if TYPE_CHECKING:
    from eval.config import EvalConfig

log = get_logger("eval")


def asked_questions(cfg: EvalConfig) -> list[Question]:
    """Those of prompts.file, with a warning where conversations of the corpus that the drafts were trained on, its
    held-out split aside, open so. Nothing is said of a corpus on the hub, of plain text, and of one that is not here:
    the drafts may have been trained on another machine."""
    questions, data = questions_of(cfg.prompts), cfg.data
    learned = 0
    if data.name != "hub" and data.has_chats:
        with suppress(InputError):
            known = _learned_openings(data)
            learned = sum(one.turns[0].strip() in known for one in questions)
    if learned:
        log.warning(
            "%s: %d of its %d questions open conversations of %s that the drafts were trained or validated "
            "on, so figures over them are better than those over new text. Leave them out, or leave prompts.file out: "
            "held-out conversations are asked then",
            *(cfg.prompts.file, learned, len(questions), data.path or f"data={data.name}"),
        )
    return questions


def _learned_openings(data: DataConfig) -> set[str]:
    from distill.corpora.configured import load_corpus
    from distill.corpora.corpus import first_question, split_of

    learned = (one for one in load_corpus(data).everything() if split_of(one, data) != "heldout")
    return {(first_question(one) or "").strip() for one in learned}
