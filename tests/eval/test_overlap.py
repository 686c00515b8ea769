"""`mode=overlap`: simulated rounds against sums done by hand, the pairs of a report, and the page."""

from __future__ import annotations

import json
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decode.common.compose import CONF
from decode.common.errors import ConfigError, InputError
from eval.config import EvalConfig
from eval.modes.overlap import mode
from eval.modes.overlap.config import OverlapConfig
from eval.modes.overlap.page import render_page, render_summary
from eval.modes.overlap.pairs import Pair, pairs
from eval.modes.overlap.simulation import WAYS, ahead, in_turn
from eval.publish import publish
from eval.results.schema import read_results

TOY = CONF.parent / "docs/results/toy.json"
PAIR = Pair("p", target_ms=10.0, token_ms=0.5, draft_ms=2.0, acceptance=(0.9, 0.7, 0.8))
N = 40_000


def expected_tau(pair: Pair, k: int) -> float:
    return 1 + sum(accumulate(pair.chances(k), mul))


def foreseen(pair: Pair, k: int) -> float:
    return float(np.prod(pair.chances(k + 1))) ** pair.batch_size


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("link_ms", [0.0, 3.0])
@pytest.mark.parametrize("draft_ms", [0.5, 2.0, 12.0])
def test_without_jitter_rounds_take_what_the_sums_say(k: int, link_ms: float, draft_ms: float) -> None:
    pair = Pair("p", 10.0, 0.5, draft_ms, (0.9, 0.7, 0.8))
    verify, chance = 10 + 0.5 * k, foreseen(pair, k)
    turns, early = (way(pair, k, link_ms, 0.0, N, 1) for way in (in_turn, ahead))
    assert turns.milliseconds == pytest.approx(verify + k * draft_ms + 2 * link_ms)
    as_assumed = max(verify, 2 * link_ms + (k + 1) * draft_ms)
    anew = max(verify + link_ms, link_ms + (k + 1) * draft_ms) + k * draft_ms + link_ms
    assert np.unique(early.milliseconds.round(6)) == pytest.approx(sorted({as_assumed, anew}))
    wanted = chance * as_assumed + (1 - chance) * anew
    error = abs(as_assumed - anew) * (chance * (1 - chance) / N) ** 0.5
    assert early.milliseconds.mean() == pytest.approx(wanted, abs=5 * error + 1e-9)
    for rounds in (turns, early):
        assert rounds.tokens.mean() == pytest.approx(expected_tau(pair, k), abs=5 * rounds.tokens.std() / N**0.5)


def test_a_perfect_draft_costs_nothing_beside_the_target() -> None:
    pair = Pair("p", 10.0, 0.0, 1.0, (1.0,))
    rounds = ahead(pair, 4, 0.0, 0.0, 100, 0)
    assert rounds.foreseen.all()
    assert (rounds.tokens == 5).all()
    assert rounds.milliseconds == pytest.approx(10.0)


def test_a_useless_draft_ahead_costs_what_is_in_the_way_of_the_next() -> None:
    slow = Pair("p", 10.0, 0.0, 4.0, (0.0,))
    turns, early = (way(slow, 4, 1.0, 0.0, 100, 0) for way in (in_turn, ahead))
    assert not early.foreseen.any()
    assert early.milliseconds - turns.milliseconds == pytest.approx((4 + 1) * 4.0 - 10.0)


def test_in_a_batch_all_rows_have_to_be_as_assumed() -> None:
    pair = Pair("p", 10.0, 0.0, 1.0, (0.9,), batch_size=4)
    rounds = ahead(pair, 2, 0.0, 0.0, N, 3)
    assert rounds.foreseen.mean() == pytest.approx(0.9 ** (3 * 4), abs=1.2e-2)


def test_jitter_leaves_the_mean_of_rounds_in_turn_alone() -> None:
    still, moving = (in_turn(PAIR, 3, 1.0, jitter, N, 0).milliseconds for jitter in (0.0, 0.5))
    assert moving.mean() == pytest.approx(still.mean(), rel=1e-2)
    assert moving.std() > 1


def test_both_ways_accept_the_same_tokens() -> None:
    first, second = (WAYS[way](PAIR, 3, 0.0, 0.1, 1000, 7).tokens for way in WAYS)
    assert (first == second).all()


def test_pairs_of_a_report_are_its_draft_lms_under_the_coupled_rule() -> None:
    found = {pair.name: pair for pair in pairs(OverlapConfig(measured=str(TOY)))}
    assert set(found) == {f"{draft}, T={t}, batch 1" for draft in ("distilled", "undistilled") for t in (0, 1)}
    rows = [row for row in read_results(TOY)["rows"] if row["draft"] == "distilled" and row["temperature"] == 1]
    pair = found["distilled, T=1, batch 1"]
    assert pair.draft_ms == pytest.approx(1e3 * rows[0]["component_times"]["t_draft_s"])
    assert pair.chances(6) == [*rows[0]["acceptance_by_position"], *[rows[0]["acceptance_by_position"][-1]] * 2]


def test_a_report_without_such_rows_is_refused(tmp_path: Path) -> None:
    results = json.loads(TOY.read_text())
    results["rows"] = [row for row in results["rows"] if row["drafter"] != "lm"]
    (tmp_path / "results.json").write_text(json.dumps(results))
    with pytest.raises(InputError, match="no row of a draft LM"):
        pairs(OverlapConfig(measured=str(tmp_path / "results.json")))


def test_a_report_is_named_by_its_folder_or_its_file(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(TOY.read_text())
    assert pairs(OverlapConfig(measured=str(tmp_path))) == pairs(OverlapConfig(measured=str(TOY)))
    with pytest.raises(InputError, match="overlap.measured=.*nowhere is no report"):
        pairs(OverlapConfig(measured=str(tmp_path / "nowhere")))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"draft_ms": 1, "alpha": 0.5}, "lacks target_ms"),
        ({"target_ms": 0, "draft_ms": 1, "alpha": 0.5}, "a pass takes time"),
        ({"target_ms": 1, "draft_ms": 1, "alpha": 1.5}, "is no probability"),
        ({"target_ms": 1, "draft_ms": 1, "alpha": []}, "alpha is empty"),
        ({"target_ms": 1, "draft_ms": 1, "alpha": 0.5, "token_ms": -1}, "0 or more"),
        ({"target_ms": 1, "draft_ms": 1, "alpha": 0.5, "batch_size": 0}, "1 or more rows"),
        ({"target_ms": 1, "draft_ms": 1, "alpha": 0.5, "tokens": 1}, "unknown keys"),
        (3, "is no pair"),
    ],
)
def test_a_given_pair_that_cannot_be_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OverlapConfig(given={"mine": given})


def test_nothing_to_simulate_is_refused() -> None:
    with pytest.raises(ConfigError, match="no pair of models"):
        EvalConfig(mode="overlap")


def test_the_mode_writes_a_report_that_is_read_back_and_published(tmp_path: Path) -> None:
    own = OverlapConfig(
        given={"mine": {"target_ms": 10, "draft_ms": 3.3, "alpha": 0.8}}, links_ms=[0.0, 100.0], rounds=2000
    )
    mode.run(EvalConfig(mode="overlap", output_dir=str(tmp_path / "report"), overlap=own))
    results = read_results(tmp_path / "report" / "results.json")
    near, far = results["simulated"]
    assert near["ahead_over_in_turn"] > 1.1 > far["ahead_over_in_turn"]
    low, high = near["ahead_over_in_turn_ci95"]
    assert low < near["ahead_over_in_turn"] < high
    page = render_summary(results)
    assert "mine: the most is" in page
    assert "<svg" in render_page(results)
    written = publish([tmp_path / "report" / "results.json"], tmp_path / "overlap")
    assert written[1].read_text() == page
