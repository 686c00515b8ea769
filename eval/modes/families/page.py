"""The comparison of draft families as a page and as Markdown: the advice, every table."""

from __future__ import annotations

from typing import Any

from eval.arms.base import AUTOREGRESSIVE, TRANSFORMERS
from eval.modes.families.engines import title
from eval.modes.families.recommend import sentence, serving
from eval.render.formatting import (
    MISSING,
    SHARED,
    Column,
    Row,
    Table,
    column,
    columns,
    count,
    estimate,
    milliseconds,
    number,
    whole,
)
from eval.render.page import Page, as_html, as_markdown


def _draft_cost(row: Row) -> str:
    return milliseconds(row["component_times"]["t_draft_s"] * row["num_draft_tokens"])


_SPEED = columns(
    *("batch", "T", column("arm", "draft"), "k", "speedup", "tokens/s", "tau", Column("draft cost", _draft_cost)),
    *("predicted", "realised", "flips when timed"),
)
_ARMS = columns(
    *("arm", "family", column("parameters", "num_parameters", lambda value: f"{value / 1e6:.2f}M")),
    column("target layers read", "taps", lambda taps: ", ".join(map(str, taps)) or MISSING),
    Column("optimizer, peak rates", lambda arm: arm.get("optimizer", MISSING)),
    Column("python -m train", lambda arm: arm.get("folder") or " ".join(arm["overrides"])),
)
_GIVEN = columns(
    *("arm", "shape", "T", "tau"),
    column("acceptance by position", "acceptance_by_position", lambda shares: " ".join(map(number, shares))),
)
_EQUAL = column("equal", "budget")
_EXACTNESS = columns("arm", _EQUAL, "code", "shape", "T", "mismatches", "near-ties", "in tokens")
_TRAINING = columns(
    "arm", column("tokens", write="{:,.0f}".format), column("seconds", write="{:.1f}".format), "tokens/s"
)


def family_tables(results: dict[str, Any]) -> list[Table]:
    """Every table, in reading order."""
    budgets = results["budgets"]
    checked = f"In {results['prompts']['checked_dtype']}."
    trained = "Parameters are the trained ones: a head's embeddings and output head are the target's."
    return [
        _budget_table(results, "tokens", f"Equal tokens ({budgets['tokens']:,})"),
        _budget_table(results, "time", f"Equal time ({budgets['seconds']:g} s)"),
        _given_table(results),
        _speed_table(results),
        _code_table(results),
        Table("Arms", _ARMS, [{**one, "arm": arm} for arm, one in results["arms"].items()], trained),
        Table("Losslessness", _EXACTNESS, results["quality"], checked, is_detail=True),
        _length_table(results),
    ]


def _given_table(results: dict[str, Any]) -> Table:
    """Drafts that were trained elsewhere, at every temperature and shape."""
    rows = [one for one in results["quality"] if one["budget"] == "given"]
    note = "Not trained here: on which texts and how long is their authors' to say. Their folders stand under Arms."
    return Table("Given drafts", _GIVEN, rows, note)


def _budget_table(results: dict[str, Any], budget: str, title: str) -> Table:
    """What training took, tau at every temperature and shape, and acceptance at the first of them."""
    of = {"budget": budget, "code": next(iter(results["records"]))}
    rows = [one for one in results["quality"] if of.items() <= one.items()]
    trained = [one for one in results["trainings"] if of.items() <= one.items()]
    places = list(dict.fromkeys((one["shape"], one["temperature"]) for one in rows))
    own = {(row["arm"], row["shape"], row["temperature"]): row for row in rows}

    def tau(place: tuple[str, float]) -> Column:
        return Column(f"tau, {_said(place)}", lambda one: SHARED["tau"].value(own[one["arm"], *place]))

    def acceptance(place: tuple[str, float]) -> Column:
        return Column(
            f"acceptance by position, {_said(place)}",
            lambda one: " ".join(map(number, own[one["arm"], *place]["acceptance_by_position"])),
        )

    note = f"Means over seeds {results['budgets']['seeds']}; brackets are 95% intervals over seeds and prompts."
    return Table(title, [*_TRAINING, *map(tau, places), *map(acceptance, places[:1])], trained, note)


def _said(place: tuple[str, float]) -> str:
    return f"{place[0]}, T={place[1]:g}"


def _speed_table(results: dict[str, Any]) -> Table:
    """Speedup, draft length and draft cost by batch size and temperature."""
    plain = "; ".join(_plain(cell) for cell in results["cells"])
    note = f"Speedup is over the faster way without a draft, in tokens/s of the whole batch: {plain}."
    return Table("Speed", _SPEED, results["rows"], note)


def _plain(cell: dict[str, Any]) -> str:
    speeds = {one["arm"]: one["tokens_per_s"] for one in cell["arms"]}
    told = ", ".join(f"{name} {number(speeds[name], 0)}" for name in (AUTOREGRESSIVE, TRANSFORMERS))
    return f"batch {cell['batch_size']}, T={cell['temperature']:g}: {told}"


def _code_table(results: dict[str, Any]) -> Table:
    """What coarser hidden states cost in tau."""
    first = results["codes"][0]["code"] if results["codes"] else ""
    size, kept = column("bytes a token", "feature_bytes_per_token", whole), f"tau over tau from {first}"
    shown = columns("arm", "code", size, "T", estimate(kept, "tau_ratio", digits=3))
    return Table(
        "Codes of hidden states", shown, results["codes"], "At equal tokens, paired by seed and prompt; chains."
    )


def _length_table(results: dict[str, Any]) -> Table:
    """Draft lengths tried, on validation prompts."""
    rows = [
        {
            **one,
            "arm": arm,
            "chosen k": one["best"][arm],
            "tried": ", ".join(f"{k}: {number(speed, 0)}" for k, speed in speeds.items()),
        }
        for one in results["choices"]
        for arm, speeds in one["tokens_per_s"].items()
    ]
    note = "Tokens per second by k, on validation prompts; not comparable with the speeds above."
    return Table("Draft lengths tried", columns("batch", "T", "arm", "chosen k", "tried"), rows, note, is_detail=True)


def render_page(results: dict[str, Any]) -> str:
    """The recommendation, every table, how it was measured, and the definitions."""
    return as_html(_page(results))


def render_summary(results: dict[str, Any], is_published: bool = False) -> str:
    """The same as Markdown; published, without details."""
    return as_markdown(_page(results), is_published=is_published)


def _page(results: dict[str, Any]) -> Page:
    return Page(
        title=f"Draft families compared: {results['name']}",
        results=results,
        method="families_method.j2",
        lead=losslessness_of_all(results),
        headline_title=_headline_title(results),
        headline=[*map(sentence, results["recommendation"]), *serving(results)],
        every_table=family_tables(results),
    )


def _headline_title(results: dict[str, Any]) -> str:
    engine = results.get("engine")
    return "Which draft" if engine is None else f"Which draft for {title(engine)}"


def losslessness_of_all(results: dict[str, Any]) -> str:
    """All comparisons with plain decoding in one sentence."""
    rows = results["quality"]
    wrong = sorted({row["arm"] for row in rows if row["mismatches"]})
    totals = {name: sum(row[name] for row in rows) for name in ("mismatches", "near_ties", "tokens_checked")}
    by = f" ({', '.join(wrong)})" if wrong else ""
    return (
        f"Against plain decoding of the same noise, over all arms: {count(totals['mismatches'], 'mismatch', 'es')}{by} "
        f"and {count(totals['near_ties'], 'near-tie')} in {totals['tokens_checked']:,} tokens."
    )
