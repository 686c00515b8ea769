"""What the measured figures advise, as plain conditions: nothing is said here that results.json does not hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eval.modes.families.engines import title
from eval.render.formatting import with_interval
from eval.results.compared import Advice, ArmQuality, Families, Ratio

PLAIN = "plain decoding, no draft"


def recommend(found: Families) -> list[Advice]:
    """With families.engine, of what that engine serves alone."""
    engine = found.engine
    if engine is not None:
        found = served_by(found, engine)
        if not found.arms:
            return [_advice(f"you serve with {title(engine)}", PLAIN, "it loads none of these drafts")]
    return [*_speeds(found), *_budgets(found), *_trees(found), *_without_features(found), *_codes(found)]


def served_by(found: Families, engine: str) -> Families:
    """Of the arms that the engine loads, as chains: the commands of an export ask for no trees."""
    arms = {arm: one for arm, one in found.arms.items() if one.refusals[engine] is None}
    served = {
        "arms": arms,
        "shapes": {name: changes for name, changes in found.shapes.items() if not _is_tree(changes)},
        "rows": [row for row in found.rows if row.draft in arms],
        "quality": [one for one in found.quality if one.arm in arms],
        "codes": [one for one in found.codes if one.arm in arms],
    }
    return found.model_copy(update=served)


def serving(found: Families) -> list[str]:
    """A sentence for each recommended draft on the engines that load it; with families.engine, one for each draft
    that it does not load. Empty for results that were written before engines were asked."""
    if found.engine is not None:
        left_out = {arm: why for arm, one in found.arms.items() if (why := one.refusals[found.engine])}
        said = f"is left out, since {title(found.engine)} does not load it"
        return [f"{arm} {said}: {why}." for arm, why in left_out.items()]
    advised = dict.fromkeys(one.arm for one in found.recommendation if one.arm is not None)
    return [_engines_of(arm, found.arms[arm].refusals) for arm in advised]


def _engines_of(arm: str, refused: Mapping[str, str | None]) -> str:
    loading = [title(engine) for engine, why in refused.items() if why is None]
    if loading:
        return f"{arm} is served by {', '.join(loading)}."
    engine, why = next(iter(refused.items()))
    return f"{arm} is served by no engine, only drafted with by draftsmith itself; {title(engine)}: {why}."


def sentence(advice: Advice) -> str:
    """In words."""
    also = f" Within its interval: {', '.join(advice.also)}." if advice.also else ""
    return f"If {advice.condition}, use {advice.use}: {advice.because}.{also}"


def rivals(best: str, reached: Mapping[str, Ratio]) -> list[str]:
    """The others whose interval reaches the best one's."""
    low, _ = reached[best].ends
    return [name for name, one in reached.items() if name != best and one.ends[1] >= low]


def _advice(condition: str, use: str, because: str, also: Sequence[str] = (), arm: str | None = None) -> Advice:
    told = {"if": condition, "use": use, "because": because, "also": list(also), "arm": arm}
    return Advice.model_validate(told)


def _speeds(found: Families) -> Iterator[Advice]:
    """A line per batch size and temperature; no draft where the best one's interval does not clear 1."""
    for cell in found.timed:
        here = [row for row in found.rows if (row.batch_size, row.temperature) == cell.point]
        rows = {row.draft: row for row in here if row.speedup is not None}
        if not rows:
            continue
        reached = {draft: Ratio(value=row.speedup, ci95=row.speedup_ci95) for draft, row in rows.items()}
        best = max(reached, key=lambda draft: reached[draft].value or 0.0)
        at = f"you decode {cell.batch_size} prompt{'s' if cell.batch_size > 1 else ''} at once, T={cell.temperature:g}"
        told = f"{with_interval(reached[best].value, reached[best].ci95)} times the speed without a draft"
        if reached[best].ends[0] > 1:
            yield _advice(at, f"{best} with {rows[best].setting}", told, rivals(best, reached), best)
        else:
            yield _advice(at, PLAIN, f"the best draft, {best}, reaches {told}")


def _first(found: Families, budget: str, is_tree: bool = False) -> list[ArmQuality]:
    """tau of all arms at a budget and the first temperature; of chains, or of the first shape that is none."""
    shapes = [name for name, changes in found.shapes.items() if _is_tree(changes) == is_tree][:1]
    rows = [one for one in found.quality if (one.budget, one.code) == (budget, found.code) and one.shape in shapes]
    return [one for one in rows if one.temperature == rows[0].temperature]


def _is_tree(changes: Mapping[str, Any]) -> bool:
    return changes.get("tree", "chain") != "chain"


def _best_tau(rows: Sequence[ArmQuality], condition: str) -> Iterator[Advice]:
    if rows:
        best = max(rows, key=lambda row: row.tau)
        told = f"tau {with_interval(best.tau, best.tau_ci95)} in {best.shape}s at T={best.temperature:g}"
        reached = {row.arm: Ratio(value=row.tau, ci95=row.tau_ci95) for row in rows}
        yield _advice(condition, best.arm, told, rivals(best.arm, reached), best.arm)


def _budgets(found: Families) -> Iterator[Advice]:
    scarce_text = f"text to train on is what you are short of ({found.budgets.tokens:,} tokens)"
    yield from _best_tau(_first(found, "tokens"), scarce_text)
    if found.budgets.seconds is not None:
        yield from _best_tau(_first(found, "time"), f"training time is ({found.budgets.seconds:g} s)")


def _trees(found: Families) -> Iterator[Advice]:
    yield from _best_tau(_first(found, "tokens", is_tree=True), "a wider target pass costs you nothing")


def _without_features(found: Families) -> Iterator[Advice]:
    """Only where some arms read hidden states and others do not."""
    reads = {arm for arm, one in found.arms.items() if one.taps}
    if reads and len(reads) < len(found.arms):
        rows = [row for row in _first(found, "tokens") if row.arm not in reads]
        yield from _best_tau(rows, "the target's hidden states are out of reach")


def _codes(found: Families) -> Iterator[Advice]:
    """The smallest code whose tau cannot be told from the first one's."""
    if len({one.code for one in found.codes}) < 2:
        return
    first, *others = [one for one in found.codes if one.temperature == found.codes[0].temperature]
    equal = [first, *(one for one in others if Ratio(value=one.tau_ratio, ci95=one.tau_ratio_ci95).ends[1] >= 1)]
    best = min(equal, key=lambda one: one.feature_bytes_per_token)
    told = ", ".join(
        f"{one.code} keeps {with_interval(one.tau_ratio, one.tau_ratio_ci95, 3)} of tau at "
        f"{one.feature_bytes_per_token / first.feature_bytes_per_token:.2f} of the bytes"
        for one in others
    )
    yield _advice(f"you record hidden states ({first.arm})", f"code {best.code}", told)
