"""What the suite is asked to reach, held against what results.json says, figure by figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from eval.arms.base import ASSISTED, AUTOREGRESSIVE, TRANSFORMERS
from eval.modes.decoders.arms import is_vllm, our_name
from eval.modes.decoders.cells import OURS
from eval.results.ratios import faster, ratio
from eval.results.statistics import Estimate

Cells = list[dict[str, Any]]


@dataclass(frozen=True)
class Goal:
    """A ratio of two arms at one batch size, wanted at each temperature."""

    name: str
    batch_size: int
    wanted: Mapping[float, float]
    """Temperature -> ratio."""
    ours: Callable[[dict[str, Any]], str]
    """From what was chosen to the arm of ours."""
    other: Callable[[Cells], str | None]
    """From the cells to the arm it is held against; None where it did not run."""


def _best(choice: dict[str, Any]) -> str:
    return our_name(choice["best"][OURS])


def _alone(_: dict[str, Any]) -> str:
    return AUTOREGRESSIVE


def _baseline(cells: Cells) -> str | None:
    return faster(cells, (AUTOREGRESSIVE, TRANSFORMERS))


def _vllm(cells: Cells) -> str | None:
    return faster(cells, [arm["arm"] for arm in cells[0]["arms"] if is_vllm(arm["arm"])])


GOALS = (
    Goal(
        "our autoregressive loop over transformers generate",
        1,
        {1.0: 1.1, 0.0: 1.1},
        _alone,
        lambda _: TRANSFORMERS,
    ),
    Goal(
        "best exact setting over transformers assisted generation",
        1,
        {1.0: 1.5, 0.0: 1.5},
        _best,
        lambda _: ASSISTED,
    ),
    Goal("best exact setting over the baseline", 1, {1.0: 2.0, 0.0: 2.5}, _best, _baseline),
    Goal("best exact setting over vLLM at its faster", 1, {1.0: 1.5, 0.0: 1.0}, _best, _vllm),
    Goal(
        "best exact setting over our autoregressive loop",
        8,
        {1.0: 1.3, 0.0: 1.3},
        _best,
        lambda _: AUTOREGRESSIVE,
    ),
)
REALISED = 0.9
"""Wanted of the plain chain that the component times predict."""


def reached(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One entry per figure and temperature, with the share of either text, in the order of GOALS; realised last."""
    found = [
        _ratio_entry(results, goal, temperature, wanted)
        for goal in GOALS
        for temperature, wanted in goal.wanted.items()
        if _cells(results, goal.batch_size, temperature)
    ]
    temperatures = dict.fromkeys(cell["temperature"] for cell in results["cells"] if cell["batch_size"] == 1)
    return found + [_realised_entry(results, temperature) for temperature in temperatures]


def _cells(results: Mapping[str, Any], batch_size: int, temperature: float) -> Cells:
    return [cell for cell in results["cells"] if (cell["batch_size"], cell["temperature"]) == (batch_size, temperature)]


def choice_at(results: Mapping[str, Any], batch_size: int, temperature: float) -> dict[str, Any]:
    """What was chosen at a batch size and temperature."""
    point = (batch_size, temperature)
    return next(one for one in results["choices"] if (one["batch_size"], one["temperature"]) == point)


def _ratio_entry(results: Mapping[str, Any], goal: Goal, temperature: float, wanted: float) -> dict[str, Any]:
    cells = _cells(results, goal.batch_size, temperature)
    ours, other = goal.ours(choice_at(results, goal.batch_size, temperature)), goal.other(cells)
    seed = results["environment"]["seed"]
    estimate = ratio(cells, ours, other, seed) if other is not None else None
    parts = {cell["text"]: ratio([cell], ours, other, seed) for cell in cells} if other is not None else {}
    return {
        "goal": goal.name,
        "batch_size": goal.batch_size,
        "temperature": temperature,
        "arm": ours,
        "against": other,
        **_outcome(wanted, estimate),
        "by_text": {text: None if part is None else part.value for text, part in parts.items()},
    }


def _realised_entry(results: Mapping[str, Any], temperature: float) -> dict[str, Any]:
    """The plain chain that was chosen; of the two texts the one that realises less, its speedup's interval scaled."""
    setting = choice_at(results, 1, temperature)["best_chain"]
    rows = [
        row
        for row in results["rows"]
        if (row["batch_size"], row["temperature"], row["setting"]) == (1, temperature, setting)
        and row["realised"] is not None
    ]
    estimate = None
    if rows:
        row = min(rows, key=lambda one: one["realised"])
        ends = row["speedup_ci95"]
        interval = None if ends is None else tuple(end / row["predicted_speedup"] for end in ends)
        estimate = Estimate(row["realised"], interval)  # type: ignore[arg-type]
    return {
        "goal": "realised share of the predicted speedup, best plain chain, the lower of the texts",
        "batch_size": 1,
        "temperature": temperature,
        "arm": None if setting is None else our_name(setting),
        "against": None,
        **_outcome(REALISED, estimate),
        "by_text": {row["text"]: row["realised"] for row in rows},
    }


def _outcome(wanted: float, estimate: Estimate | None) -> dict[str, Any]:
    value = None if estimate is None else estimate.value
    return {
        "wanted": wanted,
        "reached": value,
        "ci95": None if estimate is None else estimate.interval,
        "met": None if value is None else value >= wanted,
    }
