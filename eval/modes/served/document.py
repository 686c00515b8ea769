"""From what servers answered and we counted to results.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import eq
from typing import Any

from decode.models.describe import ModelDescription
from eval.config import EvalConfig
from eval.modes.served.comparison import intervals
from eval.modes.served.engine.metrics import Counters, total
from eval.modes.served.folders import ServedDraft
from eval.modes.served.kept import Asked, Here, Timed, answers_of
from eval.modes.served.results import (
    DEFINITIONS,
    Comparison,
    OurSpeed,
    ServedCounters,
    ServedPrompts,
    ServedResults,
    ServedSpeed,
    Serving,
)
from eval.modes.served.schedule.conclusion import conclusions
from eval.prompts.prompt import Prompt
from eval.results.document import heading, target_entry
from eval.results.energy import merged


def make_results(
    cfg: EvalConfig,
    target: ModelDescription,
    drafts: Sequence[ServedDraft],
    prompts: Sequence[Prompt],
    asked: Sequence[Asked],
    here: Mapping[str, Here],
) -> ServedResults:
    """The content of results.json."""
    speeds = _speeds(cfg, asked)
    return ServedResults(
        **heading(cfg, sum(one.seconds for one in asked)),
        target=target_entry(target, here[drafts[0].name].dtype),
        engine=Serving(name=cfg.served.engine, version=asked[0].version, options=cfg.served.options),
        drafts=dict(cfg.drafts),
        prompts=ServedPrompts(
            source=cfg.prompts.file or f"held-out split of {cfg.data.name}",
            number=len(prompts),
            mean_tokens=sum(len(prompt.ids) for prompt in prompts) / len(prompts),
            max_new_tokens=cfg.decode.max_new_tokens,
            timed_tokens=cfg.served.timed_tokens,
            rounds=cfg.served.rounds,
        ),
        definitions=DEFINITIONS,
        rows=[],
        energy=_energy(asked, here, cfg.seed),
        comparisons=[one for draft in drafts for one in _comparisons(cfg, draft, asked, here[draft.name])],
        speeds=speeds,
        our_speeds=[
            OurSpeed(draft=draft.name, num_draft_tokens=draft.compared, **dict(one))
            for draft in drafts
            for one in here[draft.name].speeds
        ],
        schedules=conclusions(cfg, drafts, speeds),
    )


def _energy(asked: Sequence[Asked], here: Mapping[str, Here], seed: int) -> list[dict[str, Any]]:
    """The server's and ours, all rounds together."""
    there = [one.energy for job in asked for one in job.speeds]
    return merged([*there, *(one for draft in here.values() for one in draft.energy)], seed)


def _comparisons(cfg: EvalConfig, draft: ServedDraft, asked: Sequence[Asked], here: Here) -> list[Comparison]:
    answers = answers_of(asked, draft.name)
    pairs = [(one, answers[f"{one.temperature:g}"]) for one in here.comparisons]
    return [
        Comparison(
            draft=draft.name,
            form=draft.form,
            temperature=one.temperature,
            num_draft_tokens=draft.compared,
            prompts=len(there.counters),
            tokens=sum(map(len, there.texts)),
            engine=_counters(there.counters, cfg.seed),
            ours=_counters(one.counters, cfg.seed),
            equal_prompts=None if one.temperature else sum(map(eq, there.counters, one.counters)),
            same_texts=one.same_texts,
            verdict=one.verdict,
            faults=one.faults,
        )
        for one, there in pairs
    ]


def _counters(each: Sequence[Counters], seed: int) -> ServedCounters:
    every = total(each)
    return ServedCounters(
        drafts=every.drafts,
        drafted=every.drafted,
        accepted=list(every.accepted),
        acceptance_by_position=every.by_position,
        ci95_by_position=intervals(each, seed),
    )


def _speeds(cfg: EvalConfig, asked: Sequence[Asked]) -> list[ServedSpeed]:
    """By draft, length and batch size, all rounds together."""
    found: dict[tuple[str | None, int, int], list[Timed]] = {}
    for job in asked:
        for one in job.speeds:
            found.setdefault((job.draft, job.k, one.batch_size), []).append(one)
    return [
        ServedSpeed(
            draft=draft,
            num_draft_tokens=k,
            batch_size=size,
            requests=rounds[0].requests,
            temperature=cfg.temperatures[0],
            tokens_per_s=[one.tokens_per_s for one in rounds],
            tokens_per_draft=total([one.counters for one in rounds]).tokens_per_draft,
        )
        for (draft, k, size), rounds in found.items()
    ]
