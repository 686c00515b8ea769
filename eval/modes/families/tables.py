"""The suite's tables as plain text cells."""

from __future__ import annotations

from typing import Any

from eval.arms.base import AUTOREGRESSIVE, TRANSFORMERS
from eval.render.formatting import MISSING, milliseconds, number, with_interval
from eval.render.tables import Table


def arms_table(results: dict[str, Any]) -> Table:
    """What every arm is."""
    cells = [
        [
            arm,
            one["family"],
            f"{one['num_parameters'] / 1e6:.2f}M",
            ", ".join(map(str, one["taps"])) or MISSING,
            " ".join(one["overrides"]),
        ]
        for arm, one in results["arms"].items()
    ]
    note = "Parameters are the trained ones: a head's embeddings and output head are the target's."
    return Table("Arms", ("arm", "family", "parameters", "target layers read", "python -m train"), cells, note)


def budget_tables(results: dict[str, Any]) -> list[Table]:
    """tau and acceptance of all arms, once at equal tokens and once at equal time."""
    budgets, code = results["budgets"], next(iter(results["records"]))
    titles = {
        "tokens": f"Equal tokens ({budgets['tokens']:,})",
        "time": f"Equal time ({budgets['seconds']:g} s)",
    }
    return [_budget_table(results, budget, code, title) for budget, title in titles.items()]


def _budget_table(results: dict[str, Any], budget: str, code: str, title: str) -> Table:
    rows = [one for one in results["quality"] if (one["budget"], one["code"]) == (budget, code)]
    places = list(dict.fromkeys((one["temperature"], one["shape"]) for one in rows))
    trained = [one for one in results["trainings"] if (one["budget"], one["code"]) == (budget, code)]
    body = []
    for one in trained:
        own = {(row["temperature"], row["shape"]): row for row in rows if row["arm"] == one["arm"]}
        taus = [with_interval(own[place]["tau"], own[place]["tau_ci95"]) for place in places]
        by_position = own[places[0]]["acceptance_by_position"]
        shown = " ".join(number(value) for value in by_position)
        training = [f"{one['tokens']:,.0f}", number(one["seconds"], 1), number(one["tokens_per_s"], 0)]
        body.append([one["arm"], *training, *taus, shown])
    taus = [f"tau, {shape}, T={temperature:g}" for temperature, shape in places]
    first = f"acceptance by position, {places[0][1]}, T={places[0][0]:g}" if places else ""
    columns = ("arm", "tokens", "seconds", "tokens/s", *taus, first)
    note = f"Means over seeds {results['budgets']['seeds']}; brackets are 95% intervals over seeds and prompts."
    return Table(title, columns, body, note)


def speed_table(results: dict[str, Any]) -> Table:
    """Speedup, draft length and draft cost by batch size and temperature."""
    cells = [
        [
            str(row["batch_size"]),
            f"{row['temperature']:g}",
            row["draft"],
            str(row["num_draft_tokens"]),
            with_interval(row["speedup"], row["speedup_ci95"]),
            number(row["tokens_per_s"], 0),
            with_interval(row["tau"], row["tau_ci95"]),
            milliseconds(row["component_times"]["t_draft_s"] * row["num_draft_tokens"]),
            number(row["predicted_speedup"]),
            number(row["realised"]),
            MISSING if row["dtype_flips"] is None else f"{row['dtype_flips']} in {row['dtype_tokens_compared']:,}",
        ]
        for row in results["rows"]
    ]
    plain = "; ".join(_plain(cell) for cell in results["cells"])
    note = f"Speedup is over the faster way without a draft, in tokens/s of the whole batch: {plain}."
    columns = ("batch", "T", "arm", "k", "speedup", "tokens/s", "tau", "draft cost", "predicted", "realised", "flips")
    return Table("Speed", columns, cells, note)


def _plain(cell: dict[str, Any]) -> str:
    speeds = {one["arm"]: one["tokens_per_s"] for one in cell["arms"]}
    told = ", ".join(f"{name} {number(speeds[name], 0)}" for name in (AUTOREGRESSIVE, TRANSFORMERS))
    return f"batch {cell['batch_size']}, T={cell['temperature']:g}: {told}"


def code_table(results: dict[str, Any]) -> Table | None:
    """What coarser hidden states cost in tau."""
    if not results["codes"]:
        return None
    cells = [
        [
            one["arm"],
            one["code"],
            number(one["feature_bytes_per_token"], 0),
            f"{one['temperature']:g}",
            with_interval(one["tau_ratio"], one["tau_ratio_ci95"], 3),
        ]
        for one in results["codes"]
    ]
    first = results["codes"][0]["code"]
    columns = ("arm", "code", "bytes a token", "T", f"tau over tau from {first}")
    return Table("Codes of hidden states", columns, cells, "At equal tokens, paired by seed and prompt; chains.")


def exactness_table(results: dict[str, Any]) -> Table:
    """Mismatches against plain decoding, all seeds together."""
    cells = [
        [
            row["arm"],
            row["budget"],
            row["code"],
            row["shape"],
            f"{row['temperature']:g}",
            str(row["mismatches"]),
            str(row["near_ties"]),
            f"{row['tokens_checked']:,}",
        ]
        for row in results["quality"]
    ]
    columns = ("arm", "equal", "code", "shape", "T", "mismatches", "near-ties", "in tokens")
    return Table("Losslessness", columns, cells, f"In {results['prompts']['checked_dtype']}.")


def choice_table(results: dict[str, Any]) -> Table:
    """Draft lengths tried, on validation prompts."""
    cells = [
        [
            str(one["batch_size"]),
            f"{one['temperature']:g}",
            arm,
            one["best"][arm],
            ", ".join(f"{k}: {number(speed, 0)}" for k, speed in speeds.items()),
        ]
        for one in results["choices"]
        for arm, speeds in one["tokens_per_s"].items()
    ]
    note = "Tokens per second by k, on validation prompts; not comparable with the speeds above."
    return Table("Draft lengths tried", ("batch", "T", "arm", "chosen k", "tried"), cells, note)


def tables(results: dict[str, Any]) -> list[Table]:
    """Every table, in reading order."""
    every = [
        *budget_tables(results),
        speed_table(results),
        code_table(results),
        arms_table(results),
        exactness_table(results),
        choice_table(results),
    ]
    return [table for table in every if table is not None]
