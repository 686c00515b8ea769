"""results.json of `mode=served`, typed: the mode writes it, the page reads it back; and the words that define its
figures."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from eval.results.schema import Count, Interval, Part, Share

Verdict = Literal["equal", "within intervals", "parted"]
DEFINITIONS = {
    "acceptance by position": "Of the drafts whose tokens before a position were accepted, the share whose token there "
    "was accepted too. The engine's is from its own counters (/metrics), read after every prompt.",
    "counters": "Rounds in which something was drafted, and tokens accepted at each position, over all prompts. A text "
    "begins with the token of the prompt's own pass; the round that reaches the last token counts whole.",
    "ours": "Our decoder on the same prompts, drafting as the engine does: chains of one length, each token the "
    "draft's likeliest. At temperature 0 along the texts that the engine wrote, at others along texts that our target "
    "drew for itself.",
    "verdict": "equal: all counters are the same, prompt by prompt. within intervals: the 95% intervals over prompts "
    "(bootstrap) overlap at every position. parted: neither; at temperature 0 in float32 all that is not equal.",
    "schedule": "The draft length of a batch size: the shortest one, unless a longer one is faster beyond the error "
    "bar, the 95% interval of the mean log ratio of their tokens/s by round (Student's t). k = 0 is measured with the "
    "draft loaded where the engine follows a schedule. Between two batch sizes that were measured the shorter of both "
    "lengths stands; behind the last one the engine goes on with its length.",
    "tokens/s": "Of all requests together, from the first question to the last answer, prompts read included; each "
    "round another start of the server. Ours: the same prompts and limits in one process. Median of the rounds.",
}


class ServedCounters(Part):
    """Counters, in the engine or here."""

    drafts: Count
    drafted: Count
    accepted: list[Count]
    acceptance_by_position: list[Share | None]
    ci95_by_position: list[Interval | None]
    """Over prompts."""


class Comparison(Part):
    """One draft at one temperature."""

    draft: str
    form: str
    temperature: float
    num_draft_tokens: Count
    prompts: Count
    tokens: Count
    """That the engine wrote."""
    engine: ServedCounters
    ours: ServedCounters
    equal_prompts: Count | None
    """Prompts with equal counters; None above temperature 0, where texts differ."""
    same_texts: Count | None
    """Greedy texts that are our target's own; rounding makes some part."""
    verdict: Verdict
    faults: list[str]
    """Sentences on why counters parted: the likely faults, and what the counters say by themselves."""


class ServedSpeed(Part):
    """One draft length at one batch size."""

    draft: str | None
    """None is the target alone."""
    num_draft_tokens: Count
    batch_size: Count
    requests: Count
    temperature: float
    tokens_per_s: list[float]
    """By round."""
    tokens_per_draft: float | None
    """Tokens written per draft, the target's own included."""


class OurSpeed(Part):
    """Our decoder at one batch size, by round."""

    draft: str
    num_draft_tokens: Count
    batch_size: Count
    drafted: list[float]
    """Tokens per second with the draft."""
    alone: list[float]
    """Without."""


class ServedLength(Part):
    """What is drafted at a batch size."""

    batch_size: Count
    num_draft_tokens: Count
    over_alone: float
    """Its speed over that of the target alone."""
    ci95: Interval


class Pasted(Part):
    """For an engine."""

    model_config = ConfigDict(extra="ignore")  # SGLang's files of a schedule, in results of a time when there were some

    engine: str
    """As `format` of python -m train.export calls it."""
    title: str
    """As its makers do."""
    num_draft_tokens: Count
    """The longest draft."""
    text: str
    """What to paste; empty where the engine is best left without the draft."""
    why: str
    """The figures that it comes from."""


class Conclusion(Part):
    """Of a draft."""

    draft: str
    lengths: list[ServedLength]
    schedule: list[list[int]]
    """[from, to, k], batch sizes inclusive."""
    pastes: list[Pasted]


class Serving(Part):
    """The engine."""

    name: str
    version: str
    options: list[str]


class ServedPrompts(Part):
    """What was asked."""

    source: str
    number: Count
    mean_tokens: float
    max_new_tokens: Count
    timed_tokens: Count
    rounds: Count


class ServedResults(Part):
    """The file."""

    model_config = ConfigDict(extra="ignore")

    schema_version: Literal[2] = Field(alias="schema")
    name: str
    mode: Literal["served"]
    environment: dict[str, Any]
    target: dict[str, Any]
    engine: Serving
    drafts: dict[str, str]
    prompts: ServedPrompts
    definitions: dict[str, str]
    rows: list[dict[str, Any]]
    energy: list[dict[str, Any]] | None = None
    """None in results of a time before energy was metered."""
    comparisons: list[Comparison]
    speeds: list[ServedSpeed]
    our_speeds: list[OurSpeed]
    schedules: list[Conclusion]

    def speed(self, draft: str | None, k: int, size: int) -> list[float] | None:
        """Tokens per second by round; None where it was not timed."""
        for one in self.speeds:
            if (one.draft, one.num_draft_tokens, one.batch_size) == (draft, k, size):
                return one.tokens_per_s
        return None
