"""The tables of a comparison of draft families."""

from __future__ import annotations

from typing import Any

from eval.measure.speed import AUTOREGRESSIVE, TRANSFORMERS
from eval.render.columns import (
    BATCH,
    DRAFT_TOKENS,
    FLIPS,
    PREDICTED,
    REALISED,
    SPEEDUP,
    TAU,
    TEMPERATURE,
    TOKENS_PER_S,
    Column,
    Row,
    Table,
    column,
    estimate,
)
from eval.render.formatting import MISSING, milliseconds, number, thousands, whole

_ARM = column("arm")


def _draft_cost(row: Row) -> str:
    return milliseconds(row["component_times"]["t_draft_s"] * row["num_draft_tokens"])


_SPEED = (
    *(BATCH, TEMPERATURE, column("arm", "draft"), DRAFT_TOKENS, SPEEDUP, TOKENS_PER_S, TAU),
    Column("draft cost", _draft_cost),
    *(PREDICTED, REALISED, FLIPS),
)
_ARMS = (
    _ARM,
    column("family"),
    column("parameters", "num_parameters", lambda value: f"{value / 1e6:.2f}M"),
    column("target layers read", "taps", lambda taps: ", ".join(map(str, taps)) or MISSING),
    column("python -m train", "overrides", " ".join),
)
_EXACTNESS = (
    *(_ARM, column("equal", "budget"), column("code"), column("shape"), TEMPERATURE),
    column("mismatches", write=thousands),
    column("near-ties", "near_ties", thousands),
    column("in tokens", "tokens_checked", thousands),
)
_LENGTHS = (BATCH, TEMPERATURE, _ARM, column("chosen k", "chosen"), column("tried"))
_TRAINING = (
    _ARM,
    Column("tokens", lambda one: f"{one['tokens']:,.0f}"),
    Column("seconds", lambda one: number(one["seconds"], 1)),
    TOKENS_PER_S,
)


def family_tables(results: dict[str, Any]) -> list[Table]:
    """Every table, in reading order."""
    budgets = results["budgets"]
    trained = "Parameters are the trained ones: a head's embeddings and output head are the target's."
    return [
        _budget_table(results, "tokens", f"Equal tokens ({budgets['tokens']:,})"),
        _budget_table(results, "time", f"Equal time ({budgets['seconds']:g} s)"),
        _speed_table(results),
        _code_table(results),
        Table("Arms", _ARMS, [{**one, "arm": arm} for arm, one in results["arms"].items()], trained),
        Table("Losslessness", _EXACTNESS, results["quality"], f"In {results['prompts']['checked_dtype']}."),
        _length_table(results),
    ]


def _budget_table(results: dict[str, Any], budget: str, title: str) -> Table:
    """What training took, tau at every temperature and shape, and acceptance at the first of them."""
    of = {"budget": budget, "code": next(iter(results["records"]))}
    rows = [one for one in results["quality"] if of.items() <= one.items()]
    trained = [one for one in results["trainings"] if of.items() <= one.items()]
    places = list(dict.fromkeys((one["shape"], one["temperature"]) for one in rows))
    own = {(row["arm"], row["shape"], row["temperature"]): row for row in rows}

    def tau(place: tuple[str, float]) -> Column:
        return Column(f"tau, {_said(place)}", lambda one: TAU.value(own[one["arm"], *place]))

    def acceptance(place: tuple[str, float]) -> Column:
        return Column(
            f"acceptance by position, {_said(place)}",
            lambda one: " ".join(map(number, own[one["arm"], *place]["acceptance_by_position"])),
        )

    columns = [*_TRAINING, *map(tau, places), *map(acceptance, places[:1])]
    note = f"Means over seeds {results['budgets']['seeds']}; brackets are 95% intervals over seeds and prompts."
    return Table(title, columns, trained, note)


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
    columns = (
        *(_ARM, column("code"), column("bytes a token", "feature_bytes_per_token", whole), TEMPERATURE),
        estimate(f"tau over tau from {first}", "tau_ratio", digits=3),
    )
    note = "At equal tokens, paired by seed and prompt; chains."
    return Table("Codes of hidden states", columns, results["codes"], note)


def _length_table(results: dict[str, Any]) -> Table:
    """Draft lengths tried, on validation prompts."""
    rows = [
        {
            **one,
            "arm": arm,
            "chosen": one["best"][arm],
            "tried": ", ".join(f"{k}: {number(speed, 0)}" for k, speed in speeds.items()),
        }
        for one in results["choices"]
        for arm, speeds in one["tokens_per_s"].items()
    ]
    note = "Tokens per second by k, on validation prompts; not comparable with the speeds above."
    return Table("Draft lengths tried", _LENGTHS, rows, note)
