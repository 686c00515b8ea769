"""The page says what the numbers say."""

from __future__ import annotations

from typing import Any

import pytest

from eval.arms.base import LOOKUP
from eval.modes.compare.page import page_of
from eval.modes.compare.results import pool_comparisons
from eval.modes.compare.which_when import mixtures, over_plain, which_when
from eval.results.comparisons import cell_with_ratios
from tests.eval.compare.tiny_comparison import PLAIN, Paces, arm, cell, ours

ARMS = {
    "ngram": arm("ngram"),
    "edit": arm("edit"),
    "both": arm("mixture", ["ngram", "edit"]),
    "mine": arm("runs/mine", has_weights=True),
}
ENVIRONMENT = {"cpu": "one", "cores": 2, "threads": 2, "packages": {}, "python": "3", "git": None, "command": "eval"}


def results() -> dict[str, Any]:
    """Edits are drafted best by the mixture, code by the trained draft, logs by nothing."""
    plain: Paces = dict.fromkeys(PLAIN, [0.4, 0.4, 0.4])
    cells = [
        cell(plain | ours(ngram=[0.2] * 3, edit=[0.12] * 3, both=[0.1] * 3) | {LOOKUP: [0.3] * 3}),
        cell(plain | ours(ngram=[0.35] * 3, mine=[0.2] * 3), "code"),
        cell(plain | ours(ngram=[0.5] * 3, mine=[0.8] * 3), "log"),
    ]
    cells[1]["left_out"] = {"edit": "it would not run", "both": "it would not run"}
    cells[0]["settings"] = {"ngram": "k=4", "edit": "k=12", "both": "k=8", LOOKUP: "n=10"}
    runs = [[one] for one in cells]
    chosen: dict[str, Any] = {"best": {}, "tokens_per_s": {}, "prompts": 3, "seconds": 1.0}
    target = {"path": "runs/target", "fingerprint": "f", "num_parameters": 10, "dtype": "float32"}
    return {
        "schema": 2,
        "mode": "drafters",
        "name": "drafters",
        "environment": ENVIRONMENT | {"seed": 0, "report_seconds": 3.0},
        "target": target,
        "targets": [{"key": "target", "texts": ["edit", "code", "log"], **target}],
        "drafts": {"mine": "runs/mine"},
        "prompts": {
            "source": "held-out split of x",
            "screening_source": "validation split of x",
            "file": None,
            "mean_tokens": {"edit": 70.0, "code": 48.0, "log": 90.0},
            "max_new_tokens": 64,
            "screening_tokens": 40,
            "screening_prompts": 3,
            "rounds": 1,
            "batches": {"1": 3},
        },
        "arms": {name: one.model_dump() for name, one in ARMS.items()},
        "definitions": {},
        "rows": [],
        "choices": [{**{key: one[key] for key in ("text", "batch_size", "temperature")}, **chosen} for one in cells],
        "cells": [cell_with_ratios(one, over_plain, 0) for one in cells],
        "which_when": which_when(runs, ARMS, 0),
        "mixtures": mixtures(runs, ARMS, 0),
    }


def test_the_answer_comes_first_and_is_that_of_the_numbers() -> None:
    summary = page_of(results()).markdown()
    lines = summary.splitlines()
    assert "- edit: both (batch 1, T=0: 4.00 times plain)" in lines
    assert "- code: mine, without training ngram (batch 1, T=0: 2.00 times plain)" in lines
    assert "- log: no draft (batch 1, T=0: 1.00 times plain)" in lines
    (mixture,) = [line for line in lines if line.startswith("| edit | 1 | 0 | both | edit |")]
    assert "1.20 [1.20, 1.20]" in mixture


def test_every_arm_stands_with_its_setting_over_plain_the_fastest_first() -> None:
    summary = page_of(results()).markdown()
    part = summary[summary.index("## Text: edit") : summary.index("## Text: code")]
    arms = [line.split(" | ")[2] for line in part.splitlines() if line.startswith("| 1 |")]
    assert arms[:4] == ["both", "edit", "ngram", LOOKUP]
    assert "| transformers prompt lookup | n=10 | 3 | 1.33 [1.33, 1.33] |" in part
    assert "| edit | k=12 | 8 | 3.33 [3.33, 3.33] |" in part
    assert "Left out: edit, both (it would not run)." in summary


def test_the_html_page_says_the_same_and_draws_it() -> None:
    page = page_of(results()).html()
    assert page.count("<svg") == 1
    assert "both (batch 1, T=0: 4.00 times plain)" in page


def test_pooled_runs_say_what_each_found() -> None:
    """Of three runs two found the mixture 4 times as fast as plain decoding, and one twice."""
    runs = [results() for _ in range(3)]
    for one in runs[1]["cells"][0]["arms"]:
        if one["arm"] == "ours, both":
            one["seconds_per_token"] = [0.2] * 3
            one["over_plain"] = 2.0
    pooled = pool_comparisons(runs)
    (both,) = [one for one in pooled["cells"][0]["arms"] if one["arm"] == "ours, both"]
    assert both["over_plain_by_run"] == pytest.approx([4.0, 2.0, 4.0])
    assert (both["over_plain"], both["over_plain_ci95"][0]) == pytest.approx((4.0, 2.0))
    assert "2.00 to 4.00" in page_of(pooled).markdown()
    assert pooled["which_when"][0]["best"]["over_plain_ci95"][0] == pytest.approx(2.0)
