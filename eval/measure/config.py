"""What a user sets about timing, its peers and the check of losslessness; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from decode.common.typed_config import require, require_at_least


@dataclass
class TimingConfig:
    """The interleaved run that every speed in the report comes from."""

    prompts: int = 12
    """Prompts timed; the intervals are over these."""
    rounds: int = 2
    """Times that every arm answers every prompt, in a new order each time."""
    screening_prompts: int = 8
    """Prompts on which draft length and the peer's setting are chosen, of the validation split or set apart from a
    file's questions; never reported."""
    screening_tokens: int = 64
    """New tokens per prompt while choosing."""
    batch_size: int = 1
    """Prompts decoded together."""
    sweep: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 6])
    """Draft lengths k timed with the first draft at the first temperature; [] times none."""
    choose_k: list[int] = field(default_factory=list)
    """Draft lengths of which the fastest is used for the whole report, by prompts that it does not report; [] uses
    decode.num_draft_tokens."""
    cost_repeats: int = 12
    """Bare forwards per component and round behind the predicted speedup, spread over the prompts of the round."""
    watts: float | None = None
    """Every timed mode: power of the machine in watts, for an estimate of joules per token that is marked as one; None
    reads the counters of the hardware, where there are any."""

    def __post_init__(self) -> None:
        least = ("prompts", "rounds", "batch_size", "screening_tokens", "cost_repeats", "screening_prompts")
        require_at_least(1, self, "timing.", *least)
        require(
            self.watts is None or 0 < self.watts < float("inf"),
            f"timing.watts={self.watts}; state a power above 0 in watts, e.g. 65, or null to read the counters",
        )
        for name in ("sweep", "choose_k"):
            lengths = getattr(self, name)
            require(all(k >= 1 for k in lengths), f"timing.{name}={lengths}; a draft has at least 1 token")


@dataclass
class PeersConfig:
    """transformers assisted generation, at its best of these settings (constant schedule)."""

    num_assistant_tokens: list[int] = field(default_factory=lambda: [3, 5, 8])
    """Values of num_assistant_tokens tried; [] leaves the peer out."""
    confidence_threshold: list[float] = field(default_factory=lambda: [0.0, 0.4])
    """Values of assistant_confidence_threshold tried with each of them."""
    prompt_lookup_num_tokens: list[int] = field(default_factory=lambda: [3, 10])
    """mode=decoders, drafters: values of prompt_lookup_num_tokens tried; [] leaves prompt lookup out."""
    early_exit_layers: list[int] = field(default_factory=list)
    """mode=drafters: values of assistant_early_exit tried, layers of the target that draft in transformers' own early
    exit; [] leaves that out."""
    early_exit_tokens: list[int] = field(default_factory=lambda: [2, 4])
    """mode=drafters: values of num_assistant_tokens tried with each of them."""
    unquantised: bool = False
    """mode=report: with target.quantization, also load the target as it was before and time it without a draft, and
    measure how far the quantised one is from it; both are in memory then."""
    vllm_python: str | None = None
    """mode=decoders, drafters: interpreter of an environment with vLLM; None leaves vLLM out; `peers=vllm` names
    ours."""
    vllm_draft_tokens: list[int] = field(default_factory=lambda: [4])
    """Draft tokens per pass of vLLM with its draft, with mode=drafters of its prompt lookup (ngram); each in an engine
    of its own."""

    def __post_init__(self) -> None:
        tokens, thresholds = self.num_assistant_tokens, self.confidence_threshold
        require(all(k >= 1 for k in tokens), f"peers.num_assistant_tokens={tokens}; each is at least 1")
        require(all(0 <= c <= 1 for c in thresholds), f"peers.confidence_threshold={thresholds}; each is in [0, 1]")
        for name in ("prompt_lookup_num_tokens", "vllm_draft_tokens", "early_exit_layers", "early_exit_tokens"):
            require(all(k >= 1 for k in getattr(self, name)), f"peers.{name}={getattr(self, name)}; each is at least 1")
        require(
            not self.early_exit_layers or bool(self.early_exit_tokens),
            f"peers.early_exit_layers={self.early_exit_layers} and peers.early_exit_tokens=[]: nothing is left to try. "
            "Name a number of tokens, or no layer",
        )
        require(not tokens or bool(thresholds), "peers.confidence_threshold=[] leaves nothing to try; name one, e.g. 0")


@dataclass
class LosslessConfig:
    """Text that the target writes alone: speculative output is compared with it, and alpha is measured on it."""

    prompts: int = 96
    """Prompts continued for the first draft at the first temperature, the timed ones among them."""
    tokens: int = 232
    """New tokens for each of them."""
    other_prompts: int = 32
    """Prompts continued for every other draft and temperature, at most `prompts`."""
    other_tokens: int = 64
    """New tokens for each of those, at most `tokens`."""
    batch_size: int = 32
    """Prompts decoded together."""
    dtype: Literal["float32", "float64", "auto"] = "float32"
    """Precision of this part; auto is the target's own, where float32 does not fit."""

    def __post_init__(self) -> None:
        require_at_least(1, self, "lossless.", "prompts", "tokens", "other_prompts", "other_tokens", "batch_size")
        self.other_prompts = min(self.other_prompts, self.prompts)
        self.other_tokens = min(self.other_tokens, self.tokens)
