"""Settings that an earlier run of the comparison chose, so that several processes time the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from decode.common.errors import InputError
from eval.arms.base import ASSISTED, LOOKUP
from eval.arms.transformers_arms import assisted_settings
from eval.config import EvalConfig
from eval.measure.cells import Point
from eval.modes.decoders.arms import points
from eval.results.comparisons import check_same_comparison
from eval.results.schema import read_results

Choices = dict[Point, dict[str, Any]]


def given_choices(cfg: EvalConfig) -> Choices:
    """What decoders.choices holds, {} where it is null; InputError where that run tried other settings, or drafts with
    another draft or target, or lacks a batch size or temperature."""
    if cfg.decoders.choices is None:
        return {}
    file = Path(cfg.decoders.choices)
    results = read_results(file)
    wanted = {
        "mode": "decoders",
        "target.path": cfg.target.path,
        "drafts": dict([next(iter(cfg.drafts.items()))]),
        "settings": {name: dict(changes) for name, changes in cfg.decoders.arms.items()},
    }
    known = {**results, "target.path": results["target"].get("path")}
    check_same_comparison("decoders.choices", file, known, wanted)
    found = {Point(one["batch_size"], one["temperature"]): one for one in results["choices"]}
    missing = [point.name for point in points(cfg) if point not in found]
    if missing:
        raise InputError(
            f"decoders.choices={file} chose nothing for {', '.join(missing)}, which this run times. Leave these out of "
            "decoders.batch_sizes and temperatures, or decoders.choices=null to choose anew"
        )
    tried = {
        ASSISTED: [one.label for one in assisted_settings(cfg.peers)],
        LOOKUP: [f"n={tokens}" for tokens in cfg.peers.prompt_lookup_num_tokens],
    }
    for point in points(cfg):
        for peer, label in found[point]["best"].items():
            if peer in tried and label not in tried[peer]:
                raise InputError(
                    f"decoders.choices={file} has {peer} at {label} for {point.name}, and peers.* of this run tries "
                    f"{', '.join(tried[peer]) or 'nothing'}. Give the peers of that run, or choose anew"
                )
    return {point: {**found[point], "seconds": 0.0, "chosen_in": str(file)} for point in points(cfg)}
