"""What a later report will find held out, counted while the shares can still be changed: after training they cannot."""

from __future__ import annotations

from itertools import islice
from math import ceil

from transformers import PreTrainedTokenizerBase

from decode.common.checked_json import Content, Count
from distill.corpora.corpus import Corpus, Document, split_of
from distill.corpora.messages import Message
from distill.prompts.chat import check_words, render
from distill.prompts.tokenizer import encode_texts

REPORT_PROMPTS = 96
"""That a report checks unless told otherwise (lossless.prompts), each a chat or a window of text."""
WINDOW = 128
"""Tokens of such a window (prompts.tokens)."""
LEAST_PROMPTS = 8
"""Below that a report has no interval worth printing."""
MOST_READ = 20_000
"""Documents looked at: a corpus may have millions."""
LARGEST_SHARE = 0.3


class HeldOutCount(Content):
    """Documents of the held-out split, and the prompts that a report would make of them."""

    documents: Count
    prompts: Count
    is_all: bool
    """Whether the corpus was read to its end; else there are at least as many."""

    def line(self) -> str:
        """For a plan."""
        least = "" if self.is_all else "at least "
        return f"{least}{self.documents:,} documents, {self.prompts:,} prompts of a later report"

    def warning(self, share: float) -> str | None:
        """What to say where `share`, data.heldout_share, leaves a report few prompts; None where it has enough, and
        where nothing was to be held out."""
        if self.prompts >= REPORT_PROMPTS or not self.is_all or not share:
            return None
        means = "too few for a report" if self.prompts < LEAST_PROMPTS else "its intervals will be wide"
        more = min(LARGEST_SHARE, ceil(100 * share * REPORT_PROMPTS / max(1, self.prompts)) / 100)
        raised = f"data.heldout_share={more:g} in place of {share:g}, or " if more > share else ""
        return (
            f"a report on this corpus will find {self.prompts:,} of the {REPORT_PROMPTS} held-out prompts that it asks "
            f"for (a chat, or a window of {WINDOW} tokens; {self.documents:,} held-out documents): {means}. What was "
            f"trained on cannot be held out later, so now use {raised}more documents"
        )


def opening_of(document: Document, tokenizer: PreTrainedTokenizerBase) -> list[Message]:
    """A conversation up to its first question, of which a report makes a prompt, [] where nobody asks; BadRow where the
    chat template cannot take it."""
    messages = document.messages or []
    asked = next((place for place, one in enumerate(messages) if one["role"] == "user"), None)
    opening = [] if asked is None else messages[: asked + 1]
    if opening and tokenizer.chat_template is not None:
        render(tokenizer, opening, document.where, prompt=True)
        check_words(tokenizer, opening, document.where)
    return opening


def count_held_out(corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> HeldOutCount:
    """Of the first MOST_READ documents, until a report has enough."""
    config = corpus.config
    most = min(MOST_READ, config.max_documents or MOST_READ)
    documents = prompts = read = 0
    for document in islice(corpus.everything() if config.heldout_share else (), most):
        read += 1
        if split_of(document, config) != "heldout":
            continue
        documents += 1
        if document.messages is not None:
            prompts += bool(corpus.bad.attempt(opening_of, document, tokenizer))
        else:
            prompts += len(encode_texts(tokenizer, [document.text or ""])[0]) // WINDOW
        if prompts >= REPORT_PROMPTS:
            return HeldOutCount(documents=documents, prompts=prompts, is_all=False)
    return HeldOutCount(documents=documents, prompts=prompts, is_all=read < most or read == config.max_documents)
