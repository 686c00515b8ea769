"""The comparison of draft families as a page and as Markdown: the advice, every table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.arms.base import PLAIN_ARMS
from eval.modes.compare.shared_tables import choice_table
from eval.modes.families.engines import title
from eval.modes.families.recommend import sentence, serving
from eval.render.formatting import (
    MISSING,
    Column,
    Table,
    column,
    columns,
    count,
    milliseconds,
    number,
    whole,
    with_interval,
)
from eval.render.page import Page
from eval.results.compared import ArmQuality, Choice, Families, TimedCell
from eval.results.schema import Row


def _draft_cost(row: Row) -> str:
    times = row.component_times
    return MISSING if times is None else milliseconds(times.t_draft_s * row.num_draft_tokens)


_SPEED = columns(
    *("batch", "T", column("arm", "draft"), "k", "speedup", "tokens/s", "tau", Column("draft cost", _draft_cost)),
    *("predicted", "realised", "flips when timed"),
)
_ARMS = [
    Column("arm", lambda one: one[0]),
    Column("family", lambda one: one[1].family),
    Column("parameters", lambda one: f"{one[1].num_parameters / 1e6:.2f}M"),
    Column("target layers read", lambda one: ", ".join(map(str, one[1].taps)) or MISSING),
    Column("optimizer, peak rates", lambda one: one[1].optimizer or MISSING),
    Column("python -m train", lambda one: one[1].folder or " ".join(one[1].overrides)),
]
_GIVEN = columns(
    *("arm", "shape", "T", Column("tau", lambda row: with_interval(row.tau, row.tau_ci95))),
    Column("acceptance by position", lambda row: _by_position(row)),
)
_EQUAL = column("equal", "budget")
_EXACTNESS = columns("arm", _EQUAL, "code", "shape", "T", "mismatches", "near-ties", "in tokens")
_TRAINING = columns(
    "arm", column("tokens", write="{:,.0f}".format), column("seconds", write="{:.1f}".format), "tokens/s"
)


def family_tables(found: Families) -> list[Table]:
    """Every table, in reading order."""
    checked = f"In {found.prompts['checked_dtype']}."
    trained = "Parameters are the trained ones: a head's embeddings and output head are the target's."
    seconds = found.budgets.seconds
    return [
        _budget_table(found, "tokens", f"Equal tokens ({found.budgets.tokens:,})"),
        _ratio_table(found),
        *([] if seconds is None else [_budget_table(found, "time", f"Equal time ({seconds:g} s)")]),
        _given_table(found),
        _speed_table(found),
        _code_table(found),
        Table("Arms", _ARMS, list(found.arms.items()), trained),
        Table("Losslessness", _EXACTNESS, found.quality, checked, is_detail=True),
        _length_table(found),
    ]


def _given_table(found: Families) -> Table:
    """Drafts that were trained elsewhere, at every temperature and shape."""
    rows = [one for one in found.quality if one.budget == "given"]
    note = "Not trained here: on which texts and how long is their authors' to say. Their folders stand under Arms."
    return Table("Given drafts", _GIVEN, rows, note)


def _budget_table(found: Families, budget: str, title: str) -> Table:
    """What training took, tau at every temperature and shape, and acceptance at the first of them."""
    rows = [one for one in found.quality if (one.budget, one.code) == (budget, found.code)]
    trained = [one for one in found.trainings if (one.budget, one.code) == (budget, found.code)]
    places = list(dict.fromkeys((one.shape, one.temperature) for one in rows))
    own = {(row.arm, row.shape, row.temperature): row for row in rows}

    def estimate(place: tuple[str, float], name: str, title: str) -> Column:
        def shown(one: Any) -> str:
            row = own[one.arm, *place]
            return with_interval(getattr(row, name), getattr(row, f"{name}_ci95"))

        return Column(f"{title}, {_said(place)}", shown)

    def acceptance(place: tuple[str, float]) -> Column:
        return Column(f"acceptance by position, {_said(place)}", lambda one: _by_position(own[one.arm, *place]))

    promised = [place for place in places if any(own[one.arm, *place].expected_tau is not None for one in trained)]
    taus = [estimate(place, "tau", "tau") for place in places]
    taus += [estimate(place, "expected_tau", "expected tau") for place in promised]
    note = f"Means over seeds {found.budgets.seeds}; brackets are 95% intervals over seeds and prompts."
    shown = [*_TRAINING, *taus, *map(acceptance, places[:1])]
    return Table(title, shown, trained, note)


def _ratio_table(found: Families) -> Table:
    """tau of every arm over the first one's at equal tokens."""
    rows = [one for one in found.quality if one.budget == "tokens" and one.tau_ratio is not None]
    first = next(iter(found.arms), "")

    def ratio(name: str, title: str) -> Column:
        def shown(one: ArmQuality) -> str:
            return with_interval(getattr(one, name), getattr(one, f"{name}_ci95"), 3)

        return Column(f"{title} over that of {first}", shown)

    shown = [*columns("arm", "shape", "T"), ratio("tau_ratio", "tau")]
    if any(one.expected_tau_ratio is not None for one in rows):
        shown.append(ratio("expected_tau_ratio", "expected tau"))
    note = "At equal tokens, paired by seed and prompt; an interval that holds 1 tells no difference."
    return Table(f"Beside {first}", shown, rows, note)


def _by_position(row: ArmQuality) -> str:
    return " ".join(map(number, row.acceptance_by_position))


def _said(place: tuple[str, float]) -> str:
    return f"{place[0]}, T={place[1]:g}"


def _speed_table(found: Families) -> Table:
    """Speedup, draft length and draft cost by batch size and temperature."""
    plain = "; ".join(map(_plain, found.timed))
    note = f"Speedup is over the faster way without a draft, in tokens/s of the whole batch: {plain}."
    return Table("Speed", _SPEED, found.rows, note)


def _plain(cell: TimedCell) -> str:
    speeds = {one.arm: one.tokens_per_s for one in cell.arms}
    told = ", ".join(f"{name} {number(speeds[name], 0)}" for name in PLAIN_ARMS)
    return f"batch {cell.batch_size}, T={cell.temperature:g}: {told}"


def _code_table(found: Families) -> Table:
    """What coarser hidden states cost in tau."""
    first = found.codes[0].code if found.codes else ""
    size = column("bytes a token", "feature_bytes_per_token", whole)
    kept = Column(f"tau over tau from {first}", lambda one: with_interval(one.tau_ratio, one.tau_ratio_ci95, 3))
    note = "At equal tokens, paired by seed and prompt; chains."
    return Table("Codes of hidden states", columns("arm", "code", size, "T", kept), found.codes, note)


def _length_table(found: Families) -> Table:
    """Draft lengths tried, on validation prompts."""

    def tried(speeds: Mapping[str, float | None]) -> str:
        return ", ".join(f"{k}: {number(speed, 0)}" for k, speed in speeds.items())

    note = "Tokens per second by k, on validation prompts; not comparable with the speeds above."
    shown = ["batch", "T", "arm", column("chosen k", "chosen"), "tried"]
    chosen = [Choice.model_validate(one) for one in found.choices]
    return choice_table(chosen, shown, note, "Draft lengths tried", tried)


def page_of(results: dict[str, Any]) -> Page:
    """The recommendation, every table, and how it was measured."""
    found = Families.model_validate(results)
    return Page(
        title=f"Draft families compared: {found.name}",
        results=results,
        method="families_method.j2",
        lead=losslessness_of_all(found.quality),
        headline_title="Which draft" if found.engine is None else f"Which draft for {title(found.engine)}",
        headline=[*map(sentence, found.recommendation), *serving(found)],
        every_table=family_tables(found),
    )


def losslessness_of_all(rows: Sequence[ArmQuality]) -> str:
    """All comparisons with plain decoding in one sentence."""
    wrong = sorted({row.arm for row in rows if row.mismatches})
    by = f" ({', '.join(wrong)})" if wrong else ""
    mismatches = count(sum(row.mismatches for row in rows), "mismatch", "es")
    near_ties = count(sum(row.near_ties for row in rows), "near-tie")
    return (
        f"Against plain decoding of the same noise, over all arms: {mismatches}{by} and {near_ties} in "
        f"{sum(row.tokens_checked for row in rows):,} tokens."
    )
