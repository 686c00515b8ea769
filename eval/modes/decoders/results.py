"""From finished cells to results.json: per-arm table, rows, peers, and the words that define them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from decode.models.load import ModelDescription
from eval.arms.base import ASSISTED, AUTOREGRESSIVE, OURS, TRANSFORMERS, is_vllm, our_name
from eval.config import EvalConfig
from eval.results.comparisons import (
    BESIDE,
    CELL,
    SPEEDS,
    Run,
    about,
    cell_with_ratios,
    cells_of_runs,
    check_runs,
    matching,
    pooled_comparison,
    prompts_entry,
)
from eval.results.document import DEFINITIONS, heading, target_entry
from eval.results.energy import energy_of
from eval.results.figures import described
from eval.results.pooling import medians
from eval.results.statistics import arm_ratio, arm_ratio_of_runs, arm_speed, fastest_arm

ISSUE = "55005"
"""Of vLLM, on which `distill.engines.inside_vllm.vllm_temperatures` has more."""
_SHARED = (*SPEEDS, "component_times", "predicted_speedup", "realised", *BESIDE)
_OWN = {
    "cell": CELL,
    "choices": "Which settings are timed, chosen at each batch size and temperature on prompts of the validation "
    "split, which are never reported; the fastest median over both texts is the best one. All of ours "
    "are exact in distribution, and plain decoding is one of them: a draft is chosen where 95% of resampled prompts "
    "have it at 0.97 of plain or more. Chosen again: the share of resamples that choose the same; loss: what a "
    "choice by another draw of prompts gives away on the average.",
    "code, prose": "Code: windows of held-out sources. Prose: how docstrings of held-out sources begin. Both texts "
    "come from one corpus.",
    "vllm": "vLLM's CPU engine in its own environment, times taken inside it. It draws its own noise, so at "
    "temperature 1 its text differs from ours. Over vLLM is over its faster arm of the cell, with a draft or without. "
    f"Temperatures of drafted tokens, which a CPU build leaves unwritten (vLLM issue {ISSUE}), are written for it.",
}


def make_results(
    cfg: EvalConfig,
    target: ModelDescription,
    dtype: str,
    cells: Sequence[dict[str, Any]],
    choices: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """The content of results.json."""
    return {
        **heading(cfg, sum(one["seconds"] for one in [*cells, *choices])),
        "target": target_entry(target, dtype),
        "drafts": dict([next(iter(cfg.drafts.items()))]),
        "prompts": {
            **prompts_entry(cfg, cfg.decoders),
            "mean_tokens": sum(cell["mean_tokens"] for cell in cells) / len(cells),
            "screening_batches": cfg.decoders.screening_batches,
        },
        "settings": {name: dict(changes) for name, changes in cfg.decoders.arms.items()},
        "definitions": {**_OWN, **{name: DEFINITIONS[name] for name in _SHARED}},
        "rows": [row for cell in cells for row in cell["rows"]],
        "energy": energy_of(cells),
        "peers": [peer for cell in cells for peer in _peers(cell, choices, cfg.seed)],
        "choices": list(choices),
        "cells": [cell_with_ratios(cell, compared_arms, cfg.seed) for cell in cells],
    }


def compared_arms(cells: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Ratio -> the arm that others are held against in runs of one cell; of vLLM's the fastest."""
    vllm = fastest_arm(cells, [one["arm"] for one in cells[0]["arms"] if is_vllm(one["arm"])])
    others = {"over_transformers": TRANSFORMERS, "over_autoregressive": AUTOREGRESSIVE, "over_assisted": ASSISTED}
    return others if vllm is None else {**others, "over_vllm": vllm}


def _peers(cell: dict[str, Any], choices: Sequence[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Every arm that is not ours, with the ratio of our best setting over it."""
    point = (cell["batch_size"], cell["temperature"])
    best = next(one["best"] for one in choices if (one["batch_size"], one["temperature"]) == point)
    ours = our_name(best[OURS])
    return [
        {
            "name": one["arm"],
            "best": True,
            "setting": best.get(one["arm"]),
            "text": cell["text"],
            "temperature": cell["temperature"],
            "batch_size": cell["batch_size"],
            "version": version("transformers") if one["arm"].startswith("transformers") else cell["vllm_version"],
            "tokens_per_s": arm_speed([cell], one["arm"]),
            **_ours_over(cell, ours, one["arm"], seed),
        }
        for one in cell["arms"]
        if one["arm"] != AUTOREGRESSIVE and not one["arm"].startswith(f"{OURS}, ")
    ]


def _ours_over(cell: dict[str, Any], ours: str, peer: str, seed: int) -> dict[str, Any]:
    estimate = arm_ratio([cell], ours, peer, seed)
    if estimate is None:
        return {"ratio_ours_over_peer": None, "ratio_ci95": None}
    return {"ratio_ours_over_peer": estimate.value, "ratio_ci95": estimate.interval}


def check_comparisons(files: Sequence[Path], runs: Sequence[Run]) -> None:
    """Raise InputError naming two of `files` and both values where `runs` do not time the same arms on the same
    prompts."""
    check_runs(files, runs, ("settings",), "decoders.choices")


def pool_comparisons(runs: Sequence[Run]) -> dict[str, Any]:
    """The content of results.json for `runs` that `check_comparisons` let pass."""
    first, cells = runs[0], cells_of_runs(runs)
    peers = [[matching(run["peers"], _peer_key, _peer_key(peer)) for run in runs] for peer in first["peers"]]
    return {
        **pooled_comparison(runs, compared_arms),
        "peers": [_peer(each, cells, first["choices"], first["environment"]["seed"]) for each in peers],
    }


def _peer(each: Sequence[Run], cells: Sequence[Sequence[Run]], choices: Sequence[Run], seed: int) -> dict[str, Any]:
    best = next(one["best"] for one in choices if about(one)[:2] == about(each[0])[:2])
    (of_peer,) = [runs for runs in cells if about(runs[0]) == about(each[0])]
    ratio = described("ratio", arm_ratio_of_runs(of_peer, our_name(best[OURS]), each[0]["name"], seed))
    return {
        **medians(each, "tokens_per_s"),
        "ratio_ours_over_peer": ratio["ratio"],
        "ratio_ci95": ratio["ratio_ci95"],
        "ratio_by_run": [peer["ratio_ours_over_peer"] for peer in each],
    }


def _peer_key(peer: Run) -> tuple[Any, ...]:
    return *about(peer), peer["name"]
