"""Responses: every assistant turn written by the target in order, or the text of the corpus as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode import generate
from decode.drafters.base import Drafter
from decode.forward.runner import repeatable, room_for
from decode.forward.slot_stack import bucket
from decode.requests import Endings
from decode.rounds.rows import RequestState
from distill.config import DistillConfig, ResponseSampling
from distill.corpora.bad_rows import BadRow
from distill.corpora.corpus import unit_hash
from distill.corpora.messages import Message
from distill.prompts.chat import encode_prompt
from distill.prompts.drawn_prompts import DrawnPrompt, corpus_text, is_kept, turns
from distill.records.record_shards import Record


@dataclass(frozen=True)
class Response:
    """What the target wrote, its end token included, and why it stopped."""

    ids: list[int]
    finish_reason: str
    passes: int | None = field(default=None, compare=False)
    """Target passes that it took, where they were counted."""
    has_p: np.ndarray | None = field(default=None, compare=False)
    """(n,) bool of the ids: those whose p came along; None where p is to be had otherwise."""
    payload: dict[str, np.ndarray] = field(default_factory=dict, compare=False)
    """Arrays of the stores, a row for each token that has p."""


OnResponse = Callable[[int, Response, Tensor | None], None]
"""Place of a prompt among those that were asked, its response, and the hidden states of prompt and response (L, n, d)
where the runtime gives them."""


def ignored(place: int, response: Response, states: Tensor | None) -> None:
    """For who waits for all responses."""


class Sampler(Protocol):
    """Writes responses."""

    def __call__(
        self, prompts: list[list[int]], rows: list[int], seed: int, on_response: OnResponse = ignored
    ) -> list[Response]:
        """`on_response` gets each response as it ends. A text depends on its prompt, noise row and seed, not on its
        batch, and states depend on that by rounding."""
        ...


def target_sampler(
    model: PreTrainedModel,
    sampling: ResponseSampling,
    batch_size: int,
    drafter: Drafter | None = None,
    layers: tuple[int, ...] = (),
    slots: int | None = None,
) -> Sampler:
    """Samples from `model` in our own runtime, `batch_size` prompts at a time; the others take the rows of those that
    end. With a drafter the rule is the coupled one, whose noise is that of plain decoding: by the other exact rules the
    text would depend on the draft. States are those of `layers`; `slots` parts prompts of other lengths (`alike`)."""

    def sample(
        prompts: list[list[int]], rows: list[int], seed: int, on_response: OnResponse = ignored
    ) -> list[Response]:
        found: dict[int, Response] = {}

        def take(place: int, one: RequestState, states: Tensor | None) -> None:
            assert one.reason is not None
            found[place] = Response(one.tokens[one.prompt_length :], one.reason, one.passes)
            on_response(place, found[place], states)

        lengths = [len(prompt) + sampling.max_new_tokens for prompt in prompts]
        for part in alike(lengths, batch_size, slots):
            ids, attention_mask = _left_padded([prompts[place] for place in part], model)

            def took(place: int, one: RequestState, states: Tensor | None, part: list[int] = part) -> None:
                take(part[place], one, states)

            room = bucket(max(lengths[place] for place in part))  # so that batches share captures
            with repeatable(), room_for(room):  # a resumed run has captured less, and is to give the same bits
                generate(
                    model,
                    drafter,
                    ids,
                    attention_mask,
                    max_new_tokens=sampling.max_new_tokens,
                    temperature=sampling.temperature,
                    top_k=sampling.top_k,
                    top_p=sampling.top_p,
                    min_p=sampling.min_p,
                    verifier="coupled",
                    num_draft_tokens=sampling.draft.num_draft_tokens,
                    adaptive=sampling.draft.adaptive,
                    seed=seed,
                    rows=[rows[place] for place in part],
                    batch_size=batch_size,
                    endings=Endings(took, layers),
                )
        return [found[place] for place in range(len(prompts))]

    return sample


def alike(lengths: Sequence[int], batch_size: int, slots: int | None) -> list[list[int]]:
    """Places of texts, the longest first, that are written together. A pass reads every row as far as the longest one,
    so those are parted that would cost the shorter ones beside them more than passes of their own: `slots` are the
    slots of keys and values that take as long to read as a pass takes anyway; None parts nothing."""
    parts: list[list[int]] = []
    for place, length in enumerate(lengths):
        beside = min(batch_size, len(lengths) - place)
        if not parts or (slots is not None and beside * (lengths[parts[-1][0]] - length) > slots):
            parts.append([])
        parts[-1].append(place)
    return parts


Ended = Callable[[Record, Tensor | None, bool], None]
"""A record as its response ends, the states of its tokens where the runtime gives them, and whether it is the last one
of its prompt."""


def unread(record: Record, states: Tensor | None, is_last: bool) -> None:
    """For who waits for all records."""


class Writer:
    """Turns prompts into records without p."""

    def __init__(
        self,
        config: DistillConfig,
        tokenizer: PreTrainedTokenizerBase,
        sampler: Sampler | None,
        max_positions: int,
        prompts: Sequence[DrawnPrompt],
    ) -> None:
        """`sampler` may be None with responses=corpus."""
        self.config, self.tokenizer, self.sampler = config, tokenizer, sampler
        self.max_positions, self.prompts = max_positions, prompts
        self.dropped_turns = 0
        """Turns not written because their prompt leaves no room in the target's context, or the chat template refuses
        what the target has answered before."""

    def write(self, first: int, last: int, ended: Ended = unread) -> list[Record]:
        """The records of prompts first .. last - 1 in their order, the turns of a conversation one after another."""
        prompts = self.prompts[first:last]
        if self.sampler is None:
            return [record for prompt in prompts if (record := self._from_corpus(prompt)) is not None]
        histories = {prompt.number: _Conversation(prompt) for prompt in prompts}
        records: list[Record] = []
        for turn in range(max(prompt.num_turns for prompt in prompts)):
            waiting = [prompt for prompt in prompts if prompt.num_turns > turn and histories[prompt.number].is_open]
            records += self._turn(waiting, histories, turn, ended)
        return sorted(records, key=lambda record: (record.meta["prompt"], record.meta["turn"]))

    def _turn(
        self, waiting: Sequence[DrawnPrompt], histories: dict[int, _Conversation], turn: int, ended: Ended
    ) -> list[Record]:
        ready: list[tuple[DrawnPrompt, list[int]]] = []
        for prompt in waiting:
            ids = self._prompt_ids(histories[prompt.number], turn)
            if ids is None or len(ids) + self.config.sampling.max_new_tokens > self.max_positions:
                histories[prompt.number].is_open = False
                self.dropped_turns += prompt.num_turns - turn
            else:
                ready.append((prompt, ids))
        ready.sort(key=lambda pair: -len(pair[1]))  # long texts share passes, and are not left alone in the end
        records: list[Record] = []

        def on_response(place: int, response: Response, states: Tensor | None) -> None:
            prompt, ids = ready[place]
            histories[prompt.number].said(turn, self.tokenizer, response)
            records.append(self._record(prompt, turn, ids, response))
            ended(records[-1], states, turn + 1 == prompt.num_turns)

        self._sample(ready, turn, on_response)
        return records

    def _prompt_ids(self, conversation: _Conversation, turn: int) -> list[int] | None:
        """None where the template refuses an answer of the target: an empty one, Mistral's do."""
        if conversation.prompt.ids is not None:
            return conversation.prompt.ids
        try:
            return encode_prompt(self.tokenizer, conversation.before(turn), conversation.prompt.document)
        except BadRow:
            if turn == 0:
                raise
            return None

    def _sample(self, batch: list[tuple[DrawnPrompt, list[int]]], turn: int, on_response: OnResponse) -> None:
        assert self.sampler is not None
        if not batch:
            return
        # Templates drop thoughts, so a later turn may stand where an earlier one stood: it has noise of its own.
        seed = int(unit_hash("turn", self.config.seed, turn) * 2**31)
        self.sampler([ids for _, ids in batch], [prompt.number for prompt, _ in batch], seed, on_response)

    def _record(self, prompt: DrawnPrompt, turn: int, ids: list[int], response: Response) -> Record:
        whole = np.array(ids + response.ids, dtype=np.int64)
        learns_prompt = prompt.messages is None and self.config.data.learn_prompt
        mask = np.arange(len(whole)) >= (1 if learns_prompt else len(ids))
        if response.has_p is not None:  # what nothing is known of is not learned
            mask[len(ids) :] &= response.has_p
        meta = _meta(prompt, turn, len(ids), response.finish_reason)
        return Record(whole, mask, meta, response.payload, passes=response.passes)

    def _from_corpus(self, prompt: DrawnPrompt) -> Record | None:
        whole, learned = corpus_text(prompt, self.tokenizer, self.config)
        ids, mask = whole[: self.max_positions], learned[: self.max_positions]
        if prompt.messages is not None and not any(mask):
            self.dropped_turns += prompt.num_turns
            return None
        end = min(self.config.prompts.tokens, len(ids)) if prompt.messages is None else mask.index(True)
        reason = "length" if any(learned[self.max_positions :]) else "corpus"
        return Record(np.array(ids, dtype=np.int64), np.array(mask, dtype=bool), _meta(prompt, 0, end, reason))


class _Conversation:
    """A prompt and what the target has answered so far."""

    def __init__(self, prompt: DrawnPrompt) -> None:
        self.prompt = prompt
        self.is_open = True
        self.answers: dict[int, str] = {}

    def before(self, turn: int) -> list[Message]:
        """The messages before answer number `turn`, earlier answers being the target's own."""
        messages = self.prompt.messages or []
        places = turns(messages)
        history: list[Message] = []
        for number, message in enumerate(messages[: places[turn]]):
            if number in places:
                history.append({"role": "assistant", "content": self.answers[places.index(number)]})
            elif message["role"] != "assistant" or is_kept(messages, number):
                history.append(message)
        return history

    def said(self, turn: int, tokenizer: PreTrainedTokenizerBase, response: Response) -> None:
        """Remember an answer; plain text has no further turn."""
        if self.prompt.messages is not None:
            self.answers[turn] = str(tokenizer.decode(response.ids, skip_special_tokens=True))


def _left_padded(prompts: list[list[int]], model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids.to(model.device), mask.to(model.device)


def _meta(prompt: DrawnPrompt, turn: int, prompt_end: int, finish_reason: str) -> dict:
    return {
        "document": prompt.document,
        "split": prompt.split,
        "prompt": prompt.number,
        "turn": turn,
        "prompt_end": prompt_end,
        "finish_reason": finish_reason,
    }
