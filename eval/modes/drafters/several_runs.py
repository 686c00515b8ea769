"""Runs of one comparison of ways to draft at different times, made one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.modes.drafters.results import compared_arms
from eval.modes.drafters.which_when import mixtures, which_when
from eval.results.comparisons import cells_of_runs, check_runs, pooled_comparison

Run = Mapping[str, Any]


def check_drafters(files: Sequence[Path], runs: Sequence[Run]) -> None:
    """Raise InputError naming two of `files` and both values where `runs` do not time the same arms on the same
    prompts."""
    check_runs(files, runs, ("targets", "arms"), "drafters.choices")


def pool_drafters(runs: Sequence[Run]) -> dict[str, Any]:
    """The content of results.json for `runs` that `check_drafters` let pass."""
    arms, seed, cells = runs[0]["arms"], runs[0]["environment"]["seed"], cells_of_runs(runs)
    return {
        **pooled_comparison(runs, compared_arms),
        "which_when": which_when(cells, arms, seed),
        "mixtures": mixtures(cells, arms, seed),
    }
