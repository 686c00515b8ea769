"""manifest.json of a record folder: what it says of the target, the layout, the texts and the shards, checked whole."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from decode.common.checked_json import Amount, Content, Count, JsonFile, PlainPath, Seed, Sha256, Size, Text
from decode.common.run_folder import RunEnd
from decode.drafters.provenance import TextOrigin
from distill.corpora.bad_rows import BadRowCount
from distill.engines.config import RuntimeName
from distill.prompts.cut_answers import CutAnswers
from distill.prompts.held_out_count import HeldOutCount
from distill.records.config import StoreName
from distill.records.distribution_stores import Layout
from distill.records.recorded_drafts import Drafting, RecordedDraft
from distill.time_spent import TimeSpent

RECORDS_VERSION = 2
COUNTS = ("bytes", "records", "tokens", "learned_tokens")
FinishReason = Literal["length", "eos", "stop", "corpus"]


class RecordedTarget(Content):
    """What of a target its records are bound to."""

    path: Text
    fingerprint: Text
    vocab_size: Size
    token_map_hash: Sha256 | None
    chat_template_hash: Sha256 | None
    weights: Text | None = None
    """Fingerprint of the weights in memory that made them; None of an engine's or a server's."""
    quantization: Text | None = None
    """The scheme that quantised the target as it was loaded (target.quantization)."""


class RecordedServer(Content):
    """A server that wrote the responses."""

    url: Text
    model: Text
    """What it calls the target."""
    token_ids: Literal["told", "of logprobs", "of the text"]
    """How the ids of its tokens are known: it says them, it names the tokens of its log-probabilities by them, or its
    text was cut into tokens again."""


class RecordedRuntime(Content):
    """What ran the target: another engine, version or precision rounds otherwise, so that texts and p differ."""

    name: RuntimeName
    version: Text
    """Of transformers or of the engine."""
    dtype: Text
    """`unknown` of a server that does not say it."""
    draft: RecordedDraft | None = None
    """Of an engine whose texts depend on it; our own decoder's do not."""
    log_p: list[Annotated[float, Field(allow_inf_nan=False)]] | None = None
    """What a server gave of a fixed text: the log-probability of each of its tokens, or of the likeliest ones behind
    it."""
    server: RecordedServer | None = None
    """With runtime=openai."""


class FileSummary(Content):
    """A file of the folder."""

    file: PlainPath
    bytes: Size
    sha256: Sha256


class RecordCounts(Content):
    """Sums over all shards."""

    bytes: Count
    records: Count
    tokens: Count
    learned_tokens: Count


class ShardSummary(FileSummary):
    """What is known of a shard; beside it on disk, and in the manifest."""

    records: Count
    tokens: Count
    learned_tokens: Count
    finish_reasons: dict[FinishReason, Count]
    feature_errors: list[Annotated[float, Field(ge=0, le=1e12)]] = []
    arrays: dict[Text, Sha256]
    """Of each array's bytes, so that who reads some need not read all."""
    code_file: FileSummary | None = None
    drafting: Drafting | None = None
    """Of its responses, where they were written with a draft."""

    @model_validator(mode="after")
    def _adds_up(self) -> ShardSummary:
        ended = sum(self.finish_reasons.values())
        if ended != self.records or not self.learned_tokens <= self.tokens:
            raise ValueError(
                f"{self.file}: records={self.records}, tokens={self.tokens}, learned_tokens={self.learned_tokens} and "
                f"{ended} finish_reasons do not fit together"
            )
        return self


class Kept(Content):
    """What was asked for of p, to ask for it again; the rest of the group `records` is kept as it is."""

    model_config = ConfigDict(extra="allow")

    store: list[StoreName]
    head: Size
    tail: Size
    topk: Size
    shard_size: Size


class RunConfig(Content):
    """What is used again of the configuration that wrote the records."""

    data: TextOrigin
    prompts: dict[str, Any]
    sampling: dict[str, Any]
    records: Kept
    batch_size: Size
    seed: Seed


class Manifest(RunEnd):
    """The whole file."""

    stage: Text
    records_version: int
    target: RecordedTarget
    runtime: RecordedRuntime
    spent: TimeSpent
    layout: Layout
    config: RunConfig
    seed: Seed
    responses: Literal["target", "corpus", "records"]
    sampling: dict[str, Any]
    prompts_sha256: Sha256
    counts: RecordCounts
    finish_reasons: dict[FinishReason, Count]
    code_file: FileSummary | None = None
    feature_errors: dict[str, Amount] = {}
    held_out: HeldOutCount | None = None
    """Of the corpus; older records do not say it."""
    bad_rows: BadRowCount | None = None
    """Rows of the corpus that were left out; older records do not say it."""
    drafting: list[Drafting] = []
    """Of all shards, by draft."""
    cut: CutAnswers | None = None
    """With responses=corpus; older records do not say it."""
    shards: Annotated[list[ShardSummary], Field(min_length=1)]

    @field_validator("stage")
    @classmethod
    def _is_of_distill(cls, stage: str) -> str:
        if stage != "distill":
            raise ValueError("records are written by the stage 'distill': give a folder of records")
        return stage

    @field_validator("records_version")
    @classmethod
    def _is_readable(cls, version: int) -> int:
        if version != RECORDS_VERSION:
            raise ValueError(f"this program reads version {RECORDS_VERSION}")
        return version

    @model_validator(mode="after")
    def _sizes_agree(self) -> Manifest:
        layout, kept = self.layout, self.config.records
        _same("vocab_size", layout=layout.vocab_size, target=self.target.vocab_size)
        _same("seed", manifest=self.seed, config=self.config.seed)
        for name in ("store", "head", "tail", "topk"):
            _same(name, layout=getattr(layout, name), config=getattr(kept, name))
        _each_once("layout.store", layout.store)
        if layout.features is not None:
            _same("hidden_size", layout=layout.hidden_size, features=layout.features.hidden_size)
            _each_once("layout.features.layers", layout.features.layers)
        is_fitted = layout.features is not None and layout.features.is_fitted
        if is_fitted != (self.code_file is not None):
            raise ValueError(f"code_file={self.code_file} does not belong to features={layout.features}")
        return self

    @model_validator(mode="after")
    def _shards_add_up(self) -> Manifest:
        _each_once("shards", [shard.file for shard in self.shards])
        for name in COUNTS:
            _same(
                f"counts.{name}", counts=getattr(self.counts, name), shards=sum(getattr(s, name) for s in self.shards)
            )
        ended = sum((Counter(shard.finish_reasons) for shard in self.shards), Counter())
        _same("finish_reasons", manifest=Counter(self.finish_reasons), shards=ended)
        return self


def _same(what: str, **values: object) -> None:
    (first, one), (second, other) = values.items()
    if one != other:
        raise ValueError(f"{what} is {one!r:.80} by {first} and {other!r:.80} by {second}, which should be the same")


def _each_once(what: str, values: list) -> None:
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        raise ValueError(f"{what} names {twice[0]!r:.80} more than once")


REMEDY = "Copy the folder again from where it was written, or write the records again into another output_dir"
MANIFEST = JsonFile(Manifest, "rows would be read as other tokens, other texts or other distributions", f"{REMEDY}.")
SHARD = JsonFile(ShardSummary, "the manifest would say what its shard does not hold", f"Delete the file. {REMEDY}.")
