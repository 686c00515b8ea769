"""Settings that an earlier run of the comparison chose, so that several processes time the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from decode.common.errors import InputError
from eval.modes.compare.arm_set import ArmSet, Choices, Target
from eval.results.comparisons import about, check_same_comparison
from eval.results.schema import read_results


def given_choices(arm_set: ArmSet, targets: Sequence[Target]) -> Choices:
    """What MODE.choices holds, {} where it is null; InputError where that run tried other settings, or is of other
    targets or drafts, or lacks a cell, an arm or a setting of this one."""
    if arm_set.sizes.choices is None:
        return {}
    mode, file = arm_set.cfg.mode, Path(arm_set.sizes.choices)
    anew = f"or choose anew with {mode}.choices=null"
    results = read_results(file)
    paths = {text: target.description.path for target in targets for text in target.texts}
    there = dict.fromkeys(paths, results["target"].get("path"))  # which writes all texts where no others are named
    if "targets" in results:
        there = {text: one["path"] for one in results["targets"] for text in one["texts"]}
    known = {**results, "targets": {text: there.get(text) for text in paths}}
    check_same_comparison(f"{mode}.choices", file, known, {"mode": mode, "targets": paths, **arm_set.in_words()})
    found = {about(one): one for one in results["choices"]}
    missing = [place.name for place in arm_set.places(targets) if about(place.as_dict()) not in found]
    if missing:
        raise InputError(
            f"{mode}.choices={file} chose nothing for {', '.join(missing)}, which this run times. Leave these out of "
            f"{mode}.batch_sizes, {mode}.texts and temperatures, {anew}"
        )
    for target in targets:
        for place in arm_set.places([target]):
            best = found[about(place.as_dict())]["best"]
            for arm, settings in arm_set.tried(target, place, best).items():
                if best.get(arm) not in settings:
                    raise InputError(
                        f"{mode}.choices={file} has {arm} at {best.get(arm)} for {place.name}, and this run tries "
                        f"{', '.join(settings) or 'nothing'}. Give the arms and peers of that run, {anew}"
                    )
    own = {"seconds": 0.0, "chosen_in": str(file)}
    return {place: {**found[about(place.as_dict())], **own} for place in arm_set.places(targets)}
