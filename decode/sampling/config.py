"""What a user sets about how tokens are drawn, drafted and verified; imports nothing heavy."""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from decode.common.extras import extra, require_installed
from decode.common.typed_config import flag, real, require, unknown_key_message, whole
from decode.trees import MOST_NODES

LEAST_TEMPERATURE = 1e-4  # logits of 30 divided by it are float32 numbers with steps of 0.03
TREES = ("chain", "dynamic")
OF_THE_PREFIX = (
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "banned_words", "grammar",
)  # fmt: skip
"""Settings that change a token's score by the tokens before it."""
GRAMMARS = {".json": "compile_json_schema", ".ebnf": "compile_grammar", ".regex": "compile_regex"}
"""What a grammar's file holds, by its ending: the method of xgrammar's compiler that reads it."""
Rule = Literal["coupled", "greedy", "rejection", "block", "typical"]


@dataclass
class SamplingConfig:
    """How tokens are drawn and checked: group `decode`, and the settings of `generate`, which takes numbers of other
    libraries too. Making one checks everything that can be told before a model is loaded; raises ConfigError."""

    temperature: float = 1.0
    """Divides the logits; 0 is greedy: the likeliest token."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose mass reaches top_p."""
    min_p: float = 0.0
    """Drop tokens below min_p times the likeliest one's probability."""
    verifier: Rule = "coupled"
    """Rule that accepts draft tokens; all but typical are exact in distribution, coupled also token for token."""
    lossy: bool = False
    """Permit verifier=typical, which changes the target's distribution; the distance is measured and printed."""
    num_draft_tokens: int = 5
    """Draft tokens per target pass (k); for trees the depth."""
    tree: str = "chain"
    """What is drafted in a round: chain, branching factors such as 3x2x1, or dynamic (the likeliest nodes)."""
    tree_nodes: int = 16
    """Draft tokens of a dynamic tree per round."""
    replacement: bool = False
    """verifier=rejection on trees: draw siblings independently instead of without replacement."""
    adaptive: bool = False
    """Draft what pays, at most num_draft_tokens (of a tree: its levels), and nothing where nothing pays."""
    confidence: bool = False
    """adaptive=true on chains: also stop inside a round where the draft predicts that it no longer pays, as DSpark
    heads do."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in prompt and text, multiplies negative ones; 1 leaves them alone."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the generated text, once each; -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for every time it was generated; -2 to 2."""
    logit_bias: dict[int | str, float] = field(default_factory=dict)
    """Added to logits, by token id or text: {13: -2, hello: 1.5}."""
    banned_words: list[int | str] = field(default_factory=list)
    """Token ids and texts that are never written."""
    grammar: str | None = None
    """File that says what may be written: a JSON schema (.json), a grammar in xgrammar's EBNF (.ebnf) or a regular
    expression (.regex); None is any text."""
    overlap: bool = False
    """Draft the next round while the target verifies this one: chains of a draft LM, best on a device of its own."""
    strict: bool = False
    """Pad every target pass to num_draft_tokens + 1 rows, so that output equals the strict plain loop's bit for bit."""
    max_new_tokens: int = 128
    """Tokens to generate per prompt."""

    def __post_init__(self) -> None:
        self.tree = "chain" if self.tree is None else self.tree
        self.logit_bias = {} if self.logit_bias is None else self.logit_bias
        for one in fields(self):
            as_asked = {bool: flag, int: whole, float: real}.get(type(one.default))
            if as_asked is not None:
                setattr(self, one.name, as_asked(getattr(self, one.name), one.name))
        rules = ", ".join(get_args(Rule))
        require(self.verifier in get_args(Rule), f"verifier={self.verifier!r} is not known; choose one of {rules}")
        require(self.max_new_tokens >= 1, f"max_new_tokens={self.max_new_tokens}; ask for at least 1 token")
        check_sampling(self.temperature, self.top_k, self.top_p, self.min_p)
        self._check_tree()
        self._check_penalties()
        self._check_grammar()
        self._refuse_inexact()

    @property
    def is_chain(self) -> bool:
        """Whether a round drafts one token after another."""
        if not isinstance(self.tree, str):
            return self.tree.is_chain
        return self.tree == "chain" or set(self.tree.split("x")) == {"1"}

    def _check_tree(self) -> None:
        """Refuse plans without sense or end, before anything is loaded (`tree_plans.parse` knows what they mean)."""
        for name in ("num_draft_tokens", "tree_nodes"):
            require(
                1 <= getattr(self, name) <= MOST_NODES,
                f"{name}={getattr(self, name)}; a round drafts at least 1 token and at most {MOST_NODES}: verdicts "
                "rarely accept more than ten. To decode without drafts, leave out the draft",
            )
        if hasattr(self.tree, "is_chain"):
            return  # a plan
        require(
            self.tree not in ("auto", "sequoia"),
            f"tree={self.tree} is gone: what it chose was slower than the best chain. Use tree=chain with "
            "adaptive=true, which drafts as much as pays, or name a tree: dynamic, 3x2x1",
        )
        branching = isinstance(self.tree, str) and re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", self.tree, re.ASCII)
        require(
            self.tree in TREES or bool(branching),
            f"tree={self.tree!r} is not a tree; use {', '.join(TREES)}, or branching factors such as 3x2x1",
        )
        factors = [int(factor) for factor in self.tree.split("x")] if branching else []
        nodes = sum(itertools.accumulate(factors, operator.mul))
        require(
            nodes <= MOST_NODES,
            f"tree={self.tree} has {nodes} draft tokens, and a round takes at most {MOST_NODES}; use smaller factors",
        )

    def _check_penalties(self) -> None:
        """Refuse values that no score can be changed by: nan wins every comparison of scores, and inf leaves nothing to
        compare."""
        require(
            0 < self.repetition_penalty < math.inf,
            f"repetition_penalty={self.repetition_penalty} is not a finite number above 0; use 1 to penalise nothing",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            require(-2 <= value <= 2, f"{name}={value} is outside [-2, 2]; use 0 to penalise nothing")
        bias, banned = self.logit_bias, self.banned_words
        require(
            isinstance(bias, Mapping), f"logit_bias={bias!r} does not map tokens to numbers; give, say, {{13: -2.0}}"
        )
        for key, value in bias.items():
            require(
                math.isfinite(real(value, f"logit_bias[{key!r}]")),
                f"logit_bias[{key!r}]={value} is not finite, and a score that becomes nan or inf beats or loses to "
                "all others whatever the model says. Give a finite number, and banned_words for what must not come",
            )
        is_list = isinstance(banned, Collection) and not isinstance(banned, str | bytes)
        require(is_list, f"banned_words={banned!r} is not a list; give a list of token ids and texts")
        for name, values in (("logit_bias", bias), ("banned_words", banned)):
            require("" not in list(values), f"{name} holds an empty text, which no token spells")

    def _check_grammar(self) -> None:
        if self.grammar is None:
            return
        require(
            Path(self.grammar).suffix in GRAMMARS,
            f"grammar={self.grammar} does not end in {', '.join(GRAMMARS)}, which says what it holds: a JSON schema, a "
            "grammar in EBNF or a regular expression; rename the file",
        )
        require(Path(self.grammar).is_file(), f"grammar={self.grammar} does not exist; name a file")
        require_installed("xgrammar", f"grammar={self.grammar}", f"Install it: {extra('grammar')}")

    def _refuse_inexact(self) -> None:
        """Settings that contradict each other, and pairs of rule and tree that are not exact."""
        require(
            self.verifier != "greedy" or self.temperature == 0,
            f"verifier=greedy compares argmaxes, which is exact at temperature 0 only, not at {self.temperature}. Use "
            "verifier=coupled, which is greedy at temperature 0",
        )
        require(
            self.verifier != "block" or self.is_chain,
            f"verifier=block judges the tokens of one chain together, and tree={self.tree} is none. Use tree=chain, or "
            "verifier=rejection or coupled, which are exact for trees",
        )
        require(
            not self.replacement or (self.verifier == "rejection" and not self.is_chain and self.tree != "dynamic"),
            f"replacement=true draws siblings of a static tree under verifier=rejection, and verifier={self.verifier} "
            f"with tree={self.tree} samples none. Use replacement=false, or verifier=rejection with a tree such as "
            "3x2x1",
        )
        require(
            not self.strict or self.is_chain,
            f"strict=true pads every pass to a chain of one length, and tree={self.tree} is none: a token's place in a "
            "tree changes the order of its sums. Use tree=chain, or strict=false",
        )
        require(
            not self.confidence or (self.adaptive and self.is_chain),
            f"confidence=true needs adaptive=true and tree=chain, not adaptive={self.adaptive} and tree={self.tree}: "
            "it decides how far an adaptive chain goes. Set these, or confidence=false",
        )
        require(
            not self.overlap or self.is_chain,
            f"overlap=true goes on from the last token of a chain while the target verifies it, and tree={self.tree} "
            "has several ends. Use tree=chain, or overlap=false",
        )
        require(
            not (self.overlap and self.adaptive),
            "adaptive=true weighs the time that drafting takes, which overlap=true hides behind the target's, and "
            "changes how much is drafted after the next round was begun. Use one of the two",
        )
        require(
            self.verifier != "typical" or self.lossy,
            "verifier=typical changes the target's distribution, and lossy=false. Use verifier=coupled, rejection or "
            "block, which keep it, or lossy=true, which measures the distance from the target and prints it",
        )


def sampling_config(settings: Mapping[str, Any]) -> SamplingConfig:
    """The SamplingConfig with these fields; ConfigError for an unknown one, with the closest that is known."""
    known = {one.name for one in fields(SamplingConfig)}
    unknown = [name for name in settings if name not in known]
    require(not unknown, unknown_key_message(SamplingConfig, unknown[0]) if unknown else "")
    return SamplingConfig(**settings)


def check_temperature(temperature: float, name: str) -> None:
    """Raise ConfigError for a temperature that is neither 0 nor one that float32 can divide by.

    `name` stands before the value in the message, = included.
    """
    require(
        0 <= temperature < math.inf,
        f"{name}{temperature} is not a finite number of 0 or more; use 0 for greedy decoding",
    )
    require(
        temperature == 0 or temperature >= LEAST_TEMPERATURE,
        f"{name}{temperature} lies between 0 and {LEAST_TEMPERATURE}, where rounding, and at last overflow, of the "
        "divided scores decides instead of the target. Use 0, the limit, which is greedy decoding",
    )


def check_sampling(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Raise ConfigError for values out of range."""
    check_temperature(temperature, "temperature=")
    require(top_k >= 0, f"top_k={top_k} is negative; use 0 to keep every token")
    require(0 < top_p <= 1, f"top_p={top_p} is outside (0, 1]; use 1 to keep every token")
    require(0 <= min_p <= 1, f"min_p={min_p} is outside [0, 1]; use 0 to keep every token")
