"""Drafter x verifier x temperature x filter x batch x architecture against the autoregressive loop, in fp64.

Coupled and greedy verdicts, and every verdict at temperature 0, must give its tokens. The others keep the
distribution, which `test_exactness` enumerates; here their tokens must lie in its support, their noise be read once,
and their cache be that of a fresh prefill after every round, as everyone's. All pairs of levels by default, the whole
product as `exhaustive`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, RepetitionPenaltyLogitsProcessor

from decode.drafters.base import Drafter
from decode.drafters.lm import LMDraft
from decode.drafters.untrained.config import NgramConfig
from decode.drafters.untrained.ngram import NgramDrafter
from decode.loop import Loop
from decode.requests import Request
from decode.sampling.warp import Sampling, warp
from decode.trees.tree_plans import Shape, chain, k_ary
from tests.decode.checks import audited_run, ragged_prompts, unpadded
from tests.decode.covering import Case, covering_cases, product
from tests.decode.drafters import Oracle, OracleTree
from tests.tiny import IN_FLOAT64, MODELS, tiny_llama

NEW_TOKENS = 12
FACTORS: dict[str, list[Any]] = {
    "architecture": IN_FLOAT64,
    "drafter": ["random", "same", "tree", "oracle", "oracle tree", "ngram", "ngram tree"],
    "verifier": ["coupled", "greedy", "rejection", "block"],
    "temperature": [0.0, 0.7, 1.0],
    "filter": ["none", "top_k", "top_p", "min_p", "repetition"],
    "batch": [1, 3, 5],
}
FILTERS: dict[str, dict[str, float]] = {"top_k": {"top_k": 5}, "top_p": {"top_p": 0.8}, "min_p": {"min_p": 0.1}}
SHAPES: dict[str, Shape] = {"tree": k_ary([2, 2, 1]), "ngram tree": k_ary([2, 2, 1])}


def is_valid(case: Case) -> bool:
    """Pairs that are exact; the others are refused, as `test_refusals` says."""
    if case["verifier"] == "greedy":
        return case["temperature"] == 0
    if case["verifier"] == "block":  # chains; at temperature 0 anything that comes for a chain
        return case["drafter"] not in SHAPES and (case["drafter"] != "oracle tree" or case["temperature"] == 0)
    return True


CASES = covering_cases(FACTORS, is_valid, whole=("architecture", "drafter", "verifier"))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_decoding_is_exact(case: Case) -> None:
    check(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("drafter", FACTORS["drafter"])
@pytest.mark.parametrize("architecture", FACTORS["architecture"])
def test_decoding_is_exact_in_the_whole_product(architecture: str, drafter: str) -> None:
    cases = product(FACTORS | {"architecture": [architecture], "drafter": [drafter]}, is_valid)
    assert len(cases) > 50
    for made in (target, draft, _random_draft):
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


def check(case: Case) -> None:
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
        audit=True,
    )
    plain, _ = Loop(model, None, replace(request, verifier="coupled", shape=chain(0))).run()
    tokens, loop = audited_run(model, drafter_for(case, plain), request)
    assert loop.stats.num_tokens == NEW_TOKENS * case["batch"]
    if case["verifier"] in ("coupled", "greedy") or case["temperature"] == 0:
        assert tokens == plain
    elif case["filter"] in FILTERS:
        for row, prompt in zip(tokens, request.prompts, strict=True):
            assert _in_support(model, row, len(prompt), request.sampling)


@cache
def target(architecture: str) -> PreTrainedModel:
    """Shared by all cases, as are its captured passes."""
    return MODELS[architecture]()


@cache
def draft(architecture: str, strength: float) -> LMDraft:
    """The target's weights again, with noise on them."""
    model, generator = MODELS[architecture](), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight += strength * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    return LMDraft(model)


@cache
def _random_draft() -> LMDraft:
    return LMDraft(tiny_llama(num_layers=1, seed=3, dtype=torch.float64))


def drafter_for(case: Case, plain: list[list[int]]) -> Drafter:
    """The drafter of this name; the oracles know the autoregressive text."""
    name = case["architecture"]
    makers: dict[str, Callable[[], Drafter]] = {
        "random": _random_draft,
        "same": lambda: draft(name, 0.0),
        "tree": lambda: draft(name, 0.02),
        "oracle": lambda: Oracle(plain, 64),
        "oracle tree": lambda: OracleTree(plain, 64),
        "ngram": lambda: _reader(plain),
        "ngram tree": lambda: _reader(plain),
    }
    return makers[case["drafter"]]()


def _reader(plain: list[list[int]]) -> NgramDrafter:
    """It has read the autoregressive texts, every fourth token of them wrong."""
    drafter = NgramDrafter(NgramConfig(least_match=1, memory=1000))
    for tokens in plain:
        drafter.end(drafter.begin([token if place % 4 else (token + 1) % 64 for place, token in enumerate(tokens)]))
    return drafter


def _penalty() -> LogitsProcessorList:
    return LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)])


def _in_support(model: PreTrainedModel, tokens: list[int], begin: int, sampling: Sampling) -> bool:
    scores: Tensor = warp(model(torch.tensor([tokens])).logits[0], sampling)
    new = torch.arange(begin, len(tokens))
    return bool((scores[new - 1, torch.tensor(tokens)[new]] > -torch.inf).all())
