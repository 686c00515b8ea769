"""Drafter x verifier x temperature x filter x batch x refill x architecture against the autoregressive loop: few cases
that still hold every pair of levels together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, RepetitionPenaltyLogitsProcessor

from decode.loop import Loop
from decode.requests import Request
from decode.sampling.warp import Sampling, warp
from decode.stats import Stats
from decode.trees.tree_plans import chain
from tests.decode import matrix_drafters
from tests.decode.checks import audited_run, ragged_prompts, unpadded
from tests.decode.matrix_drafters import MAKERS, SHAPES, WITHOUT_TRAINING, target
from tests.tiers import by_default
from tests.tiny import IN_FLOAT64

Case = dict[str, Any]


def product(factors: Mapping[str, Sequence[Any]], valid: Callable[[Case], bool]) -> list[Case]:
    """Every case that is valid."""
    cases = (dict(zip(factors, levels, strict=True)) for levels in itertools.product(*factors.values()))
    return [case for case in cases if valid(case)]


def covering_cases(
    factors: Mapping[str, Sequence[Any]], valid: Callable[[Case], bool], whole: Sequence[str]
) -> list[Case]:
    """Cases in which every pair of levels of two factors meets, as far as any valid case has it, and every combination
    of the factors `whole`: for each of these the case with the most pairs that are still missing."""
    groups: dict[tuple[Any, ...], list[Case]] = {}
    for case in product(factors, valid):
        groups.setdefault(tuple(case[name] for name in whole), []).append(case)
    missing = {pair for cases in groups.values() for case in cases for pair in _pairs(case)}
    chosen = []
    for cases in groups.values():
        chosen.append(_best(cases, missing, len(chosen)))
        missing -= _pairs(chosen[-1])
    while missing:
        chosen.append(_best([case for cases in groups.values() for case in cases], missing, 0))
        missing -= _pairs(chosen[-1])
    return chosen


def _best(cases: list[Case], missing: set[Any], turn: int) -> Case:
    """Of equals another one each time, so that later levels get their share as well."""
    turned = cases[turn % len(cases) :] + cases[: turn % len(cases)]
    return max(turned, key=lambda case: len(_pairs(case) & missing))


def _pairs(case: Case) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(case.items(), 2))


NEW_TOKENS = 12
FACTORS: dict[str, list[Any]] = {
    "architecture": IN_FLOAT64,
    "drafter": [*MAKERS],
    "verifier": ["coupled", "greedy", "rejection", "block"],
    "temperature": [0.0, 0.7, 1.0],
    "filter": ["none", "top_k", "top_p", "min_p", "repetition"],
    "batch": [1, 3, 5],
    "rows": ["all", "fewer"],
}
FILTERS: dict[str, dict[str, float]] = {"top_k": {"top_k": 5}, "top_p": {"top_p": 0.8}, "min_p": {"min_p": 0.1}}


def is_valid(case: Case) -> bool:
    """Pairs that are exact; the others are refused, as `test_verifiers` says. A request that is alone needs its row."""
    if case["batch"] == 1 and case["rows"] == "fewer":
        return False
    if case["verifier"] == "greedy":
        return case["temperature"] == 0
    if case["verifier"] == "block":  # chains; at temperature 0 anything that comes for a chain
        return case["drafter"] not in SHAPES and (case["drafter"] != "oracle tree" or case["temperature"] == 0)
    return True


def is_quick(case: Case) -> bool:
    """Of those in the default tier: drafts without training, where others have tests of their own."""
    return (
        case["architecture"] == "llama"
        and case["drafter"] in WITHOUT_TRAINING
        and case["verifier"] in ("coupled", "rejection")
    )


CASES = covering_cases(FACTORS, is_valid, whole=("architecture", "drafter", "verifier"))
IN_TURN = sorted(CASES, key=is_quick, reverse=True)


@pytest.mark.parametrize(
    "case", by_default(sum(map(is_quick, CASES)), IN_TURN), ids=lambda case: "-".join(map(str, case.values()))
)
def test_decoding_is_exact(case: Case) -> None:
    stats = check(case)
    if is_quick(case) and case["verifier"] == "coupled" and case["drafter"] != "exit_adapter":  # its weights are random
        assert any(one.accepted for one in stats.rounds), "what is drafted from the text itself stands"


@pytest.mark.exhaustive
@pytest.mark.parametrize("drafter", FACTORS["drafter"])
@pytest.mark.parametrize("architecture", FACTORS["architecture"])
def test_decoding_is_exact_in_the_whole_product(architecture: str, drafter: str) -> None:
    cases = product(FACTORS | {"architecture": [architecture], "drafter": [drafter]}, is_valid)
    assert len(cases) > 50
    for made in (target, matrix_drafters.draft, matrix_drafters.random_draft, matrix_drafters.foreign_draft):
        made.cache_clear()  # models keep their captures, 10 MB for each sampling
    for case in cases:
        check(case)


def test_every_pair_of_levels_is_covered() -> None:
    """And each drafter x verifier x architecture that is exact at all."""
    wanted = product(FACTORS, is_valid)
    for names in [("drafter", "verifier", "architecture"), ("temperature", "filter"), ("batch", "verifier")]:
        have, want = ({tuple(case[name] for name in names) for case in cases} for cases in (CASES, wanted))
        assert have == want
    assert len(CASES) < len(wanted) / 20


def check(case: Case) -> Stats:
    """One case, its cache audited and its ledger kept."""
    model = target(case["architecture"])
    ids, mask = ragged_prompts(case["batch"])
    request = Request(
        unpadded(ids, mask),
        NEW_TOKENS,
        Sampling(case["temperature"], **FILTERS.get(case["filter"], {})),  # type: ignore[arg-type]
        case["verifier"],
        SHAPES.get(case["drafter"], chain(3)),
        processors=_penalty() if case["filter"] == "repetition" else None,
        seed=5,
        batch_size=(case["batch"] + 1) // 2 if case["rows"] == "fewer" else None,
        audit=True,
    )
    plain, _ = Loop(model, None, replace(request, verifier="coupled", shape=chain(0))).run()
    tokens, loop = audited_run(model, MAKERS[case["drafter"]](case["architecture"], plain), request)
    assert loop.stats.num_tokens == NEW_TOKENS * case["batch"]
    if case["verifier"] in ("coupled", "greedy") or case["temperature"] == 0:
        assert tokens == plain
    elif case["filter"] in FILTERS:
        for row, prompt in zip(tokens, request.prompts, strict=True):
            assert _in_support(model, row, len(prompt), request.sampling)
    return loop.stats


def _penalty() -> LogitsProcessorList:
    return LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)])


def _in_support(model: PreTrainedModel, tokens: list[int], begin: int, sampling: Sampling) -> bool:
    scores: Tensor = warp(model(torch.tensor([tokens])).logits[0], sampling)
    new = torch.arange(begin, len(tokens))
    return bool((scores[new - 1, torch.tensor(tokens)[new]] > -torch.inf).all())
