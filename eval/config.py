"""What a user sets about a report; imports nothing heavy, so bad values fail at once."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from decode.common.typed_config import require, require_at_least, require_some
from decode.config import ModelConfig
from decode.sampling.config import OF_THE_PREFIX, SamplingConfig, check_temperature
from distill.corpora.config import DataConfig
from eval.comparison_config import DecodersConfig, named_settings
from eval.measure.config import LosslessConfig, PeersConfig, TimingConfig
from eval.modes.compare.drafters_config import DraftersConfig
from eval.modes.exits.config import ExitsConfig
from eval.modes.families.config import FamiliesConfig
from eval.modes.served.config import ServedConfig
from eval.prompts.config import PromptsConfig
from train.config import TrackerConfig

TOKEN_FOR_TOKEN = ("coupled", "greedy")
"""Verifiers whose output equals autoregressive output of the same seed; the others are exact in distribution only."""

Mode = Literal[
    "report", "decoders", "families", "certificate", "profile", "served", "drafters", "exits",
]  # fmt: skip


@dataclass
class HeadlineConfig:
    """Which drafts and settings compete for a report's headline, on prompts that it does not report."""

    drafts: list[str] = field(default_factory=list)
    """Names in `drafts`; [] has the first draft in the headline, as `decode` is set."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name -> what it changes in `decode`, e.g. block: {verifier: block}; each competing draft is timed with each, and
    as `decode` is set. All must be exact."""

    def check(self, drafts: Collection[str], decode: SamplingConfig, temperatures: list[float]) -> None:
        """ConfigError for a draft that is not among `drafts` and for settings that cannot compete."""
        unknown = sorted(set(self.drafts) - set(drafts))
        require(not unknown, f"headline.drafts names {unknown}, and drafts has {sorted(drafts)}")
        named = sorted(self.settings)
        require(
            bool(self.drafts) or not named, f"headline.settings names {named}, for no draft: set headline.drafts, too"
        )
        taken = [name for name in named if re.fullmatch(r"k=\d+", name)]
        require(not taken, f"headline.settings names {taken}, as draft lengths are called; give it another name")
        for temperature in temperatures:
            named_settings(self.settings, decode, temperature, "headline.settings")


@dataclass
class CertificateConfig:
    """A losslessness certificate instead of a report (`mode=certificate`); prompts and batches as in `lossless`."""

    tokens: int = 1_000_000
    """Greedy tokens compared in lossless.dtype."""
    other_tokens: int = 100_000
    """Tokens compared in each other part: the target's own precision, and every temperature above 0."""
    minutes: float | None = None
    """Minutes after which to stop, with what was compared by then; None compares all."""

    def __post_init__(self) -> None:
        for name in ("tokens", "other_tokens"):
            require(getattr(self, name) >= 1, f"certificate.{name}={getattr(self, name)}; compare at least 1 token")
        minutes = self.minutes
        require(minutes is None or minutes > 0, f"certificate.minutes={minutes}; give it some time, or null for all")


@dataclass
class ProfileConfig:
    """Where the time of a round goes, instead of a report (`mode=profile`)."""

    prompts: int = 4
    """Prompts decoded, timing.batch_size at once."""
    max_new_tokens: int = 64
    """New tokens for each."""

    def __post_init__(self) -> None:
        require_at_least(1, self, "profile.", "prompts", "max_new_tokens")


@dataclass
class EvalConfig:
    """`python -m eval`: a measured report of one target with one or several drafts, a certificate, or a profile."""

    mode: Mode = "report"
    """What is measured and written."""
    name: str = ""
    """What it is called on the page and in the default output folder; empty is the mode."""
    output_dir: str = ""
    """Folder of what is written; empty is runs/MODE/report, with a name runs/NAME/MODE."""
    target: ModelConfig = field(default_factory=ModelConfig)
    """The model whose output must not change."""
    drafts: dict[str, str] = field(default_factory=dict)
    """Name -> folder of a saved draft, or a drafter without weights (ngram), or a mixture of several by their names
    (ngram+mtp); the first is the one that sweeps and peers are about, and the headline unless `headline` has several
    compete."""
    data: DataConfig = field(default_factory=DataConfig)
    """Corpus whose held-out documents give the prompts, unless prompts.file is set."""
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    """Where the prompts come from."""
    decode: SamplingConfig = field(default_factory=SamplingConfig)
    """Sampling shared by all arms; its temperature is replaced by each of `temperatures`."""
    temperatures: list[float] = field(default_factory=lambda: [1.0, 0.0])
    """Temperatures with a timed row each; the first is the headline's. 0 is checked by the greedy verifier."""
    timing: TimingConfig = field(default_factory=TimingConfig)
    """The timed run."""
    headline: HeadlineConfig = field(default_factory=HeadlineConfig)
    """What competes for the headline of the report."""
    peers: PeersConfig = field(default_factory=PeersConfig)
    """The other system it is compared with."""
    lossless: LosslessConfig = field(default_factory=LosslessConfig)
    """The check of losslessness, and the text behind alpha."""
    certificate: CertificateConfig = field(default_factory=CertificateConfig)
    """A certificate of losslessness instead of the report."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """A profile of the rounds instead of the report."""
    decoders: DecodersConfig = field(default_factory=DecodersConfig)
    """The comparison of decoders, under mode=decoders."""
    families: FamiliesConfig = field(default_factory=FamiliesConfig)
    """The comparison of draft families, under mode=families."""
    served: ServedConfig = field(default_factory=ServedConfig)
    """Drafts in an engine of the user's, under mode=served."""
    drafters: DraftersConfig = field(default_factory=DraftersConfig)
    """The comparison of ways to draft, under mode=drafters."""
    exits: ExitsConfig = field(default_factory=ExitsConfig)
    """The profile of a target's early exits, under mode=exits."""
    curve_temperatures: list[float] = field(default_factory=lambda: [0.0, 0.3, 0.7, 1.0, 1.3])
    """Temperatures of the curve of alpha and predicted speedup, from teacher-forced passes; [] draws none."""
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    """Where the finished report is logged besides the folder."""
    resume: str = "never"
    """never: refuse an existing folder; auto: leave a finished report alone, keep what an unfinished one has."""
    seed: int = 0
    """Seed of windows, noise, orders and bootstrap."""
    plan: bool = False
    """Print arms, prompts, tokens and an estimate of the time, and exit."""

    def __post_init__(self) -> None:
        default = f"runs/{self.name}/{self.mode}" if self.name else f"runs/{self.mode}/report"
        self.name, self.output_dir = self.name or self.mode, self.output_dir or default
        require(self.target.path is not None, "target.path is not set; name a transformers folder or hub id")
        if self.mode not in ("families", "drafters", "exits"):
            require_some(self, "", drafts="'+drafts.distilled=runs/x/draft/model'")
        self._check_temperatures()
        self._check_decode()
        self._check_target()
        if self.mode == "drafters":
            self.drafters.check(self.drafts, self.prompts.file_kinds, self.decode, self.temperatures)
        if self.mode == "report":
            self._check_headline()
        require(
            self.lossless.prompts >= self.timing.prompts,
            f"lossless.prompts={self.lossless.prompts} is below timing.prompts={self.timing.prompts}; "
            "the timed prompts are among those checked, so raise it",
        )

    def _check_temperatures(self) -> None:
        require_some(self, "", temperatures="temperatures=[1.0]")
        for name in ("temperatures", "curve_temperatures"):
            for temperature in getattr(self, name):
                check_temperature(temperature, f"{name}={getattr(self, name)}: ")
        require(
            len(set(self.temperatures)) == len(self.temperatures),
            f"temperatures={self.temperatures} repeats one; each has its own row",
        )
        require(
            self.decode.temperature in (1.0, *self.temperatures),
            f"decode.temperature={self.decode.temperature} would not be used: the rows are those of "
            f"temperatures={self.temperatures}; set temperatures=[{self.decode.temperature}]",
        )

    def _check_decode(self) -> None:
        require(
            self.mode != "certificate" or self.decode.verifier in TOKEN_FOR_TOKEN,
            f"mode=certificate compares tokens, and decode.verifier={self.decode.verifier} keeps the distribution "
            "alone, as pytest tests/decode -k distribution proves. For a certificate give decode.verifier=coupled",
        )
        require(
            self.decode.verifier != "greedy" or not any(self.temperatures),
            f"decode.verifier=greedy compares argmaxes, and temperatures={self.temperatures} samples; "
            "set temperatures=[0], or leave the verifier, which is greedy at temperature 0 anyway",
        )
        own = [name for name in OF_THE_PREFIX if getattr(self.decode, name) != getattr(SamplingConfig(), name)]
        require(
            not own or self.mode in ("certificate", "profile"),
            f"decode.{' and decode.'.join(own)} would hold for our arms and not for the peers, which are "
            "transformers' and vLLM's own loops. Leave them out, or use mode=certificate or mode=profile",
        )

    def _check_target(self) -> None:
        require(
            self.target.quantization is None or self.lossless.dtype != "float64",
            f"lossless.dtype=float64 checks the target in float64, and target.quantization={self.target.quantization} "
            "does not run there. Use lossless.dtype=float32",
        )
        require(
            not self.peers.unquantised or (self.mode == "report" and self.target.quantization is not None),
            f"peers.unquantised=true times the target as it was before target.quantization={self.target.quantization}, "
            f"with mode={self.mode}: it needs a quantised target and mode=report. Set these, or leave it out",
        )

    def _check_headline(self) -> None:
        self.headline.check(self.drafts, self.decode, self.temperatures)
        require(
            not (self.headline.drafts and self.timing.choose_k),
            f"timing.choose_k={self.timing.choose_k} chooses one length for the whole report, and headline.drafts="
            f"{self.headline.drafts} have theirs in headline.settings, e.g. short: {{num_draft_tokens: 3}}; "
            "leave one of them out",
        )
