"""The small form of results.json that stands in the repository: the figures of its page and what they are of.

The pairs that intervals are made of (`seconds_by_prompt`, ...) stay with the runs, which are pooled from them: of the
first pages they were two megabytes. A list of objects with the same keys is a table, which names them once, and apart
what is the same in all: `{"same": {"seed": 0}, "keys": ["draft", "tau"], "values": [["ngram", 1.9], ["mtp", 2.1]]}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_ABOUT_A_RUN = ("draft", "temperature", "num_draft_tokens", "category", "verifier", "tree", "batch_size", "dtype")
_ABOUT_A_RUN += ("setting", "speedup", "speedup_ci95", "baseline_tokens_per_s")
"""Of a row of one of several runs: what it is about, and what its page shows beside the row of all of them."""
_MADE_OF = {"alpha_by_document", "seconds_by_prompt", "call_seconds_by_prompt", "joules_by_prompt", "by_batch"}
_MADE_OF |= {"passes_by_prompt", "seconds_per_token", "call_seconds_per_token"}
_TABLE = ("same", "keys", "values")


def small_form(results: Mapping[str, Any]) -> str:
    """The text of docs/results/NAME.json, a line for each row; the page made from it is the one made from `results`."""
    runs = [_run(one) for one in results.get("runs", [])]
    content = _packed({**results, **({"runs": runs} if runs else {})})
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {_lines(value)}" for name, value in content.items()) + "\n}\n"


def _run(run: Mapping[str, Any]) -> dict[str, Any]:
    rows = [{name: row[name] for name in _ABOUT_A_RUN if name in row} for row in run.get("rows", [])]
    return {"environment": run["environment"], **({"rows": rows} if rows else {})}


def _packed(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.8g}")  # pages show up to four digits; of six, some would be rounded otherwise
    if isinstance(value, dict):
        return {name: None if name in _MADE_OF else _packed(one) for name, one in value.items()}
    if not isinstance(value, list | tuple):
        return value
    packed = [_packed(one) for one in value]
    keys = [tuple(one) for one in packed if isinstance(one, dict)]
    if len(packed) < 2 or len(keys) < len(packed) or len(set(keys)) > 1:
        return packed
    same = {name: packed[0][name] for name in keys[0] if all(one[name] == packed[0][name] for one in packed)}
    varied = [name for name in keys[0] if name not in same]
    return {"same": same, "keys": varied, "values": [[one[name] for name in varied] for one in packed]}


def unpacked(value: Any) -> Any:
    """What was read, its tables as lists of objects again; other results.json as they are."""
    if isinstance(value, list):
        return [unpacked(one) for one in value]
    if not isinstance(value, dict):
        return value
    if tuple(value) == _TABLE:
        same, keys, rows = value.values()
        return [unpacked(same) | dict(zip(keys, unpacked(row), strict=True)) for row in rows]
    return {name: unpacked(one) for name, one in value.items()}


def _lines(value: Any) -> str:
    if not isinstance(value, dict) or tuple(value) != _TABLE:
        return json.dumps(value)
    same, keys, values = value.values()
    rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in values)
    return f'{{"same": {json.dumps(same)}, "keys": {json.dumps(keys)}, "values": [\n{rows}\n]}}'
