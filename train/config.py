"""What a user sets about training; imports nothing heavy, so that bad values fail before torch is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from decode.common.typed_config import require, require_at_least
from decode.config import ModelConfig, model_folder
from distill.corpora.config import DataConfig, check_corpus
from distill.objectives.config import NEEDS_ALPHA, ObjectiveConfig
from train.drafts.draft_config import DraftConfig

LEARNS_FROM_TEXT = "cross_entropy"


@dataclass
class EngineConfig:
    """How the work is spread over processes (group `engine`); this, not the launcher, decides."""

    name: Literal["single", "ddp", "fsdp2", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3"] = "single"
    """single: one process; ddp: a replica per process; fsdp2: optimizer state, gradients, weights and a live target
    sharded, by torch; deepspeed_zeroN: optimizer state, then gradients, then weights sharded, by DeepSpeed."""
    device: Literal["auto", "cpu"] = "auto"
    """auto is CUDA where there is one, else the CPU."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16 runs matrix products in bfloat16 over fp32 weights (under ZeRO: over bf16 weights with fp32 masters)."""
    deterministic: bool = True
    """Only kernels that give the same bits every time, so that a resumed run equals an uninterrupted one."""
    recompute: bool = False
    """Make the activations of layers again in the backward pass: less memory a token, and more time."""
    offload_optimizer: bool = False
    """Keep ZeRO's optimizer state in CPU memory."""

    def __post_init__(self) -> None:
        require(
            not self.offload_optimizer or self.zero_stage > 0,
            f"offload_optimizer=true needs a DeepSpeed engine, not {self.name}; use engine=deepspeed_zero2",
        )

    @property
    def zero_stage(self) -> int:
        """1 to 3 for DeepSpeed engines, else 0."""
        return int(self.name[-1]) if self.name.startswith("deepspeed") else 0

    @property
    def is_sharded(self) -> bool:
        """Whether a process holds parts of matrices or of their state."""
        return self.name == "fsdp2" or self.zero_stage > 0


@dataclass
class ServersConfig:
    """Running vLLM servers of the target, with target_source=served (group `servers`)."""

    urls: list[str] = field(default_factory=list)
    """Addresses, http://HOST:PORT/v1; the processes of a training are shared out over them."""
    states_folder: str | None = None
    """Where the files of hidden states that they write to their shared_storage_path appear here."""
    at_once: int = 16
    """Texts that a process asks its server for at once."""
    timeout: float = 1800.0
    """Seconds without a sign of life after which a server is given up."""

    def check(self, source: str) -> None:
        """ConfigError for servers that nothing would ask, and for a source that names none."""
        require_at_least(1, self, "servers.", "at_once")
        require(
            source == "served" or not self.urls,
            f"servers.urls={self.urls} would give hidden states, and target_source={source} asks for none. Set "
            "target_source=served, or leave them out",
        )
        require(
            source != "served" or bool(self.urls and self.states_folder),
            f"target_source=served takes hidden states from running servers, and servers.urls={self.urls}, "
            f"servers.states_folder={self.states_folder} name none. Set both",
        )


@dataclass
class TrackerConfig:
    """Where metrics go besides metrics.jsonl, which is always written (group `tracker`)."""

    name: Literal["jsonl", "wandb"] = "jsonl"
    """jsonl: the run folder alone; wandb: Weights & Biases too."""
    mode: Literal["offline", "online"] = "offline"
    """offline writes into the run folder (`wandb sync` uploads it later); online needs an account."""
    project: str = "draftsmith"
    """W&B project."""
    run_name: str | None = None
    """W&B run name; None is the name of the run folder."""


@dataclass
class TokenizerConfig:
    """The tokenizer of a model that is trained without a target; with a target, the target's is used."""

    path: str | None = None
    """Folder (of a tokenizer, a model, or the run that trained it) or hub id."""
    train_entries: int | None = None
    """Train a byte-level BPE tokenizer of this many entries on the training documents instead."""

    def __post_init__(self) -> None:
        self.path = None if self.path is None else model_folder(self.path)
        require(
            self.path is None or self.train_entries is None,
            f"path={self.path} and train_entries={self.train_entries} exclude each other; set one",
        )
        require(
            self.train_entries is None or self.train_entries >= 258,
            f"train_entries={self.train_entries} is less than the 256 bytes and 2 special tokens that every text needs",
        )


@dataclass
class TrainConfig:
    """`python -m train`: fit a draft to a target, or train a small target on text."""

    NOT_COMPARED: ClassVar[tuple[str, ...]] = ("batch_size", "gradient_accumulation", "servers")
    """Checkpoints know the product of the first two, and servers are compared with the target."""

    output_dir: str
    """Folder of the result; must not exist, or be resumed."""
    target: ModelConfig = field(default_factory=ModelConfig)
    """The model that the draft will draft for; path null trains a model on text alone."""
    draft: DraftConfig = field(default_factory=DraftConfig)
    """What is trained."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    """What is minimised."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """How the work is spread."""
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    """Where metrics go."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """The tokenizer of a model that is trained without a target."""
    records: str | None = None
    """Record folder written by `python -m distill`; its sequences are trained on."""
    data: DataConfig | None = None
    """Text to train on where there are no records."""
    target_source: Literal["records", "live", "served"] = "records"
    """Where p comes from: what the records hold, the frozen target run in this process, or its servers (`servers`)."""
    servers: ServersConfig = field(default_factory=ServersConfig)
    """Those of target_source=served."""
    sequence_length: int = 512
    """Tokens in a packed row (T)."""
    batch_size: int = 8
    """Rows per micro-step and rank."""
    gradient_accumulation: int = 1
    """Micro-steps per optimizer step."""
    steps: int = 1000
    """Optimizer steps."""
    optimizer: Literal["auto", "adamw", "muon"] = "auto"
    """muon: torch.optim.Muon for the 2-D weights of the layers, AdamW for embeddings, head and norms; auto is muon from
    random weights, and adamw from saved ones, under DeepSpeed and fsdp2, and where `lr` is set and `muon_lr` is not."""
    lr: float | None = None
    """Peak learning rate of AdamW; None is chosen by the draft's width and where its weights come from."""
    muon_lr: float | None = None
    """Peak learning rate of Muon, whose updates are scaled to AdamW's size; None is chosen likewise."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay, per step, of the averages of gradients and of their squares."""
    warmup: float = 0.05
    """Share of the steps in which the learning rate rises linearly to its peak."""
    final_lr: float = 0.0
    """Learning rate at the end of the cosine, as a share of the peak."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices (norms have none)."""
    clip: float = 1.0
    """Largest norm of the whole gradient."""
    window: int = 4
    """Draft tokens per round k that the tau estimate assumes of a draft model; heads draft draft.head.depth."""
    log_every: int = 10
    """Steps between log lines."""
    validate_every: int = 100
    """Steps between validations; the last step always is one."""
    validation_rows: int = 64
    """Packed rows of the validation split that a validation reads, at most."""
    checkpoint_every: int = 500
    """Steps between checkpoints; the last step always is one."""
    keep_checkpoints: int = 2
    """Newest checkpoints to keep."""
    export_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of the exported weights."""
    resume: str = "never"
    """never: refuse an existing output_dir; auto: go on from the newest checkpoint; PATH: from that checkpoint."""
    seed: int = 0
    """Seed of the initial weights and of the data order."""
    plan: bool = False
    """Print steps, tokens, parameters, bytes on disk and in memory, for which a step is rehearsed, and exit."""

    def __post_init__(self) -> None:
        self._check_numbers()
        check_corpus(self.data)
        self._check_sources()
        require(
            not (self.optimizer == "muon" and self.engine.is_sharded),
            f"optimizer=muon cannot run under engine={self.engine.name}, which shards the matrices that Muon "
            "orthogonalises as a whole. Use optimizer=adamw, or engine=ddp",
        )
        self._check_sharded()

    def _check_numbers(self) -> None:
        require_at_least(1, self, "", "batch_size", "gradient_accumulation", "steps", "window", "log_every")
        require_at_least(1, self, "", "validate_every", "validation_rows", "checkpoint_every", "keep_checkpoints")
        require(
            self.sequence_length >= 2,
            f"sequence_length={self.sequence_length} leaves no token to predict; use 2 or more",
        )
        for name in ("lr", "muon_lr", "clip"):
            value = getattr(self, name)
            require(value is None or value > 0, f"{name}={value} must be above 0")
        for name in ("warmup", "final_lr"):
            require(0 <= getattr(self, name) <= 1, f"{name}={getattr(self, name)} is a share and must be in [0, 1]")
        require(0 <= self.seed < 1 << 32, f"seed={self.seed} is outside [0, 2**32), which random generators take")
        require_at_least(0, self, "", "weight_decay")
        require(all(0 <= beta < 1 for beta in self.betas), f"betas={self.betas} must be in [0, 1)")

    def _check_sharded(self) -> None:
        asked = {name: getattr(self.target, name) for name in ("device_map", "quantization")}
        given = {name: value for name, value in asked.items() if value is not None}
        require(
            not given or self.engine.name != "fsdp2" or self.target_source != "live",
            f"engine=fsdp2 shards a live target as it is, in floating point, and target has {given}. Leave that out, "
            "or use engine=ddp",
        )

    @property
    def makes_p(self) -> bool:
        """Whether p and hidden states are made while the draft learns."""
        return self.target_source != "records"

    def _check_sources(self) -> None:
        self.servers.check(self.target_source)
        has_target = self.target.path is not None
        require(
            has_target or not self.draft.is_head,
            f"draft={self.draft.family} drafts from hidden states of its target, but target.path is null. Set "
            "target.path, or use draft=lm",
        )
        require(
            self.records is not None or self.data is not None,
            "there is nothing to train on: set records=FOLDER (from `python -m distill`) or choose data=NAME",
        )
        require(
            self.records is None or self.data is None,
            f"records={self.records} hold the texts to train on, and their splits; data.* would have no effect. Leave "
            "out data, or, for other texts or shares, record them anew with `python -m distill`",
        )
        require(
            has_target or not self._minimises_p,
            f"objective={self.objective.name} compares with a target's distribution p, but target.path is null. "
            f"Set target.path, or objective={LEARNS_FROM_TEXT} to train on text alone",
        )
        require(
            has_target or self.records is None, f"records={self.records} belong to a target, but target.path is null"
        )
        require(
            self.target_source == "records" or has_target,
            f"target_source={self.target_source} runs the target, but target.path is null. Set target.path",
        )
        chosen = self.tokenizer.path is not None or self.tokenizer.train_entries is not None
        require(
            has_target != chosen,
            "tokenizer.path or tokenizer.train_entries is set although target.path is: a draft must use its target's "
            "tokens. Drop it"
            if has_target
            else "without a target the tokens are undefined: set tokenizer.train_entries=4096, or tokenizer.path",
        )
        self._check_p()

    @property
    def _minimises_p(self) -> bool:
        """Whether an objective compares with the target's distribution."""
        return {self.objective.name, self.objective.warm_up or LEARNS_FROM_TEXT} != {LEARNS_FROM_TEXT}

    def _check_p(self) -> None:
        """Whatever compares with p, weighs by it or reads hidden states has a place where these come from."""
        knows_p = self.target.path is not None and (self.records is not None or self.makes_p)
        require(
            not self._minimises_p or knows_p,
            f"objective={self.objective.name} needs the target's distribution p for every token, and text holds none. "
            "Set records=FOLDER (from `python -m distill`), or target_source=live to run the target alongside",
        )
        require(
            self.objective.warm_up is None or self.validate_every < self.steps,
            f"objective.warm_up={self.objective.warm_up} ends at a validation with alpha of "
            f"{self.objective.switch_at:g} or more, and validate_every={self.validate_every} of steps={self.steps} is "
            "after the last step. Validate more often, or leave the warm-up out",
        )
        require(
            self.objective.credit not in NEEDS_ALPHA or knows_p,
            f"objective.credit={self.objective.credit} weighs a token by the acceptance of those before it, and text "
            "holds no p. Set records=FOLDER or target_source=live, or objective.credit=none or decay",
        )
        require(
            not self.draft.is_head or knows_p,
            f"draft={self.draft.family} drafts from hidden states of its target, and text holds none. Set "
            "target_source=live, or records=FOLDER whose records hold them (records.features.layers in distill)",
        )
