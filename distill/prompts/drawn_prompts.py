"""Which prompts a run takes, as a pure function of corpus and seed: windows of plain text, and conversations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import islice

from transformers import PreTrainedTokenizerBase

from decode.common.errors import InputError
from distill.config import DistillConfig
from distill.corpora.corpus import Corpus, Document, Split, in_groups, unit_hash
from distill.corpora.messages import Message
from distill.prompts.chat import check_words, encode_chat, render
from distill.prompts.tokenizer import encode_texts, start_ids

DOCUMENTS_AT_ONCE = 32


@dataclass(frozen=True)
class DrawnPrompt:
    """One request: ids of plain text, or messages whose assistant turns are to be written."""

    number: int
    """Its number in the run, which is also the row of its noise."""
    document: str
    split: Split
    ids: list[int] | None = None
    """Plain text; with responses=corpus the response too."""
    messages: list[Message] | None = None

    @property
    def num_turns(self) -> int:
        """Responses to write."""
        return 1 if self.messages is None else len(turns(self.messages))


def turns(messages: Sequence[Message]) -> list[int]:
    """Where the assistant is to speak: its turns in order, and the end where the user has the last word."""
    spoken = [n for n, message in enumerate(messages) if message["role"] == "assistant" and n > 0]
    spoken = [n for n in spoken if messages[n - 1]["role"] != "assistant" and not is_kept(messages, n)]
    return spoken if messages[-1]["role"] == "assistant" else [*spoken, len(messages)]


def is_kept(messages: Sequence[Message], number: int) -> bool:
    """Whether message `number` of the assistant stays as the corpus has it: it calls a tool, whose result follows."""
    after = next((message["role"] for message in messages[number:] if message["role"] != "assistant"), None)
    return after == "tool"


def draw_prompts(corpus: Corpus, tokenizer: PreTrainedTokenizerBase, config: DistillConfig) -> Iterator[DrawnPrompt]:
    """The prompts of the training split, then those of the validation split, numbered through.

    Conversations that the chat template cannot take are left out. Raises InputError where the corpus is empty, has too
    many bad rows, or gives no prompt.
    """
    wanted: list[tuple[Split, int | None]] = [("train", config.prompts.count)]
    if config.prompts.validation_count:
        wanted.append(("validation", config.prompts.validation_count))
    drawn = 0
    for split, count in wanted:
        first = drawn
        for prompt in islice(_prompts(corpus, tokenizer, config, split), count):
            yield replace(prompt, number=drawn)
            drawn += 1
        if drawn == first:
            corpus.bad.check()
            raise InputError(f"{corpus.where}: no document of the {split} split is long enough to give a prompt")


def corpus_text(
    prompt: DrawnPrompt, tokenizer: PreTrainedTokenizerBase, config: DistillConfig
) -> tuple[list[int], list[bool]]:
    """(ids, mask of the learned ones) of a prompt whose response stands in the corpus."""
    if prompt.ids is None:
        return encode_chat(tokenizer, prompt.messages or [], prompt.document)
    first = 1 if config.data.learn_prompt else config.prompts.tokens
    return prompt.ids, [place >= first for place in range(len(prompt.ids))]


def digest(prompts: Iterable[DrawnPrompt]) -> str:
    """A hash of all prompts, by which a resumed run knows that its corpus is still the same."""
    sha = hashlib.sha256()
    for prompt in prompts:
        sha.update(json.dumps(astuple(prompt)).encode())
    return sha.hexdigest()


def _prompts(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, config: DistillConfig, split: Split
) -> Iterator[DrawnPrompt]:
    """Those of `split`, not numbered yet."""
    for group in in_groups(corpus.documents(split), DOCUMENTS_AT_ONCE):
        texts = iter(encode_texts(tokenizer, [one.text for one in group if one.text is not None]))
        for document in group:
            if document.messages is not None:
                prompt = corpus.bad.attempt(_conversation, document, tokenizer, config, split)
                if prompt is not None:
                    yield prompt
            else:
                for ids in _cut(next(texts), document.id, config):
                    yield DrawnPrompt(-1, document.id, split, start_ids(tokenizer) + ids)


def _conversation(
    document: Document, tokenizer: PreTrainedTokenizerBase, config: DistillConfig, split: Split
) -> DrawnPrompt:
    """Raises BadRow where the template cannot take it as it is to be recorded."""
    messages = document.messages or []
    if config.responses == "corpus":
        encode_chat(tokenizer, messages, document.where)
        check_words(tokenizer, messages, document.where)
    else:
        places = turns(messages)
        for place in places:
            render(tokenizer, messages[:place], document.where, prompt=True)
        check_words(tokenizer, messages[: places[-1]], document.where, _rewritten(messages))
    return DrawnPrompt(-1, document.id, split, messages=messages)


def _rewritten(messages: Sequence[Message]) -> list[int]:
    """The assistant's messages that the target writes anew, or that are dropped since they follow one."""
    return [n for n, one in enumerate(messages) if one["role"] == "assistant" and not is_kept(messages, n)]


def _cut(ids: list[int], document: str, config: DistillConfig) -> Iterator[list[int]]:
    """Windows of a document, one at a random place of each equal part of it; a short document is one window, unless
    nothing in it would be learned."""
    is_whole = config.responses == "corpus"
    length = config.prompts.tokens + (config.sampling.max_new_tokens if is_whole else 0)
    unlearned = (1 if config.data.learn_prompt else config.prompts.tokens) if is_whole else 0
    parts = max(1, min(config.prompts.per_document, len(ids) // length))
    room = (len(ids) - length + 1) / parts
    for part in range(parts):
        place = unit_hash("window", config.seed, document, part)
        start = max(0, int((part + place) * room))
        window = ids[start : start + length]
        if len(window) > unlearned:
            yield window
