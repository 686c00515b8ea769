"""What a user sets about recording; imports nothing heavy, so that bad values fail at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from decode.common.typed_config import require, require_at_least
from decode.config import DrafterConfig
from decode.sampling.config import check_sampling
from decode.trees import MOST_NODES
from distill.corpora.config import DataConfig, check_corpus
from distill.engines.config import LATER, TargetConfig
from distill.records.config import RecordsConfig


@dataclass
class PromptConfig:
    """Which prompts are taken from the documents."""

    tokens: int = 64
    """Tokens of a plain-text prompt; a chat prompt is as long as its messages."""
    per_document: int = 4
    """Plain-text windows taken from one document at most; a conversation gives one prompt."""
    count: int | None = 1024
    """Prompts from the training split; None takes all that there are."""
    validation_count: int = 64
    """Prompts from the validation split."""

    def __post_init__(self) -> None:
        require_at_least(1, self, "prompts.", "tokens", "per_document", "count")
        require_at_least(0, self, "prompts.", "validation_count")


@dataclass
class ResponseDraftConfig(DrafterConfig):
    """A draft that responses are written with, so that they cost fewer passes of the target."""

    num_draft_tokens: int = 5
    """Draft tokens per target pass (k)."""
    adaptive: bool = False
    """Draft what pays, at most num_draft_tokens, and nothing where nothing pays."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            1 <= self.num_draft_tokens <= MOST_NODES,
            f"sampling.draft.num_draft_tokens={self.num_draft_tokens}; a round drafts at least 1 token and at most "
            f"{MOST_NODES}. To write without drafts, leave out sampling.draft.path",
        )

    def check_engine(self) -> None:
        """Raise ConfigError for what an engine that drafts by itself would ignore."""
        for name in ("dtype", "settings", "adaptive"):
            value, usual = getattr(self, name), getattr(ResponseDraftConfig(), name)
            require(
                self.path is None or value == usual,
                f"sampling.draft.{name}={value} says how our own decoder drafts, and target.runtime=vllm, which drafts "
                "by itself, would ignore it; leave it out, or use target.runtime=transformers",
            )


@dataclass
class ResponseSampling:
    """How the target writes its responses. p is recorded at temperature 1, unwarped, whatever stands here."""

    temperature: float = 1.0
    """Divides the logits; 0 is greedy: the likeliest token."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose mass reaches top_p."""
    min_p: float = 0.0
    """Drop tokens below min_p times the likeliest one's probability."""
    max_new_tokens: int = 256
    """Longest response in tokens."""
    draft: ResponseDraftConfig = field(default_factory=ResponseDraftConfig)
    """What proposes their tokens; the target decides, and writes what it would write alone."""

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_k, self.top_p, self.min_p)
        require_at_least(1, self, "sampling.", "max_new_tokens")


@dataclass
class DistillConfig:
    """`python -m distill`: prompts from a corpus, responses by the target, p of every token on disk."""

    NOT_COMPARED: ClassVar[tuple[str, ...]] = (
        "sampling.draft",
        "target.url",
        "target.served_name",
        "target.key_variable",
        "target.states_url",
        "target.states_folder",
        "target.timeout",
    )
    """A run goes on with another draft or none, since the text is the target's, and with servers that moved, since what
    they answer is compared. An engine whose text depends on a draft says so in its RecordedRuntime."""

    target: TargetConfig = field(default_factory=TargetConfig)
    """The model whose distributions are recorded."""
    data: DataConfig = field(default_factory=DataConfig)
    """The corpus that prompts are taken from."""
    prompts: PromptConfig = field(default_factory=PromptConfig)
    """Which prompts."""
    responses: Literal["target", "corpus", "records"] = "target"
    """target: the target writes every response; corpus: the text stays as it is; records: the texts of an earlier run
    are scored again, with the stores and features of this one."""
    from_records: str | None = None
    """responses=records only: the folder of that run; data, prompts and sampling are those of its texts."""
    sampling: ResponseSampling = field(default_factory=ResponseSampling)
    """How the target writes."""
    batch_size: int = 32
    """Sequences in one forward pass."""
    records: RecordsConfig = field(default_factory=RecordsConfig)
    """What is kept."""
    show: int = 0
    """Print this many examples first, learned tokens marked, so that a template error is seen before it costs a run."""
    output_dir: str = "runs/records"
    """Folder of the records."""
    resume: str = "never"
    """never: refuse an existing folder; auto: go on after its last complete shard."""
    seed: int = 0
    """Seed of prompt choice, responses and tail draws."""
    plan: bool = False
    """Print documents, tokens, bytes on disk and parameters, and exit."""

    def __post_init__(self) -> None:
        require_at_least(1, self, "", "batch_size")
        require_at_least(0, self, "", "show")
        check_corpus(self.data)
        self._check_draft()
        self._check_openai()
        if self.responses != "records":
            require(
                self.from_records is None,
                f"from_records={self.from_records} gives the texts, and responses={self.responses} makes them; set "
                "responses=records, or leave from_records out",
            )
            return
        require(self.from_records is not None, "responses=records needs from_records, the folder whose texts to score")
        for name, kind in (("data", DataConfig), ("prompts", PromptConfig), ("sampling", ResponseSampling)):
            value = getattr(self, name)
            require(
                value == kind(),
                f"responses=records takes the texts of {self.from_records} as they are, and {name}.* was set "
                f"({value}), which would change nothing; leave it out",
            )

    def _check_draft(self) -> None:
        draft = self.sampling.draft
        require(
            draft.path is None or self.responses != "corpus",
            f"sampling.draft.path={draft.path} drafts the target's responses, and responses=corpus has it write none; "
            "leave one of them out",
        )
        if self.target.runtime == "vllm":
            draft.check_engine()
        require(
            draft.path is None or self.target.url is None,
            f"sampling.draft.path={draft.path} and target.url={self.target.url}: a running server drafts as it was "
            "started, with its own --speculative-config; leave sampling.draft out",
        )

    def _check_openai(self) -> None:
        """Raise ConfigError for records that such a server cannot give."""
        if self.target.runtime != "openai":
            return
        require(
            self.responses == "target",
            f"target.runtime=openai writes responses, and responses={self.responses} has none written; use "
            "target.runtime=transformers or vllm, which read texts",
        )
        kept = self.records
        wanted = sorted({*kept.store} - {"topk"})
        require(
            not wanted,
            f"records.store={kept.store}, and a server (target.runtime=openai) tells no more of p than its likeliest "
            f"tokens: {', '.join(wanted)} cannot be made of them. Use records.store=[topk], or {LATER}",
        )
        require(
            not kept.features.layers,
            f"records.features.layers={kept.features.layers}, and a server (target.runtime=openai) gives no hidden "
            f"states. Leave them out, or {LATER}",
        )
        require(
            not kept.store or not self.data.learn_prompt,
            "records.store=[topk] with target.runtime=openai, and data.learn_prompt=true: a server tells no p of a "
            "prompt's tokens. Set data.learn_prompt=false; a chat's prompts are never learned",
        )
