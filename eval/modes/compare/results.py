"""From finished cells to results.json, of one run and of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from eval.modes.compare import peers, which_when
from eval.modes.compare.arm_set import ArmSet, Target
from eval.prompts.kinds import TextPrompts
from eval.results.compared import Comparison
from eval.results.comparisons import Others, Run, cell_with_ratios, cells_of_runs, pooled_comparison
from eval.results.document import DEFINITIONS, heading, target_entry
from eval.results.energy import energy_of

_SPEEDS = ("tau", "acceptance_by_position", "tau_by_context", "tokens_per_s", "baseline", "speedup")
_SPEEDS += ("whole_call_speedup", "ci95")
_PREDICTED = ("component_times", "predicted_speedup", "realised")
_BESIDE = ("ttft_s", "itl_s", "dtype_flips", "repeated_4gram_share", "peak_memory_bytes")
CELL = (
    "One batch size, temperature and kind of text: all arms answer each batch of prompts in one interleaved run, with "
    "the same prompt ids, the same limit and the same end tokens."
)


class Conclusions(NamedTuple):
    """What a mode makes of timed cells."""

    definitions: Mapping[str, str]
    others: Others
    conclude: Callable[[Comparison, Sequence[Sequence[Run]]], dict[str, Any]]
    """Of results without them, and each cell in every run."""


def _shared(*names: str) -> dict[str, str]:
    return {name: DEFINITIONS[name] for name in names}


CONCLUSIONS = {
    "decoders": Conclusions(
        {"cell": CELL, **peers.DEFINITIONS, **_shared(*_SPEEDS, *_PREDICTED, *_BESIDE)},
        peers.over_others,
        lambda found, cells: {"peers": peers.peers(found, cells)},
    ),
    "drafters": Conclusions(
        {"cell": CELL, **which_when.DEFINITIONS, **_shared(*_SPEEDS, *_BESIDE)},
        which_when.over_plain,
        lambda found, cells: which_when.conclude(cells, found.arms, found.seed),
    ),
}


def make_results(
    arm_set: ArmSet,
    targets: Sequence[Target],
    texts: Mapping[str, TextPrompts],
    cells: Sequence[dict[str, Any]],
    choices: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """The content of results.json; the target of that name is the first that writes."""
    cfg, told = arm_set.cfg, CONCLUSIONS[arm_set.cfg.mode]
    dtypes = {cell["text"]: cell["dtype"] for cell in cells}
    entries = [target_entry(one.description, dtypes[one.texts[0]]) for one in targets]
    each = [{"key": one.key, "texts": list(one.texts), **entry} for one, entry in zip(targets, entries, strict=True)]
    results = {
        **heading(cfg, sum(one["seconds"] for one in [*cells, *choices])),
        "target": entries[0],
        **({"targets": each} if arm_set.is_by_text else {}),
        **arm_set.in_words(),
        "prompts": {
            "source": f"held-out split of {cfg.data.name}",
            "screening_source": f"validation split of {cfg.data.name}",
            "max_new_tokens": cfg.decode.max_new_tokens,
            "screening_tokens": cfg.timing.screening_tokens,
            "screening_prompts": arm_set.sizes.screening_prompts,
            "rounds": cfg.timing.rounds,
            "batches": {str(rows): count for rows, count in arm_set.sizes.num_timed.items()},
            **arm_set.prompts_in_words(texts, cells),
        },
        "definitions": told.definitions,
        "rows": [row for cell in cells for row in cell["rows"]],
        "energy": energy_of(cells),
        "choices": list(choices),
        "cells": [cell_with_ratios(cell, told.others, cfg.seed) for cell in cells],
    }
    return {**results, **told.conclude(Comparison.model_validate(results), [[cell] for cell in cells])}


def pool_comparisons(runs: Sequence[Run]) -> dict[str, Any]:
    """The content of results.json for `runs` that `check_comparisons` let pass."""
    found = Comparison.model_validate(runs[0])
    told = CONCLUSIONS[found.mode]
    return {**pooled_comparison(runs, told.others), **told.conclude(found, cells_of_runs(runs))}
