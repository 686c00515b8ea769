"""What the measured figures advise, as plain conditions: nothing is said here that results.json does not hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eval.modes.families.engines import title
from eval.render.formatting import with_interval

PLAIN = "plain decoding, no draft"


def recommend(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Entries {"if", "use", "because", "also", "arm"}: `also` are arms that the intervals cannot tell from the one
    named, `arm` is None where no draft is advised. With families.engine, of what that engine serves alone."""
    engine = results.get("engine")
    if engine is not None:
        results = served_by(results, engine)
        if not results["arms"]:
            return [_advice(f"you serve with {title(engine)}", PLAIN, "it loads none of these drafts")]
    return [*_speeds(results), *_budgets(results), *_trees(results), *_without_features(results), *_codes(results)]


def served_by(results: Mapping[str, Any], engine: str) -> dict[str, Any]:
    """`results` of the arms that the engine loads, as chains: the commands of an export ask for no trees."""
    arms = {arm: one for arm, one in results["arms"].items() if one["refusals"][engine] is None}
    return {
        **results,
        "arms": arms,
        "shapes": {name: changes for name, changes in results["shapes"].items() if not _is_tree(changes)},
        "rows": [row for row in results["rows"] if row["draft"] in arms],
        **{part: [one for one in results[part] if one["arm"] in arms] for part in ("quality", "codes")},
    }


def serving(results: Mapping[str, Any]) -> list[str]:
    """A sentence for each recommended draft on the engines that load it; with families.engine, one for each draft
    that it does not load. Empty for results that were written before engines were asked."""
    if results.get("engine") is not None:
        return [_left_out(results, arm) for arm, one in results["arms"].items() if one["refusals"][results["engine"]]]
    advised = dict.fromkeys(one["arm"] for one in results["recommendation"] if one.get("arm") is not None)
    return [_engines_of(results, arm) for arm in advised]


def _left_out(results: Mapping[str, Any], arm: str) -> str:
    engine = results["engine"]
    return f"{arm} is left out, since {title(engine)} does not load it: {results['arms'][arm]['refusals'][engine]}."


def _engines_of(results: Mapping[str, Any], arm: str) -> str:
    refused = results["arms"][arm]["refusals"]
    loading = [title(engine) for engine, why in refused.items() if why is None]
    if loading:
        return f"{arm} is served by {', '.join(loading)}."
    engine, why = next(iter(refused.items()))
    return f"{arm} is served by no engine, only drafted with by draftsmith itself; {title(engine)}: {why}."


def sentence(advice: Mapping[str, Any]) -> str:
    """One entry in words."""
    also = f" Within its interval: {', '.join(advice['also'])}." if advice["also"] else ""
    return f"If {advice['if']}, use {advice['use']}: {advice['because']}.{also}"


def rivals(best: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], figure: str, name: str) -> list[str]:
    """Names of the other rows whose interval reaches the best row's."""
    low = _ends(best, figure)[0]
    return [row[name] for row in rows if row is not best and _ends(row, figure)[1] >= low]


def _ends(row: Mapping[str, Any], figure: str) -> tuple[float, float]:
    ends = row[f"{figure}_ci95"]
    return (row[figure], row[figure]) if ends is None else (ends[0], ends[1])


def _advice(condition: str, use: str, because: str, also: Sequence[str] = (), arm: str | None = None) -> dict[str, Any]:
    return {"if": condition, "use": use, "because": because, "also": list(also), "arm": arm}


def _speeds(results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A line per batch size and temperature; no draft where the best one's interval does not clear 1."""
    for cell in results["cells"]:
        place = (cell["batch_size"], cell["temperature"])
        rows = [row for row in results["rows"] if (row["batch_size"], row["temperature"]) == place]
        rows = [row for row in rows if row["speedup"] is not None]
        if not rows:
            continue
        best = max(rows, key=lambda row: row["speedup"])
        at = f"{cell['batch_size']} prompt{'s' if cell['batch_size'] > 1 else ''} at once, T={cell['temperature']:g}"
        told = f"{with_interval(best['speedup'], best['speedup_ci95'])} times the speed without a draft"
        if _ends(best, "speedup")[0] > 1:
            also = rivals(best, rows, "speedup", "draft")
            yield _advice(f"you decode {at}", f"{best['draft']} with {best['setting']}", told, also, best["draft"])
        else:
            yield _advice(f"you decode {at}", PLAIN, f"the best draft, {best['draft']}, reaches {told}")


def _first(results: Mapping[str, Any], budget: str, is_tree: bool = False) -> list[dict[str, Any]]:
    """tau of all arms at a budget and the first temperature; of chains, or of the first shape that is none."""
    shapes = [name for name in results["shapes"] if _is_tree(results["shapes"][name]) == is_tree][:1]
    code = next(iter(results["records"]))
    rows = [one for one in results["quality"] if (one["budget"], one["code"]) == (budget, code)]
    rows = [one for one in rows if one["shape"] in shapes]
    return [one for one in rows if one["temperature"] == rows[0]["temperature"]]


def _is_tree(changes: Mapping[str, Any]) -> bool:
    return changes.get("tree", "chain") != "chain"


def _best_tau(rows: Sequence[Mapping[str, Any]], condition: str) -> Iterator[dict[str, Any]]:
    if rows:
        best = max(rows, key=lambda row: row["tau"])
        told = f"tau {with_interval(best['tau'], best['tau_ci95'])} in {best['shape']}s at T={best['temperature']:g}"
        yield _advice(condition, str(best["arm"]), told, rivals(best, rows, "tau", "arm"), best["arm"])


def _budgets(results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    budgets = results["budgets"]
    scarce_text = f"text to train on is what you are short of ({budgets['tokens']:,} tokens)"
    yield from _best_tau(_first(results, "tokens"), scarce_text)
    yield from _best_tau(_first(results, "time"), f"training time is ({budgets['seconds']:g} s)")


def _trees(results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield from _best_tau(_first(results, "tokens", is_tree=True), "a wider target pass costs you nothing")


def _without_features(results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Only where some arms read hidden states and others do not."""
    reads = {arm for arm, one in results["arms"].items() if one["taps"]}
    rows = _first(results, "tokens")
    if reads and len(reads) < len(results["arms"]):
        yield from _best_tau(
            [row for row in rows if row["arm"] not in reads], "the target's hidden states are out of reach"
        )


def _codes(results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The smallest code whose tau cannot be told from the first one's."""
    if len({one["code"] for one in results["codes"]}) < 2:
        return
    at_first = [one for one in results["codes"] if one["temperature"] == results["codes"][0]["temperature"]]
    first, *others = at_first
    equal = [first, *(one for one in others if _ends(one, "tau_ratio")[1] >= 1)]
    best = min(equal, key=lambda one: one["feature_bytes_per_token"])
    told = ", ".join(
        f"{one['code']} keeps {with_interval(one['tau_ratio'], one['tau_ratio_ci95'], 3)} of tau at "
        f"{one['feature_bytes_per_token'] / first['feature_bytes_per_token']:.2f} of the bytes"
        for one in others
    )
    yield _advice(f"you record hidden states ({first['arm']})", f"code {best['code']}", told)
