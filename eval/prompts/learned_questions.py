"""Questions of prompts.file that the drafts have learned from: what is measured of them says nothing of new text."""

from __future__ import annotations

from collections.abc import Sequence

from decode.common.errors import InputError
from decode.common.progress import get_logger
from distill.corpora.config import DataConfig
from eval.prompts.questions import Question

log = get_logger("eval")


def warn_of_learned(file: str, questions: Sequence[Question], data: DataConfig) -> None:
    """Where conversations of the corpus that the drafts were trained on, its held-out split aside, open so. Nothing is
    said of a corpus on the hub, of plain text, and of one that is not here."""
    if data.name == "hub" or not data.has_chats:
        return
    try:
        known = _learned_openings(data)
    except InputError:  # the drafts may have been trained on another machine
        return
    learned = sum(one.turns[0].strip() in known for one in questions)
    if learned:
        log.warning(
            "%s: %d of its %d questions open conversations of data.path=%s that the drafts were trained or validated "
            "on, so figures over them are better than those over new text. Leave them out, or leave prompts.file out: "
            "held-out conversations are asked then",
            *(file, learned, len(questions), data.path),
        )


def _learned_openings(data: DataConfig) -> set[str]:
    from distill.corpora.configured import load_corpus
    from distill.corpora.corpus import first_question, split_of

    learned = (one for one in load_corpus(data).everything() if split_of(one, data) != "heldout")
    return {(first_question(one) or "").strip() for one in learned}
