"""What a user sets about data, records and objectives; imports nothing heavy, so that bad values fail at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from decode.common.typed_config import require, require_at_least
from decode.config import ChatConfig, DrafterConfig, check_sampling
from decode.trees import MOST_NODES
from distill.engines.config import LATER, TargetConfig

CorpusName = Literal["python_stdlib", "everyday", "text", "jsonl", "parquet", "dataset", "hub", "tasks", "own"]
StoreName = Literal["head_tail", "topk", "full", "last_hidden"]
FeatureCodeName = Literal["bf16", "int8", "pca"]
TermName = Literal["cross_entropy", "forward_kl", "tv", "neg_log_alpha", "reverse_kl", "jsd"]
ObjectiveName = Literal[TermName, "lk_hybrid", "mixture"]
CreditName = Literal["none", "decay", "dpace", "first_failure", "on_policy", "e2e_tv"]
TEXT_ALONE = ("python_stdlib", "text", "tasks")  # corpora without chats
NEEDS_ALPHA = ("dpace", "first_failure", "on_policy")  # credits that ask how likely the tokens before were accepted


@dataclass
class DataConfig(ChatConfig):
    """Where documents come from, how they are split, and how chats among them are written (group `data`)."""

    name: CorpusName = "python_stdlib"
    """Kind of corpus; python_stdlib and everyday take no `path`, tasks may (without one they are made from that
    library), all others need it; own, of eval alone, is the draft's."""
    path: str | None = None
    """File or folder (text, jsonl, parquet, dataset, tasks), or hub id (hub)."""
    subset: str | None = None
    """Configuration of a hub or builder dataset; None is its default."""
    hub_split: str | None = None
    """Split of a dataset to read; None is `train`, else the first one whose name starts with it."""
    revision: str | None = None
    """Hub revision (branch, tag or commit) of the dataset; None is the default branch."""
    streaming: bool = False
    """Read a dataset row by row without downloading it whole."""
    text_field: str = "text"
    """Row field that holds plain text."""
    messages_field: str = "messages"
    """Row field that holds chat messages; a row that has it is read as chat, even where it has text too. Unless set,
    `conversations`, `conversation`, `dialogue` and `dialog` are read as well."""
    id_field: str | None = None
    """Row field that names the document; None is file and row number."""
    validation_share: float = 0.03
    """Share of documents that choose the checkpoint."""
    heldout_share: float = 0.05
    """Share of documents kept for evaluation; training and records never see them."""
    max_documents: int | None = None
    """Documents read at most, before they are split; None reads all."""
    bad_rows: float = 0.05
    """Share of the rows that may be left out because they cannot be used; with more, nothing is done. 0 refuses any."""
    learn_prompt: bool = True
    """Learn the prompt's tokens of plain text too: they cost nothing more to record. Chat prompts are never learned."""
    system: Literal["drop", "merge"] | None = None
    """For a chat template that refuses the system's messages: drop leaves them out, merge puts their text before the
    user's first message; None hands them over as they are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.name != "own" or self.path is None,
            f"data.path={self.path} does not say what lies there; name it, as data=jsonl or data=text",
        )
        needs_path = self.name not in ("python_stdlib", "everyday", "tasks", "own")
        require(
            not needs_path or bool(self.path), f"data={self.name} needs data.path, the file, folder or hub id to read"
        )
        require(
            self.name not in ("python_stdlib", "everyday") or self.path is None,
            f"data={self.name} reads what comes with the interpreter or with draftsmith, not {self.path!r}. Name what "
            "lies there, as data=jsonl or data=text",
        )
        for name in ("validation_share", "heldout_share"):
            share = getattr(self, name)
            require(0 <= share < 1, f"data.{name}={share} is not a share in [0, 1)")
        require(0 <= self.bad_rows <= 1, f"data.bad_rows={self.bad_rows} is not a share in [0, 1]")
        rest = 1 - self.validation_share - self.heldout_share
        require(rest > 0, f"data.validation_share + data.heldout_share leave {rest:.3f} of the documents to train on")
        require_at_least(1, self, "data.", "max_documents")

    @property
    def has_chats(self) -> bool:
        """Whether documents may be chats."""
        return self.name not in TEXT_ALONE


def check_corpus(data: DataConfig | None) -> None:
    """Raise ConfigError where a stage that makes records or drafts is told to read their own corpus, and for settings
    of chats where the corpus has none."""
    require(
        data is None or data.name != "own",
        "data=own is the corpus that a draft was trained on, for `python -m eval`; name one, as data=jsonl "
        "data.path=FILE (with records=FOLDER none is needed)",
    )
    require(
        data is None or data.has_chats or not (data.template or data.date or data.system),
        f"data.template, data.date and data.system say how chats are written, and data={data and data.name} holds "
        "plain text alone; leave them out, or name a corpus of chats, as data=jsonl",
    )


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
class FeatureConfig:
    """Hidden states of the target that heads draft from: kept of every token, the prompt's too."""

    layers: list[int] = field(default_factory=list)
    """Layers kept: 0 is the embeddings, i the output of layer i - 1, -1 the state after the last norm; [] is none."""
    code: FeatureCodeName = "bf16"
    """bf16: exact, 2 bytes a value; int8: 1 byte a value; pca: 1 byte for each principal component of all layers."""
    components: int | None = None
    """pca only: components kept; None is a sixth of layers * hidden size, and so a twelfth of the bytes of bf16."""
    calibration_prompts: int = 128
    """int8 and pca: the first prompts of the run, on whose texts scales and components are fitted."""

    def __post_init__(self) -> None:
        repeated = len(set(self.layers)) < len(self.layers)
        require(not repeated, f"records.features.layers={self.layers} names a layer twice; name each once")
        require(
            bool(self.layers) or self.code == "bf16",
            f"records.features.code={self.code} codes hidden states, and records.features.layers=[] keeps none; name "
            "the layers, or leave the code out",
        )
        require(
            self.components is None or self.code == "pca",
            f"records.features.components={self.components} is for code=pca, and the code is {self.code}; set "
            "records.features.code=pca, or leave the components out",
        )
        require_at_least(1, self, "records.features.", "components", "calibration_prompts")


@dataclass
class RecordsConfig:
    """What is kept of p for every learned token, and of the hidden states of all."""

    store: list[StoreName] = field(default_factory=lambda: ["head_tail"])
    """Any mix of head_tail (unbiased, tens of bytes a token), topk (biased), full (exact) and last_hidden (exact); []
    keeps the text alone."""
    head: int = 8
    """Likeliest tokens kept by head_tail."""
    tail: int = 4
    """Tokens drawn from the rest of p and kept by head_tail."""
    topk: int = 64
    """Likeliest tokens kept by topk."""
    shard_size: int = 128
    """Prompts in a shard: what a killed run loses at most, per process; with target.runtime=vllm the call in hand, 16
    prompts a row. A plan of shards above 2 GiB is refused."""
    features: FeatureConfig = field(default_factory=FeatureConfig)
    """Hidden states kept beside p."""

    def __post_init__(self) -> None:
        repeated = len(set(self.store)) < len(self.store)
        require(not repeated, f"records.store={self.store} names a store twice; name each once")
        require_at_least(1, self, "records.", "head", "tail", "topk", "shard_size")


@dataclass
class ObjectiveConfig:
    """What a draft is fitted by (group `objective` of the train stage)."""

    name: ObjectiveName = "forward_kl"
    """cross_entropy learns from text alone; forward_kl, tv, neg_log_alpha and lk_hybrid take any record; reverse_kl and
    jsd need full p; mixture is what `terms` says."""
    terms: dict[TermName, float] = field(default_factory=dict)
    """mixture only: objective -> weight; {} is {cross_entropy: 0.1, tv: 0.9}, DSpark's (arXiv 2607.05147)."""
    eta: float = 3.0
    """lk_hybrid only: a row's loss is w KL + (1 - w) TV with w = exp(-eta alpha)."""
    warm_up: TermName | None = None
    """Objective that is minimised at first, until the held-out alpha reaches `switch_at`; None is none."""
    switch_at: float = 0.3
    """warm_up only: the acceptance from which the objective itself takes over, for good."""
    beta: float = 0.5
    """jsd only: weight of p in the mixture m = beta p + (1 - beta) q."""
    chunk_rows: int | None = None
    """Rows of logits held at once: a few times chunk_rows * vocabulary * 4 bytes of memory; None is 1024, or as many as
    make 128 MB for a large vocabulary."""
    credit: CreditName = "none"
    """What each token of a round counts: all alike, `decay`, the chance that it is of use (dpace) or reached
    (first_failure), how often decoding the text would try it (on_policy); e2e_tv minimises what a whole round loses
    (with objective=tv)."""
    decay: float = 0.8
    """credit=decay only: the next token of a round counts this share of the one before it."""
    confidence_weight: float = 1.0
    """Weight of the confidence loss, for families that predict their own acceptance; 0 leaves it untrained."""

    def __post_init__(self) -> None:
        require(
            0 < self.beta < 1, f"objective.beta={self.beta} is outside (0, 1); its ends are forward_kl and reverse_kl"
        )
        require_at_least(1, self, "objective.", "chunk_rows")
        require(0 < self.decay <= 1, f"objective.decay={self.decay} is outside (0, 1]; 1 counts all tokens alike")
        require_at_least(0, self, "objective.", "confidence_weight")
        require(
            self.credit != "e2e_tv" or self.name == "tv",
            f"objective.credit=e2e_tv multiplies the acceptances 1 - TV of a round, and objective={self.name} is not a "
            "TV. Use objective=tv, or another credit",
        )
        self._check_terms()
        require(
            0 < self.switch_at < 1,
            f"objective.switch_at={self.switch_at} is an acceptance that a draft never crosses; use one inside (0, 1)",
        )
        require(
            self.warm_up is None or self.credit != "e2e_tv",
            f"objective.credit=e2e_tv multiplies acceptances, and objective.warm_up={self.warm_up} is to be weighed by "
            "it as well. Train the warm-up as a run of its own, and start from it by draft.init_from",
        )

    def _check_terms(self) -> None:
        require_at_least(0, self, "objective.", "eta")
        if self.name == "mixture" and not self.terms:
            self.terms = {"cross_entropy": 0.1, "tv": 0.9}
        require(
            not self.terms or self.name == "mixture",
            f"objective.terms={self.terms} and objective={self.name}, which would ignore them: they are the terms of "
            "objective=mixture. Say objective=mixture, or leave them out",
        )
        wrong = {name: weight for name, weight in self.terms.items() if not weight > 0}
        require(
            not wrong,
            f"objective.terms={self.terms} has weights that are not above 0, {wrong}: such a term would teach nothing, "
            "or the opposite. Give positive weights, or leave it out",
        )


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
