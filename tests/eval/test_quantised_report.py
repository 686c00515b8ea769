"""A report of a quantised target says so, and what it is against."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from decode.common.errors import ConfigError
from decode.common.typed_config import build
from eval import stage
from eval.config import EvalConfig
from eval.render.report_page import page_of
from eval.results.poolable import _compared
from eval.results.reported import Report
from tests.eval.reports import report
from tests.eval.test_report import GOOD, make_models, values


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("torchao")
    folder: Path = tmp_path_factory.mktemp("quantised")
    make_models(folder)
    asked = values(folder) | {"temperatures": [1.0], "curve_temperatures": []}
    asked["prompts"] = {"file": str(folder / "questions.jsonl")}
    asked["target"] = {"path": str(folder / "target"), "quantization": "int8"}
    asked["peers"] = {"num_assistant_tokens": [], "unquantised": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("decode.forward.runner.CAPTURE_AFTER", 10**9)
        stage.run(build(EvalConfig, asked))
    return json.loads((folder / "report/results.json").read_text())


@pytest.mark.slow
def test_the_target_s_quantisation_is_told(results: dict[str, Any]) -> None:
    assert results["target"]["quantization"] == "int8"
    assert "quantised: int8. Speedups are over this same int8 target without a draft" in page_of(results).markdown()
    assert all(row["mismatches"] == 0 for row in results["rows"] if row["mismatches"] is not None)


@pytest.mark.slow
def test_the_unquantised_target_is_timed_beside_it(results: dict[str, Any]) -> None:
    rows = results["unquantised"]
    assert {one["draft"] for one in rows} == {"distilled", "undistilled", "lookup", "both"}
    assert all(one["ratio"] > 0 and one["unquantised_tokens_per_s"] > 0 for one in rows)
    assert 0 < rows[0]["kl"] < 0.1
    assert 0 < rows[0]["tv"] < 0.1
    assert 0.5 < rows[0]["argmax_agreement"] <= 1
    assert "Against the unquantised target" in page_of(results).markdown()
    assert "another model's text. Ratio: " in page_of(results).markdown()


def test_runs_of_another_quantisation_are_not_pooled() -> None:
    plain, rounded = report(), report()
    rounded["target"]["quantization"] = "int8"
    assert _compared(Report.model_validate(plain)) != _compared(Report.model_validate(rounded))


def test_losslessness_is_checked_where_the_scheme_runs() -> None:
    asked = {"target": {"path": "t", "quantization": "int8"}, "lossless": {"dtype": "float64"}}
    with pytest.raises(ConfigError, match="target.quantization=int8 does not run there"):
        build(EvalConfig, GOOD | asked)


@pytest.mark.parametrize("changes", [{}, {"mode": "drafters", "target": {"path": "t", "quantization": "int8"}}])
def test_there_has_to_be_something_that_was_quantised(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="peers.unquantised=true times the target as it was before"):
        build(EvalConfig, {**GOOD, "peers": {"unquantised": True}, **changes})
