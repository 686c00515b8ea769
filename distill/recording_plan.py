"""What a run would do before it does it: prompts, tokens and bytes, and whether they fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from decode.common.errors import ConfigError, InputError
from decode.models.describe import ModelDescription
from distill.config import DistillConfig
from distill.corpora.bad_rows import BadRowCount
from distill.prompts.chat import encode_prompt
from distill.prompts.cut_answers import CutAnswers, cut_at
from distill.prompts.drawn_prompts import DrawnPrompt, corpus_text, turns
from distill.prompts.held_out_count import HeldOutCount
from distill.records.distribution_stores import Layout
from distill.records.feature_codes import FeatureLayout
from distill.records.record_folder import RecordFolder

MAX_SHARD_BYTES = 2 << 30  # a shard is built in memory, and the one before is on its way to the disk


@dataclass(frozen=True)
class RecordingPlan:
    """Upper bounds of a run: every response as long as it may be."""

    prompts: Counter[str]
    """Prompts by split."""
    documents: int
    responses: int
    """Responses to write; a conversation has several."""
    tokens: int
    """Tokens of all sequences."""
    learned_tokens: int
    """Tokens whose p is recorded."""
    too_long: int
    """Conversations left out because their first prompt and a response exceed the target's context."""
    layout: Layout
    shard_size: int
    num_shards: int
    """Shards of all ranks together."""
    num_parameters: int
    cut: CutAnswers | None
    """What of the corpus's own answers does not fit into the target's context; None where the target writes them."""
    longest: int
    """Tokens of the longest sequence, at most: what an engine has to make room for."""
    held_out: HeldOutCount | None
    """Of the corpus; None where records of an earlier version, which do not say it, are scored again."""
    bad_rows: BadRowCount | None
    """The same."""

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of all shards; their headers are not counted."""
        whole, unlearned = self.layout.bytes_per_token, self.layout.unlearned_bytes_per_token
        return self.tokens * unlearned + self.learned_tokens * (whole - unlearned)

    def lines(self) -> list[str]:
        """The plan in words, a fact a line."""
        prompts = ", ".join(f"{count:,} {split}" for split, count in self.prompts.items())
        left_out = f", {self.too_long:,} of them longer than the context and left out" if self.too_long else ""
        stores = "".join(f"{store.name} {store.bytes_per_token}, " for store in self.layout.stores)
        features = ""
        if self.layout.features is not None:
            kept = self.layout.features
            features = f"{kept.code} features of {len(kept.layers)} layers {kept.bytes_per_token} of every token, "
        return [
            f"target parameters     {self.num_parameters:,}",
            f"documents             {self.documents:,}",
            *([f"left out              {self.bad_rows.line()}"] if self.bad_rows else []),
            f"prompts               {prompts}{left_out}",
            *([] if self.held_out is None else [f"held out              {self.held_out.line()}"]),
            f"responses             {self.responses:,}",
            *([f"cut                   {self.cut.line()}"] if self.cut is not None and self.cut.answers else []),
            f"tokens, at most       {self.tokens:,}, of which are learned: {self.learned_tokens:,}",
            f"bytes a token         {self.layout.bytes_per_token} ({stores}{features}text "
            f"{self.layout.text_bytes_per_token})",
            f"bytes on disk         {self.bytes_on_disk:,} at most, in {self.num_shards:,} shards",
        ]


def make_plan(
    prompts: Sequence[DrawnPrompt],
    held_out: HeldOutCount,
    bad_rows: BadRowCount | None,
    tokenizer: PreTrainedTokenizerBase,
    target: ModelDescription,
    config: DistillConfig,
) -> RecordingPlan:
    """The plan of a run. Raises InputError where a prompt leaves no room in the context, ConfigError for too big
    shards."""
    layout = _layout(target, config)
    of_split, documents, responses, sizes = Counter(), set(), 0, []
    for prompt in prompts:  # once, since they may lie on the disk
        of_split[prompt.split] += 1
        documents.add(prompt.document)
        sizes.append(_size(prompt, tokenizer, target, config))
        responses += prompt.num_turns if sizes[-1].tokens else 0
    answers, lost = sum(size.cut_answers for size in sizes), sum(size.cut_tokens for size in sizes)
    cut = CutAnswers(answers=answers, tokens=lost, limit=target.max_positions)
    plan = RecordingPlan(
        prompts=of_split,
        documents=len(documents),
        responses=responses if config.responses == "target" else 0,
        tokens=sum(size.tokens for size in sizes),
        learned_tokens=sum(size.learned for size in sizes),
        too_long=sum(not size.tokens for size in sizes),
        layout=layout,
        shard_size=config.records.shard_size,
        num_shards=ceil(len(prompts) / config.records.shard_size),
        num_parameters=target.num_parameters,
        cut=cut if config.responses == "corpus" else None,
        longest=max(size.longest for size in sizes),
        held_out=held_out,
        bad_rows=bad_rows,
    )
    if plan.too_long == len(prompts):
        fewer, room = (
            ("", "one token of an answer")
            if config.responses == "corpus"
            else ("fewer sampling.max_new_tokens or ", f"a response of {config.sampling.max_new_tokens} tokens")
        )
        raise InputError(
            f"none of the {len(prompts)} conversations leaves room for {room} in the {target.max_positions} positions "
            f"of {target.path}; use {fewer}shorter conversations"
        )
    _check(plan)
    return plan


def plan_of_records(folder: RecordFolder, target: ModelDescription, config: DistillConfig) -> RecordingPlan:
    """The plan of a run that scores the texts of `folder` again; ConfigError for too big shards."""
    first = np.unique(folder.prompts, return_index=True)[1]
    plan = RecordingPlan(
        prompts=Counter(folder.split_of(int(index)) for index in first),
        documents=len({document for shard in folder.shards for document in shard.documents}),
        responses=0,
        tokens=folder.manifest.counts.tokens,
        learned_tokens=folder.manifest.counts.learned_tokens,
        too_long=0,
        layout=_layout(target, config),
        shard_size=config.records.shard_size,
        num_shards=ceil((int(folder.prompts[-1]) + 1) / config.records.shard_size),  # some prompts have no record
        num_parameters=target.num_parameters,
        cut=folder.manifest.cut,
        longest=int(folder.lengths.max()),
        held_out=folder.manifest.held_out,
        bad_rows=folder.manifest.bad_rows,
    )
    _check(plan)
    return plan


def _layout(target: ModelDescription, config: DistillConfig) -> Layout:
    kept = config.records
    dtype = "float32" if target.dtype_name == "float64" else target.dtype_name
    features = FeatureLayout.of(kept.features, target.hidden_size)
    sizes = (target.vocab_size, target.hidden_size)
    return Layout(list(kept.store), *sizes, dtype, kept.head, kept.tail, kept.topk, features)


class _Size(NamedTuple):
    """Of the records of one prompt, at most."""

    tokens: int
    learned: int
    longest: int
    cut_answers: int = 0
    cut_tokens: int = 0


def _size(
    prompt: DrawnPrompt, tokenizer: PreTrainedTokenizerBase, target: ModelDescription, config: DistillConfig
) -> _Size:
    """None where the first response has no room in the context."""
    limit, room = target.max_positions, config.sampling.max_new_tokens
    if config.responses == "corpus":
        ids, mask = corpus_text(prompt, tokenizer, config)
        is_left_out = prompt.messages is not None and any(mask) and not any(mask[:limit])
        kept = 0 if is_left_out else min(len(ids), limit)
        return _Size(kept, sum(mask[:kept]), kept, *cut_at(limit, mask))
    if prompt.ids is not None:
        length = len(prompt.ids)
        if length + room > limit:
            raise InputError(
                f"a prompt of {length} tokens and a response of {room} do not fit into the {limit} positions of "
                f"{target.path}; use fewer prompts.tokens or sampling.max_new_tokens"
            )
        return _Size(length + room, room + (length - 1 if config.data.learn_prompt else 0), length + room)
    messages = prompt.messages or []
    # Each turn is recorded with the text before it, in which the target's own answers stand for those of the corpus.
    first, *rest = [
        len(encode_prompt(tokenizer, messages[:turn], prompt.document)) + number * room
        for number, turn in enumerate(turns(messages))
    ]
    if first + room > limit:
        return _Size(0, 0, 0)
    tokens = sum(min(length + room, limit) for length in (first, *rest))
    # Bytes that are no text come back from the tokenizer as three each, and a token may be one byte.
    longest = max(length + 2 * number * room for number, length in enumerate((first, *rest))) + room
    return _Size(tokens, room * (1 + len(rest)), min(longest, limit))


def _check(plan: RecordingPlan) -> None:
    _check_shards(plan)
    components = plan.layout.features.components if plan.layout.features else 0
    if plan.tokens <= components:
        raise ConfigError(
            f"{components} components of the hidden states cannot be fitted to {plan.tokens} tokens, which are all "
            "that the run has; use more prompts, fewer records.features.components, or records.features.code=int8"
        )


def _check_shards(plan: RecordingPlan) -> None:
    shard = plan.bytes_on_disk / max(1, plan.num_shards)
    if shard > MAX_SHARD_BYTES:
        kept = [*plan.layout.store, *(["hidden states"] if plan.layout.features else [])]
        fitting = max(1, int(plan.shard_size * MAX_SHARD_BYTES / shard))
        raise ConfigError(
            f"a shard of records.shard_size={plan.shard_size} prompts would take {shard / 1e9:.1f} GB, and it is "
            f"built in memory; use records.shard_size={fitting} or less, or keep less than {', '.join(kept)}"
        )
