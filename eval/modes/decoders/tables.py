"""The suite's tables as plain text cells, for the page and for Markdown."""

from __future__ import annotations

from typing import Any

from eval.arms.base import AUTOREGRESSIVE
from eval.modes.decoders.arms import our_name
from eval.modes.decoders.cells import OURS
from eval.modes.decoders.goals import choice_at
from eval.render.formatting import MISSING, milliseconds, number, share, with_interval
from eval.render.tables import Table


def goal_table(results: dict[str, Any]) -> Table:
    """What was wanted, and what was reached."""
    texts = list(dict.fromkeys(cell["text"] for cell in results["cells"]))
    cells = [
        [
            one["goal"],
            f"{one['temperature']:g}",
            str(one["batch_size"]),
            number(one["wanted"]),
            with_interval(one["reached"], one["ci95"]),
            *(number(one["by_text"].get(text)) for text in texts),
            _yes(one["met"]),
        ]
        for one in results["goals"]
    ]
    columns = ("figure", "T", "batch", "wanted", "reached", *texts, "met")
    return Table("Wanted and reached", columns, cells, "Brackets are 95% intervals over batches of prompts.")


def _yes(met: bool | None) -> str:
    return "not measured" if met is None else "yes" if met else "no"


def reading(results: dict[str, Any]) -> list[str]:
    """The goals in words, a line each."""
    return [_sentence(one) for one in results["goals"]]


def _sentence(one: dict[str, Any]) -> str:
    where = f"{one['goal']}, batch {one['batch_size']}, T={one['temperature']:g}"
    wanted = f"wanted {number(one['wanted'])}"
    if one["reached"] is None:
        return f"{where}: {wanted}, not measured in this run."
    arms = " against ".join(arm for arm in (one["arm"], one["against"]) if arm)
    parts = ", ".join(f"{text} {number(value)}" for text, value in one["by_text"].items())
    verdict = "met" if one["met"] else "not met"
    return f"{where}: {wanted}, reached {with_interval(one['reached'], one['ci95'])} ({arms}; {parts}): {verdict}."


def speed_tables(results: dict[str, Any]) -> list[Table]:
    """One table per batch size: every arm's speed by temperature and text, and over transformers generate."""
    return [_speeds(results, rows) for rows in dict.fromkeys(cell["batch_size"] for cell in results["cells"])]


def _speeds(results: dict[str, Any], rows: int) -> Table:
    cells = [cell for cell in results["cells"] if cell["batch_size"] == rows]
    arms = sorted(dict.fromkeys(one["arm"] for cell in cells for one in cell["arms"]), key=_place)
    best = [our_name(choice_at(results, rows, cell["temperature"])["best"][OURS]) for cell in cells]
    body = [[arm, *(_speed(cell, arm, arm == own) for cell, own in zip(cells, best, strict=True))] for arm in arms]
    columns = ("arm", *(f"T={cell['temperature']:g}, {cell['text']}" for cell in cells))
    reasons = dict.fromkeys(f"{arm} ({reason})" for cell in cells for arm, reason in cell["left_out"].items())
    note = (
        "Tokens per second of the whole batch, and times as fast as transformers generate; * marks the chosen setting."
    )
    return Table(f"Batch {rows}", columns, body, f"{note} Left out: {'; '.join(reasons)}." if reasons else note)


def _place(arm: str) -> int:
    """Ours first: the loop, then its settings; then transformers, then vLLM."""
    return next(i for i, start in enumerate((AUTOREGRESSIVE, OURS, "transformers", "")) if arm.startswith(start))


def _speed(cell: dict[str, Any], arm: str, is_best: bool) -> str:
    found = next((one for one in cell["arms"] if one["arm"] == arm), None)
    if found is None:
        return MISSING
    over = with_interval(found["over_transformers"], found["over_transformers_ci95"])
    return f"{number(found['tokens_per_s'], 0)}{'*' if is_best else ''}; {over}"


def arm_table(results: dict[str, Any]) -> Table:
    """Every arm of every cell, over the three that are asked about."""
    others = ("over_transformers", "over_autoregressive", "over_assisted")
    cells = [
        [
            str(cell["batch_size"]),
            f"{cell['temperature']:g}",
            cell["text"],
            one["arm"],
            number(one["tokens_per_s"], 1),
            *(with_interval(one[other], one[f"{other}_ci95"]) for other in others),
        ]
        for cell in results["cells"]
        for one in sorted(cell["arms"], key=lambda one: _place(one["arm"]))
    ]
    columns = ("batch", "T", "text", "arm", "tokens/s", "over transformers generate", "over our loop", "over assisted")
    return Table("All arms", columns, cells)


def setting_table(results: dict[str, Any]) -> Table:
    """Our settings: what a round brings, and how much of the promise was kept."""
    cells = [
        [
            str(row["batch_size"]),
            f"{row['temperature']:g}",
            row["text"],
            row["setting"],
            row["verifier"],
            row["tree"],
            str(row["num_draft_tokens"]),
            with_interval(row["tau"], row["tau_ci95"]),
            number(row["tokens_per_s"], 0),
            with_interval(row["speedup"], row["speedup_ci95"]),
            number(row["predicted_speedup"]),
            number(row["realised"]),
            _flips(row),
            share(row["repeated_4gram_share"]),
        ]
        for row in results["rows"]
    ]
    columns = ("batch", "T", "text", "setting", "verifier", "tree", "k", "tau", "tokens/s", "speedup", "predicted")
    columns = (*columns, "realised", "flips when timed", "repeated 4-grams")
    note = "Speedup is over the faster way without a draft. Plain chains alone are predicted from component times."
    return Table("Our settings", columns, cells, note)


def _flips(row: dict[str, Any]) -> str:
    if row["dtype_flips"] is None:
        return MISSING
    return f"{row['dtype_flips']} in {row['dtype_tokens_compared']:,} ({row['dtype']})"


def component_table(results: dict[str, Any]) -> Table:
    """What the predictions are made of."""
    cells = [
        [
            str(row["batch_size"]),
            f"{row['temperature']:g}",
            row["text"],
            str(row["num_draft_tokens"]),
            milliseconds(row["component_times"]["t_target_1_s"]),
            milliseconds(row["component_times"]["t_target_k1_s"]),
            milliseconds(row["component_times"]["t_draft_s"]),
        ]
        for row in results["rows"]
        if row["component_times"] is not None
    ]
    return Table("Component times", ("batch", "T", "text", "k", "t_target(1)", "t_target(k+1)", "t_draft"), cells)


def choice_table(results: dict[str, Any]) -> Table:
    """Every setting tried, on validation prompts; the best of each family first."""
    cells = []
    for one in results["choices"]:
        for family, speeds in one["tokens_per_s"].items():
            ranked = sorted(speeds, key=lambda name: -(speeds[name] or 0.0))
            tried = ", ".join(f"{name} {number(speeds[name], 0)}" for name in ranked)
            cells.append([str(one["batch_size"]), f"{one['temperature']:g}", family, one["best"][family], tried])
    note = "Tokens per second on validation prompts of both texts; not comparable with the tables above."
    return Table("Settings tried", ("batch", "T", "family", "chosen", "tried"), cells, note)


def settings_table(results: dict[str, Any]) -> Table:
    """What the names of our settings stand for."""
    cells = [
        [name, ", ".join(f"{key}={value}" for key, value in changes.items()) or "as configured"]
        for name, changes in results["settings"].items()
    ]
    return Table("What our settings are", ("setting", "decode."), cells)


def tables(results: dict[str, Any]) -> list[Table]:
    """Every table, in reading order."""
    return [
        goal_table(results),
        *speed_tables(results),
        setting_table(results),
        component_table(results),
        choice_table(results),
        arm_table(results),
        settings_table(results),
    ]


def best_settings(results: dict[str, Any]) -> str:
    """Which setting of ours won where."""
    return "; ".join(
        f"batch {one['batch_size']}, T={one['temperature']:g}: {one['best'][OURS]}" for one in results["choices"]
    )
