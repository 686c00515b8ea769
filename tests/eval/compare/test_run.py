"""A whole comparison of ways to draft on tiny models: both targets, choices, resuming, vLLM, pooling."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from decode.common.errors import InputError
from decode.common.typed_config import build
from eval import stage
from eval.arms import vllm_engines
from eval.config import EvalConfig
from eval.modes.compare import mode
from eval.modes.compare.drafters import Drafters, LoadedDrafters
from eval.modes.compare.mode import given_choices
from eval.modes.compare.page import page_of
from eval.modes.compare.results import pool_comparisons
from eval.publish import publish
from eval.results.comparisons import check_comparisons
from eval.results.schema import read_results
from tests.eval.compare.test_decoders import FAKE_WORKER
from tests.eval.compare.tiny_comparison import PLAIN, make_models, values
from tests.eval.energy_checks import check_estimated
from tests.eval.golden import check_keys

LOOKUP = "transformers prompt lookup"
EARLY_EXIT = "transformers early exit"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("drafters")
    make_models(found)
    return found


@pytest.fixture(scope="module")
def folder(models: Path) -> Path:
    stage.run(build(EvalConfig, values(models)))
    return models


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report/results.json").read_text(), parse_constant=lambda name: pytest.fail(name))


def arms_of(cell: dict[str, Any]) -> set[str]:
    return {one["arm"] for one in cell["arms"]}


@pytest.mark.slow
def test_a_small_comparison_leaves_timed_cells_a_summary_and_a_page(models: Path, tmp_path: Path) -> None:
    """The least that is whole: one text, one target, a drafter and a draft."""
    asked = values(models) | {"output_dir": str(tmp_path), "decode": {"max_new_tokens": 4}}
    asked["timing"] |= {"screening_tokens": 2, "watts": 50.0}
    asked["drafters"] |= {"texts": ["code"], "tasks_target": None, "arms": {"ngram": {"draft": "ngram"}}}
    asked["peers"] = asked.get("peers", {}) | {"early_exit_layers": [1], "early_exit_tokens": [2, 3]}
    stage.run(build(EvalConfig, asked))
    found = json.loads((tmp_path / "results.json").read_text())
    published = read_results(Path("docs/results/drafters.json"))
    check_keys(found, "drafters")
    assert set(found) == set(published) - {"runs"}
    assert set(found["prompts"]) == set(published["prompts"])
    assert list(found["definitions"]) == [name for name in published["definitions"] if name != "runs"]
    (cell,), (choice,), (best,) = found["cells"], found["choices"], found["which_when"]
    assert arms_of(cell) == {*PLAIN, LOOKUP, EARLY_EXIT, "ours, ngram", "ours, mine"}
    assert choice["tokens_per_s"][EARLY_EXIT].keys() == {"E=1,n=2", "E=1,n=3"}
    check_estimated(found, arms_of(cell))
    assert {row["energy_kind"] for row in found["rows"]} == {"estimate"}
    for arm in cell["arms"]:
        assert len(arm["seconds_per_token"]) == 2, "batches timed"
        assert min(arm["seconds_per_token"]) > 0, arm["arm"]
        assert arm["tokens"] > 0
    assert [(row["setting"], row["drafter"]) for row in found["rows"]] == [("ngram", "ngram"), ("mine", "lm")]
    assert set(choice["tokens_per_s"]["ngram"]) == {"k=2", "k=3"}
    assert (cell["settings"], cell["settings"]["mine"]) == (choice["best"], "k=2")
    assert (best["text"], best["best"]["over_plain"] > 0) == ("code", True)
    assert json.loads((tmp_path / "manifest.json").read_text())["cells"] == 1
    page = page_of(found)
    for written, rendered in (("summary.md", page.markdown()), ("index.html", page.html())):
        text = (tmp_path / written).read_text(encoding="utf-8")
        assert text == rendered
        assert all(part in text for part in ("Which when", "Text: code", "ngram", "mine", LOOKUP)), written


@pytest.mark.slow
def test_each_text_is_written_by_its_target_with_the_arms_that_are_for_it(results: dict[str, Any]) -> None:
    code, edit = results["cells"]
    assert [(one["key"], one["texts"]) for one in results["targets"]] == [
        ("target", ["code"]),
        ("drafters.tasks_target", ["edit"]),
    ]
    assert arms_of(code) == {*PLAIN, LOOKUP, "ours, ngram", "ours, mine"}
    assert arms_of(edit) == {*PLAIN, LOOKUP, "ours, ngram", "ours, edit", "ours, both"}
    assert "drafts are of `target`" in edit["left_out"]["mine"]
    assert "datastore" in code["left_out"]["retrieval"]
    assert {row["setting"]: row["drafter"] for row in results["rows"]} == {
        "ngram": "ngram",
        "mine": "lm",
        "edit": "edit",
        "both": "mixture",
    }
    assert all(row["dtype_flips"] == 0 for row in results["rows"])  # float32: every arm writes the loop's text


@pytest.mark.slow
def test_lengths_are_chosen_by_arm_and_cell_and_timed(results: dict[str, Any]) -> None:
    for choice, cell in zip(results["choices"], results["cells"], strict=True):
        assert choice["text"] == cell["text"]
        assert set(choice["tokens_per_s"]["ngram"]) == {"k=2", "k=3"}
        speeds = choice["tokens_per_s"]["ngram"]
        assert speeds[choice["best"]["ngram"]] == max(speeds.values())
        assert cell["settings"] == choice["best"]
        (row,) = [row for row in results["rows"] if (row["text"], row["setting"]) == (cell["text"], "ngram")]
        assert f"k={row['num_draft_tokens']}" == choice["best"]["ngram"]
    assert results["choices"][1]["best"]["edit"] == "k=2"
    assert "edit" not in results["choices"][1]["tokens_per_s"]  # of one length nothing is to choose


@pytest.mark.slow
def test_the_page_has_every_arm_and_says_which_when(results: dict[str, Any]) -> None:
    page, summary = page_of(results).html(), page_of(results).markdown()
    assert page.count("<svg") == 1
    for part in (
        "Which when",
        "Text: edit",
        "A mixture against its best member",
        "Settings tried",
        "drafters.datastore",
    ):
        assert part in page
        assert part in summary
    assert {one["text"] for one in results["which_when"]} == {"code", "edit"}
    assert [one["arm"] for one in results["mixtures"]] == ["both"]


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_cells_that_are_missing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = build(EvalConfig, values(folder) | {"output_dir": str(tmp_path / "run"), "resume": "auto"})
    measure, done = mode.measure, list[str]()

    def killed(stock: Any, cell: Any, choice: Any) -> Any:
        if done:
            raise KeyboardInterrupt
        done.append(cell.name)
        return measure(stock, cell, choice)

    monkeypatch.setattr(mode, "measure", killed)
    with pytest.raises(KeyboardInterrupt):
        stage.run(cfg)
    kept = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*T0*.json")}
    assert {path.name for path in kept} == {"batch1-T0-code.json", "batch1-T0-edit.json"}  # the second's choice alone
    monkeypatch.setattr(mode, "measure", lambda *given: done.append(given[1].name) or measure(*given))
    monkeypatch.setattr(LoadedDrafters, "choose", lambda *_: pytest.fail("it was chosen already"))
    stage.run(cfg)
    assert done == ["batch1-T0-code", "batch1-T0-edit"]
    assert all(path.read_bytes() == content for path, content in kept.items())
    stage.run(cfg)
    assert len(done) == 2


@pytest.mark.slow
def test_choices_of_an_earlier_run_are_taken_or_refused(folder: Path, results: dict[str, Any]) -> None:
    def config(**drafters: Any) -> EvalConfig:
        changed = values(folder)
        changed["drafters"] |= {"choices": str(folder / "report/results.json"), **drafters}
        return build(EvalConfig, changed)

    def taken(cfg: EvalConfig) -> dict[Any, Any]:
        arm_set = Drafters(cfg)
        return dict(given_choices(arm_set, arm_set.targets()))

    found = taken(config())
    assert [one["best"] for one in found.values()] == [one["best"] for one in results["choices"]]
    assert all(one["seconds"] == 0 for one in found.values())
    for changes, message in (
        ({"batch_sizes": [2]}, "chose nothing for batch2-T0-code"),
        ({"arms": {"ngram": {"draft": "ngram"}}}, "of arms"),
        ({"tasks_target": None}, "of targets|of arms"),
    ):
        with pytest.raises(InputError, match=message):
            taken(config(**changes))


@pytest.mark.slow
def test_runs_are_pooled_and_published(results: dict[str, Any], tmp_path: Path) -> None:
    runs = [copy.deepcopy(results) for _ in range(3)]
    for number, run in enumerate(runs):
        run["environment"]["report_seconds"] = 100.0 + number
    files = [tmp_path / f"{number}.json" for number in range(3)]
    for file, run in zip(files, runs, strict=True):
        file.write_text(json.dumps(run))
    publish(files, tmp_path / "docs/drafters", tmp_path / "README.md")
    pooled = read_results(tmp_path / "docs/drafters.json")
    assert len(pooled["runs"]) == 3
    assert all(len(arm["over_plain_by_run"]) == 3 for cell in pooled["cells"] for arm in cell["arms"])
    assert [one["best"]["arm"] for one in pooled["which_when"]] == [one["best"]["arm"] for one in results["which_when"]]
    assert "by run" in page_of(pooled).markdown()
    runs[1]["choices"][0]["best"]["ngram"] = "k=9"
    with pytest.raises(InputError, match=r"drafters.choices=RUN1"):
        check_comparisons(files, runs)
    assert pool_comparisons([results, results])["mixtures"][0]["over_member_ci95"] is not None


@pytest.mark.slow
def test_vllms_lookup_is_timed_at_its_best_of_the_targets_own_engines(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, lines = tmp_path / "worker.py", tmp_path / "lines"
    told = f"open({str(lines)!r}, 'a').write(json.dumps(settings) + chr(10))\nprint(json.dumps({{\"ready\""
    worker.write_text(FAKE_WORKER.replace('print(json.dumps({"ready"', told))
    monkeypatch.setattr(vllm_engines, "WORKER", worker)
    monkeypatch.setattr(mode, "check_python", lambda *_: None)
    changed = values(folder) | {"output_dir": str(tmp_path / "run"), "drafts": {}}
    changed["peers"] |= {"vllm_python": sys.executable, "vllm_draft_tokens": [2, 5]}
    stage.run(build(EvalConfig, changed))
    found = json.loads((tmp_path / "run/results.json").read_text())
    assert all({"vllm", "vllm ngram"} <= arms_of(cell) for cell in found["cells"])
    assert all(set(one["tokens_per_s"]["vllm ngram"]) == {"k=2", "k=5"} for one in found["choices"])
    asked = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [Path(one["target"]).name for one in asked] == ["target"] * 3 + ["tasks_target"] * 3
    speculations = [one["speculation"] for one in asked[:3]]
    assert speculations[0] is None
    assert [(one["method"], one["num_speculative_tokens"]) for one in speculations[1:]] == [("ngram", 2), ("ngram", 5)]
