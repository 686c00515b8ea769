"""The two files by which SGLang cuts the blocks of a DSpark draft (sglang 0.5.23, srt/speculative/dspark_components/),
from what was measured here.

Costs (dspark_sps.py), for --speculative-dspark-sps-table-path:

    {"sample_batch_tokens": [2, 8, 40], "sample_steps_per_sec": [91.0, 88.5, 60.2], "max_batch_tokens": 40}

A step verifies that many tokens over all requests, the one before each block included. SGLang takes the steps/s of the
largest entry that is not above its own number; it reads them where SGLANG_RAGGED_VERIFY_MODE is cap-accept or compact.

Temperatures (dspark_sts.py), for --speculative-dspark-confidence-sts-path:

    {"temperatures": [1.1, 0.9], "dataset": "texts", "num_samples": 512, "ece_before": [0.08], "ece_after": [0.02]}

There is one for each token of a block, else SGLang refuses the file. Our calibration errors are means over the tokens
of a block, one number each; SGLang uses neither them nor the name and size of the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from decode.autotune.estimates import monotone
from decode.drafters.dspark import DSparkConfig
from train.export.layouts.dspark import common_temperature

COSTS = "sglang_dspark_costs.json"
TEMPERATURES = "sglang_dspark_temperatures.json"


def cost_table(probes: Iterable[tuple[int, float]]) -> dict[str, Any]:
    """Of (tokens of a step, its seconds). More tokens are taken to need no less time: what says otherwise is noise, and
    is pooled."""
    seconds: dict[int, list[float]] = {}
    for tokens, seconds_of_step in probes:
        seconds.setdefault(tokens, []).append(seconds_of_step)
    sizes = sorted(seconds)
    smooth = monotone([median(seconds[size]) for size in sizes], [float(len(seconds[size])) for size in sizes])
    return {
        "sample_batch_tokens": sizes,
        "sample_steps_per_sec": [1 / one for one in smooth],
        "max_batch_tokens": sizes[-1],
    }


def engine_probes(rows: Iterable[Mapping[str, Any]], draft: str) -> list[tuple[int, float]]:
    """From the speeds of results.json. A step writes `tokens_per_draft` tokens for each request, one where nothing is
    drafted. vLLM drafts whole blocks of DSpark whatever it verifies of them, as SGLang does."""
    found = []
    for row in rows:
        if row["draft"] == draft:
            tokens = row["batch_size"] * (row["num_draft_tokens"] + 1)
            written = row["batch_size"] * (row["tokens_per_draft"] or 1.0)
            found.append((tokens, written / median(row["tokens_per_s"])))
    return found


def temperature_file(config: DSparkConfig, written: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of a draft whose draftsmith.json is `written`; None where no temperatures were fitted. They go with its folder as
    `python -m train.export` writes it, whose weights are divided by the geometric mean of the temperatures already."""
    if not config.temperatures:
        return None
    common, measured, data = common_temperature(config), written.get("measured") or {}, written.get("data") or {}
    errors = {"ece_before": measured.get("confidence_ece_raw"), "ece_after": measured.get("confidence_ece")}
    return {
        "temperatures": [one / common for one in config.temperatures],
        "dataset": str(data.get("path") or data.get("name") or ""),
        "num_samples": int(measured.get("confidence_rounds") or 0),
        **{name: [float(value)] for name, value in errors.items() if value is not None},
    }
