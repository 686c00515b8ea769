"""From what servers answered and we counted to results.json, and the words that define its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from decode.models.load import ModelDescription
from eval.config import EvalConfig
from eval.modes.served.comparison import Verdict, counters_of, intervals, total
from eval.modes.served.engine.metrics import Counters
from eval.modes.served.folders import ServedDraft
from eval.modes.served.schedule.conclusion import DEFINITION
from eval.prompts.prompt import Prompt
from eval.results.document import heading, target_entry
from eval.results.energy import merged
from eval.results.schema import Count, Interval, Part, Share

Asked = Sequence[Mapping[str, Any]]
_DEFINITIONS = {
    "acceptance by position": "Of the drafts whose tokens before a position were accepted, the share whose token there "
    "was accepted too. The engine's is from its own counters (/metrics), read after every prompt.",
    "counters": "Rounds in which something was drafted, and tokens accepted at each position, over all prompts. A text "
    "begins with the token of the prompt's own pass; the round that reaches the last token counts whole.",
    "ours": "Our decoder on the same prompts, drafting as the engine does: chains of one length, each token the "
    "draft's likeliest. At temperature 0 along the texts that the engine wrote, at others along texts that our target "
    "drew for itself.",
    "verdict": "equal: all counters are the same, prompt by prompt. within intervals: the 95% intervals over prompts "
    "(bootstrap) overlap at every position. parted: neither; at temperature 0 in float32 all that is not equal.",
    "schedule": DEFINITION,
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


def make_results(
    cfg: EvalConfig,
    target: ModelDescription,
    drafts: Sequence[ServedDraft],
    prompts: Sequence[Prompt],
    asked: Asked,
    here: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of results.json."""
    comparisons = [one for draft in drafts for one in _comparisons(cfg, draft, asked, here[draft.name])]
    ours = [
        OurSpeed(draft=draft.name, num_draft_tokens=draft.compared, **one)
        for draft in drafts
        for one in here[draft.name]["speeds"]
    ]
    return {
        **heading(cfg, sum(one["seconds"] for one in asked)),
        "target": target_entry(target, here[drafts[0].name]["dtype"]),
        "engine": {"name": cfg.served.engine, "version": asked[0]["version"], "options": cfg.served.options},
        "drafts": dict(cfg.drafts),
        "prompts": _prompts(cfg, prompts),
        "definitions": _DEFINITIONS,
        "rows": [],
        "energy": _energy(asked, here, cfg.seed),
        "comparisons": [one.model_dump() for one in comparisons],
        "speeds": [one.model_dump() for one in _speeds(cfg, asked)],
        "our_speeds": [one.model_dump() for one in ours],
    }


def _energy(asked: Asked, here: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
    """The server's and ours, all rounds together."""
    there = [one["energy"] for job in asked for one in job["speeds"] if "energy" in one]
    return merged([*there, *(one for draft in here.values() for one in draft.get("energy", []))], seed)


def _prompts(cfg: EvalConfig, prompts: Sequence[Prompt]) -> dict[str, Any]:
    return {
        "source": cfg.prompts.file or f"held-out split of {cfg.data.name}",
        "number": len(prompts),
        "mean_tokens": sum(len(prompt.ids) for prompt in prompts) / len(prompts),
        "max_new_tokens": cfg.decode.max_new_tokens,
        "timed_tokens": cfg.served.timed_tokens,
        "rounds": cfg.served.rounds,
    }


def _comparisons(cfg: EvalConfig, draft: ServedDraft, asked: Asked, here: Mapping[str, Any]) -> list[Comparison]:
    answers = next(one["answers"] for one in asked if one["draft"] == draft.name and one["answers"])
    found = []
    for one in here["comparisons"]:
        answer, own = answers[f"{one['temperature']:g}"], counters_of(one["counters"])
        there = counters_of(answer["counters"])
        equal = sum(a == b for a, b in zip(there, own, strict=True))
        found.append(
            Comparison(
                draft=draft.name,
                form=draft.form,
                temperature=one["temperature"],
                num_draft_tokens=draft.compared,
                prompts=len(there),
                tokens=sum(map(len, answer["texts"])),
                engine=_counters(there, cfg.seed),
                ours=_counters(own, cfg.seed),
                equal_prompts=None if one["temperature"] else equal,
                same_texts=one["same_texts"],
                verdict=one["verdict"],
                faults=one["faults"],
            )
        )
    return found


def _counters(each: Sequence[Counters], seed: int) -> ServedCounters:
    every = total(each)
    return ServedCounters(
        drafts=every.drafts,
        drafted=every.drafted,
        accepted=list(every.accepted),
        acceptance_by_position=every.by_position,
        ci95_by_position=intervals(each, seed),
    )


def _speeds(cfg: EvalConfig, asked: Asked) -> list[ServedSpeed]:
    """By draft, length and batch size, all rounds together."""
    found: dict[tuple[Any, int, int], list[Mapping[str, Any]]] = {}
    for job in asked:
        for one in job["speeds"]:
            found.setdefault((job["draft"], job["k"], one["batch_size"]), []).append(one)
    return [
        ServedSpeed(
            draft=draft,
            num_draft_tokens=k,
            batch_size=size,
            requests=rounds[0]["requests"],
            temperature=cfg.temperatures[0],
            tokens_per_s=[one["tokens"] / one["seconds"] for one in rounds],
            tokens_per_draft=_per_draft([one["counters"] for one in rounds]),
        )
        for (draft, k, size), rounds in found.items()
    ]


def _per_draft(counters: Sequence[Mapping[str, Any]]) -> float | None:
    accepted = total(counters_of(counters)).mean_accepted
    return None if accepted is None else 1 + accepted


def speed_of(results: Mapping[str, Any], draft: str | None, k: int, size: int) -> float | None:
    """Median over rounds; None where it was not timed."""
    for one in results["speeds"]:
        if (one["draft"], one["num_draft_tokens"], one["batch_size"]) == (draft, k, size):
            return median(one["tokens_per_s"])
    return None
