"""`scripts/overlap_simulation.py`: rounds against sums done by hand, the pairs of a report, and the table."""

from __future__ import annotations

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decode.common.errors import InputError
from eval.results.schema import read_results

ROOT = Path(__file__).resolve().parents[1]
TOY = ROOT / "docs/results/toy.json"
N = 40_000


def loaded() -> Any:
    spec = spec_from_file_location("overlap_simulation", ROOT / "scripts/overlap_simulation.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)  # where a dataclass looks up its own annotations
    spec.loader.exec_module(module)
    return module


script = loaded()
Pair, simulate = script.Pair, script.simulate
PAIR = Pair("p", target_ms=10.0, token_ms=0.5, draft_ms=2.0, acceptance=(0.9, 0.7, 0.8))


def expected_tau(pair: Any, k: int) -> float:
    return 1 + sum(accumulate(pair.chances(k), mul))


def foreseen(pair: Any, k: int) -> float:
    return float(np.prod(pair.chances(k + 1))) ** pair.batch_size


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("link_ms", [0.0, 3.0])
@pytest.mark.parametrize("draft_ms", [0.5, 2.0, 12.0])
def test_without_jitter_rounds_take_what_the_sums_say(k: int, link_ms: float, draft_ms: float) -> None:
    pair = Pair("p", 10.0, 0.5, draft_ms, (0.9, 0.7, 0.8))
    verify, chance = 10 + 0.5 * k, foreseen(pair, k)
    turns, early = (simulate(way, pair, k, link_ms, 0.0, N, 1) for way in ("in turn", "ahead"))
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
    rounds = simulate("ahead", pair, 4, 0.0, 0.0, 100)
    assert rounds.foreseen.all()
    assert (rounds.tokens == 5).all()
    assert rounds.milliseconds == pytest.approx(10.0)


def test_a_useless_draft_ahead_costs_what_is_in_the_way_of_the_next() -> None:
    slow = Pair("p", 10.0, 0.0, 4.0, (0.0,))
    turns, early = (simulate(way, slow, 4, 1.0, 0.0, 100) for way in ("in turn", "ahead"))
    assert not early.foreseen.any()
    assert early.milliseconds - turns.milliseconds == pytest.approx((4 + 1) * 4.0 - 10.0)


def test_in_a_batch_all_rows_have_to_be_as_assumed() -> None:
    pair = Pair("p", 10.0, 0.0, 1.0, (0.9,), batch_size=4)
    rounds = simulate("ahead", pair, 2, 0.0, 0.0, N, 3)
    assert rounds.foreseen.mean() == pytest.approx(0.9 ** (3 * 4), abs=1.2e-2)


def test_jitter_leaves_the_mean_of_rounds_in_turn_alone() -> None:
    still, moving = (simulate("in turn", PAIR, 3, 1.0, jitter, N).milliseconds for jitter in (0.0, 0.5))
    assert moving.mean() == pytest.approx(still.mean(), rel=1e-2)
    assert moving.std() > 1


def test_both_ways_accept_the_same_tokens() -> None:
    first, second = (simulate(way, PAIR, 3, 0.0, rounds=1000).tokens for way in ("in turn", "ahead"))
    assert (first == second).all()


def test_pairs_of_a_report_are_its_draft_lms_under_the_coupled_rule() -> None:
    found = {pair.name: pair for pair in script.measured(TOY)}
    assert set(found) == {f"{draft}, T={t}, batch 1" for draft in ("distilled", "undistilled") for t in (0, 1)}
    rows = [row for row in read_results(TOY)["rows"] if row["draft"] == "distilled" and row["temperature"] == 1]
    pair = found["distilled, T=1, batch 1"]
    assert pair.draft_ms == pytest.approx(1e3 * rows[0]["component_times"]["t_draft_s"])
    assert pair.chances(6) == [*rows[0]["acceptance_by_position"], *[rows[0]["acceptance_by_position"][-1]] * 2]


def test_a_report_without_such_rows_is_refused(tmp_path: Path) -> None:
    results = read_results(TOY)
    results["rows"] = [row for row in results["rows"] if row["drafter"] != "lm"]
    (tmp_path / "results.json").write_text(json.dumps(results))
    with pytest.raises(InputError, match="no row of a draft LM"):
        script.measured(tmp_path / "results.json")


def test_the_command_prints_the_published_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of docs/how-to/overlap.md."""
    asked = ["--target-ms", "10", "--draft-ms", "3.3", "--alpha", "0.8", "--links-ms", "0", "10"]
    monkeypatch.setattr(sys, "argv", ["overlap_simulation.py", *asked])
    script.main()
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| given | 0 | 3 | 1.48 | 2 | 1.77 | 51% | 1.20 |",
        "| given | 10 | 6 | 0.80 | 3 | 0.75 | 41% | 0.95 |",
    ]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([], "give either"),
        (["--target-ms", "1", "--draft-ms", "1"], "give either"),
        (["--target-ms", "0", "--draft-ms", "1", "--alpha", "0.5"], "0 is not from"),
        (["--target-ms", "1", "--draft-ms", "1", "--alpha", "1.5"], "1.5 is not from 0 to 1"),
        (["--target-ms", "1", "--draft-ms", "1", "--alpha", "nan"], "nan is not from"),
        (["--report", "nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_input_ends_with_2(
    asked: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["overlap_simulation.py", *asked])
    with pytest.raises(SystemExit) as error:
        script.main()
    assert error.value.code == 2
    assert message in capsys.readouterr().err
