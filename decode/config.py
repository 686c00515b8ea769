"""What a user sets about models, sampling and the terminal stage; imports nothing heavy, so bad values fail at once."""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from decode.arguments import real
from decode.common.typed_config import require

LEAST_TEMPERATURE = 1e-4  # logits of 30 divided by it are float32 numbers with steps of 0.03
TREES = ("chain", "dynamic", "sequoia", "auto")
MOST_NODES = 1024
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "banned_words")
Precision = Literal["auto", "float32", "bfloat16", "float16", "float64"]


@dataclass
class ModelConfig:
    """Where a causal language model lies and how it is loaded."""

    path: str | None = None
    """Folder in transformers format, or hub id."""
    revision: str | None = None
    """Hub revision (branch, tag or commit); None is the default branch."""
    dtype: Precision = "auto"
    """Precision of the weights; auto is what the checkpoint was saved in."""
    device: str = "auto"
    """torch device; auto is CUDA where there is one, else the CPU."""
    device_map: str | None = None
    """accelerate's device map ("auto" spreads a model that one card cannot hold)."""
    attn_implementation: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention kernel: auto is sdpa where the model has it; flash attention takes no masks and is refused."""
    trust_remote_code: bool = False
    """Run code that a hub repository ships; off unless asked for."""
    allow_missing: bool = False
    """Load weights that are not those that config.json calls for: what is missing is random, what is left over lost."""


@dataclass
class SamplingConfig:
    """How tokens are drawn and checked (group `decode`)."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose mass reaches top_p."""
    min_p: float = 0.0
    """Drop tokens below min_p times the likeliest one's probability."""
    verifier: Literal["coupled", "greedy", "rejection", "block", "typical"] = "coupled"
    """Rule that accepts draft tokens; all but typical are exact in distribution, coupled also token for token."""
    lossy: bool = False
    """Permit verifier=typical, which changes the target's distribution; the distance is measured and printed."""
    num_draft_tokens: int = 4
    """Draft tokens per target pass (k); for trees the depth."""
    tree: str = "chain"
    """What is drafted in a round: chain, branching factors such as 3x2x1, dynamic (the likeliest nodes), sequoia (the
    best tree known beforehand) or auto (what is fastest here); the last two measure at the first call."""
    tree_nodes: int = 16
    """Draft tokens of a dynamic tree, and at most of a sequoia tree."""
    replacement: bool = False
    """verifier=rejection on trees: draw siblings independently instead of without replacement."""
    adaptive: bool = False
    """Draft what pays, at most num_draft_tokens (of a tree: its levels), and nothing where nothing pays."""
    confidence: bool = False
    """adaptive=true on chains: also stop inside a round where the draft is unsure; its steps then run one by one."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in prompt and text, multiplies negative ones; 1 leaves them alone."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens in the generated text."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for every time it was generated."""
    logit_bias: dict[int | str, float] = field(default_factory=dict)
    """Added to logits, by token id or text: {13: -2, hello: 1.5}."""
    banned_words: list[int | str] = field(default_factory=list)
    """Token ids and texts that are never written."""
    strict: bool = False
    """Pad every target pass to num_draft_tokens + 1 rows, so that output equals the strict plain loop's bit for bit."""
    max_new_tokens: int = 128
    """Tokens to generate per prompt."""

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_k, self.top_p, self.min_p, "decode.")
        check_tree(self.tree, self.num_draft_tokens, self.tree_nodes, "decode.")
        require(self.max_new_tokens >= 1, f"decode.max_new_tokens={self.max_new_tokens}; ask for at least 1 token")
        check_penalties(**{name: getattr(self, name) for name in PENALTIES}, where="decode.")
        greedy = self.verifier == "greedy"
        require(
            not greedy or self.temperature == 0,
            f"decode.verifier=greedy needs decode.temperature=0, not {self.temperature}: it compares argmaxes. "
            "Use verifier=coupled, which is greedy at temperature 0",
        )
        self._refuse_inexact()

    def _refuse_inexact(self) -> None:
        """What `Verifier.check` and `drawn` would refuse once a model is loaded, by the names alone."""
        is_chain = self.tree == "chain" or set(self.tree.split("x")) == {"1"}
        require(
            self.verifier != "block" or is_chain or self.tree == "auto",
            f"decode.verifier=block judges the tokens of one chain together, and decode.tree={self.tree} is none. Use "
            "tree=chain, or verifier=rejection or coupled, which are exact for trees",
        )
        require(
            not self.replacement or (self.verifier == "rejection" and not is_chain and self.tree != "dynamic"),
            f"decode.replacement=true draws the siblings of a static tree alike under verifier=rejection; with "
            f"decode.verifier={self.verifier} and decode.tree={self.tree} there are none that are sampled. Use "
            "replacement=false, or verifier=rejection with a tree such as 3x2x1",
        )
        require(
            not self.strict or is_chain,
            f"decode.strict=true pads every pass to a chain of one length, and decode.tree={self.tree} is none: a "
            "token's place in a tree changes the order of its sums. Use tree=chain, or strict=false",
        )
        require(
            not self.confidence or (self.adaptive and is_chain),
            f"decode.confidence=true needs decode.adaptive=true and decode.tree=chain, not {self.adaptive} and "
            f"{self.tree}: it decides how far an adaptive chain goes. Set these, or confidence=false",
        )
        require(
            self.verifier != "typical" or self.lossy,
            "decode.verifier=typical accepts every token that the target finds typical, so the text no longer follows "
            "the target's distribution, and decode.lossy=false. Use verifier=coupled, rejection or block, which keep "
            "it, or set lossy=true to have the distance from the target measured and printed",
        )


def check_tree(tree: str, num_draft_tokens: int, tree_nodes: int, where: str = "") -> None:
    """Raise ConfigError for a plan without sense or end, by name and numbers alone, before anything is loaded
    (`shapes.parse` knows what they mean); `where` stands before the names in messages."""
    for name, value in (("num_draft_tokens", num_draft_tokens), ("tree_nodes", tree_nodes)):
        require(
            1 <= value <= MOST_NODES,
            f"{where}{name}={value}; a round drafts at least 1 token and at most {MOST_NODES}: verdicts rarely accept "
            "more than ten. To decode without drafts, leave out the draft",
        )
    factors = re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", tree, re.ASCII) and [int(factor) for factor in tree.split("x")]
    require(
        bool(factors) or tree in TREES,
        f"{where}tree={tree!r} is no tree; use {', '.join(TREES)}, or branching factors such as 3x2x1",
    )
    nodes = sum(itertools.accumulate(factors or [], operator.mul))
    require(
        nodes <= MOST_NODES,
        f"{where}tree={tree} has {nodes} draft tokens, and a round takes at most {MOST_NODES}; use smaller factors",
    )


def check_temperature(temperature: float, name: str) -> None:
    """Raise ConfigError for a temperature that is neither 0 nor one that float32 can divide by.

    `name` stands before the value in the message, = included.
    """
    require(0 <= temperature < math.inf, f"{name}{temperature} is no number from 0; use 0 for greedy decoding")
    require(
        temperature == 0 or temperature >= LEAST_TEMPERATURE,
        f"{name}{temperature} lies between 0 and {LEAST_TEMPERATURE}, where rounding, and at last overflow, of the "
        "divided scores decides instead of the target. Use 0, the limit, which is greedy decoding",
    )


def check_sampling(temperature: float, top_k: int, top_p: float, min_p: float, where: str = "") -> None:
    """Raise ConfigError for values out of range; `where` stands before the names in messages."""
    check_temperature(temperature, f"{where}temperature=")
    require(top_k >= 0, f"{where}top_k={top_k} is negative; use 0 to keep every token")
    require(0 < top_p <= 1, f"{where}top_p={top_p} is outside (0, 1]; use 1 to keep every token")
    require(0 <= min_p <= 1, f"{where}min_p={min_p} is outside [0, 1]; use 0 to keep every token")


def check_penalties(
    repetition_penalty: float,
    presence_penalty: float,
    frequency_penalty: float,
    logit_bias: Mapping[int | str, float] | None,
    banned_words: Sequence[int | str],
    where: str = "",
) -> None:
    """Raise ConfigError for values that no score can be changed by: nan wins every comparison of scores, and inf leaves
    nothing to compare. `where` stands before the names in messages."""
    require(
        0 < real(repetition_penalty, f"{where}repetition_penalty") < math.inf,
        f"{where}repetition_penalty={repetition_penalty} is no finite number above 0; use 1 to penalise nothing",
    )
    for name, value in (("presence_penalty", presence_penalty), ("frequency_penalty", frequency_penalty)):
        in_range = -2 <= real(value, f"{where}{name}") <= 2
        require(in_range, f"{where}{name}={value} is outside [-2, 2]; use 0 to penalise nothing")
    bias = {} if logit_bias is None else logit_bias
    require(isinstance(bias, Mapping), f"{where}logit_bias={bias!r} maps no tokens to numbers; give {{13: -2.0}}, say")
    for key, value in bias.items():
        require(
            math.isfinite(real(value, f"{where}logit_bias[{key!r}]")),
            f"{where}logit_bias[{key!r}]={value} is not finite, and a score that becomes nan or inf beats or loses to "
            "all others whatever the model says. Give a finite number, and banned_words for what must not come",
        )
    is_list = isinstance(banned_words, Collection) and not isinstance(banned_words, str | bytes)
    require(is_list, f"{where}banned_words={banned_words!r} is no list; give token ids and texts in one")
    for name, values in (("logit_bias", bias), ("banned_words", banned_words)):
        require("" not in list(values), f"{where}{name} holds an empty text, which no token spells")


@dataclass
class DrafterConfig:
    """Which drafter proposes tokens (group `draft` of the decode stage)."""

    path: str | None = None
    """Folder of a saved draft; None decodes without one."""
    dtype: Precision = "auto"
    """Precision of the draft's weights; auto is the target's."""


@dataclass
class DecodeConfig:
    """`python -m decode`: stream one completion, draft tokens coloured by their fate."""

    target: ModelConfig = field(default_factory=ModelConfig)
    """The model whose output must not change."""
    draft: DrafterConfig = field(default_factory=DrafterConfig)
    """What proposes tokens."""
    decode: SamplingConfig = field(default_factory=SamplingConfig)
    """Sampling and verification."""
    prompt: str | None = None
    """The prompt itself, for short plain text (Hydra reads the value: quote it)."""
    prompt_file: str | None = None
    """File holding the prompt; `-` reads standard input."""
    chat: bool = False
    """Wrap the prompt as one user turn in the tokenizer's chat template."""
    stop_strings: list[str] = field(default_factory=list)
    """Texts that end the completion once they appear."""
    color: Literal["auto", "always", "never"] = "auto"
    """Colours on the terminal; auto looks whether standard output is one."""
    output_dir: str | None = None
    """Where to keep the completion and its statistics; None prints only."""
    resume: str = "never"
    """never: refuse an existing output_dir; auto: return when it is finished."""
    seed: int = 0
    """Seed of the noise."""
    plan: bool = False
    """Print what would run, and exit."""

    def __post_init__(self) -> None:
        require(
            (self.prompt is None) != (self.prompt_file is None),
            f"give exactly one of prompt= and prompt_file=; got prompt={self.prompt!r}, "
            f"prompt_file={self.prompt_file!r}. "
            "Use prompt_file=- to read standard input",
        )
        require("" not in self.stop_strings, f"stop_strings={self.stop_strings} holds an empty text, found everywhere")
