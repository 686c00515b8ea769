"""What a comparison of decoders concludes: every peer, with the ratio of our best setting over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from eval.arms.base import ASSISTED, AUTOREGRESSIVE, OURS, TRANSFORMERS, is_vllm, our_name
from eval.results.compared import Comparison
from eval.results.comparisons import Run
from eval.results.statistics import arm_ratio, arm_speed, described, fastest_arm, ratio_over

ISSUE = "55005"
"""Of vLLM, on which `distill.engines.inside_vllm.vllm_temperatures` has more."""
DEFINITIONS = {
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


def over_others(cells: Sequence[Run]) -> dict[str, str]:
    """Ratio -> the arm that others are held against in runs of one cell; of vLLM's the fastest."""
    vllm = fastest_arm(cells, [one["arm"] for one in cells[0]["arms"] if is_vllm(one["arm"])])
    others = {"over_transformers": TRANSFORMERS, "over_autoregressive": AUTOREGRESSIVE, "over_assisted": ASSISTED}
    return others if vllm is None else {**others, "over_vllm": vllm}


def peers(found: Comparison, cells: Sequence[Sequence[Run]]) -> list[dict[str, Any]]:
    """Every arm that is not ours, cell by cell; `cells` holds each cell in every run."""
    bests = {one.point: one.best for one in found.choices}
    return [
        _peer(runs, bests[cell.point], one.arm, found)
        for cell, runs in zip(found.cells, cells, strict=True)
        for one in cell.arms
        if one.arm != AUTOREGRESSIVE and not one.arm.startswith(f"{OURS}, ")
    ]


def _peer(runs: Sequence[Run], best: Mapping[str, str], peer: str, found: Comparison) -> dict[str, Any]:
    cell, ours, seed = runs[0], our_name(best[OURS]), found.seed
    speeds = [speed for run in runs if (speed := arm_speed([run], peer)) is not None]
    ratio = described("ratio", ratio_over(runs, ours, peer, seed))
    alone = [arm_ratio([run], ours, peer, seed) for run in runs]
    by_run = {"ratio_by_run": [None if one is None else one.value for one in alone]} if len(runs) > 1 else {}
    is_transformers = peer.startswith("transformers")
    return {
        "name": peer,
        "best": True,
        "setting": best.get(peer),
        **{name: cell[name] for name in ("text", "temperature", "batch_size")},
        "version": found.environment["packages"].get("transformers") if is_transformers else cell["vllm_version"],
        "tokens_per_s": median(speeds) if speeds else None,
        "ratio_ours_over_peer": ratio["ratio"],
        "ratio_ci95": ratio["ratio_ci95"],
        **by_run,
    }
