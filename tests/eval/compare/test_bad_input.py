"""What cannot be compared is refused before a model is loaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from decode.common.errors import ConfigError, InputError
from decode.common.typed_config import build
from eval import __main__ as cli
from eval import stage
from eval.config import EvalConfig
from eval.inputs import check_models
from eval.modes.compare import mode
from eval.modes.compare.drafters_config import DraftersConfig
from tests.commands import built
from tests.eval.compare.tiny_comparison import make_models, values


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("drafters")
    make_models(found)
    return found


def arms(**given: Any) -> dict[str, Any]:
    return {"arms": {"one": {"draft": "ngram"} | given}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"texts": []}, "texts is empty"),
        ({"texts": ["poem"]}, "poem"),
        ({"texts": ["own"]}, "prompts.file"),
        ({"arms": {}}, "arms is empty"),
        ({"arms": {"plain": {"draft": "ngram"}}}, "called plain"),
        ({"arms": {"mine": {"draft": "ngram"}}}, "two arms are called mine"),
        (arms(draft=None), "names nothing that drafts"),
        (arms(settings={"memori": 3}), "memori"),
        (arms(settings={"least_match": 0}), "least_match=0"),
        (arms(draft="somewhere/model", settings={"memory": 3}), "without weights"),
        (arms(draft="somewhere/model", settings={"quantization": "int3"}), "'int3' is no scheme"),
        (arms(settings={"quantization": "int8"}), "quantization"),
        (arms(tree="sequoia"), "tree=sequoia is gone.*dynamic"),
        (arms(tree="3y2"), "3y2"),
        (arms(verifier="typical", lossy=True), "lossy"),
        (arms(num_draft_tokens=[]), "empty or repeats"),
        (arms(num_draft_tokens=[4, 4]), "empty or repeats"),
        (arms(num_draft_tokens=0), "num_draft_tokens"),
        (arms(num_drafted=3), "unknown keys.*num_drafted"),
        (arms(texts=["edits"]), "edits"),
        (arms(texts=["log"]) | {"draft_arms": {}}, "no arm of drafters.arms is for text=code"),
        ({"draft_lengths": []}, "draft_lengths is empty"),
        ({"batches_timed": [1, 2]}, "go by pairs"),
        ({"screening_prompts": 0}, "screening_prompts=0"),
    ],
)
def test_settings_that_cannot_be(folder: Path, changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {**values(folder), "temperatures": [1.0]}
    given["drafters"] |= {"draft_arms": {"NAME": {"draft": "DRAFT"}}, **changes}
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        build(EvalConfig, given)


def test_files_that_are_missing_or_fit_no_target(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode, "load_model", lambda *_: pytest.fail("a model was loaded"))
    for changes, message in (
        ({"tasks_target": str(folder / "nowhere")}, "drafters.tasks_target=.*nowhere.*is to write edit"),
        ({"arms": {"one": {"draft": str(folder / "nowhere")}}}, "nowhere"),
        ({"datastore": str(folder / "nowhere")}, "nowhere"),
    ):
        given = values(folder)
        given["drafters"] |= changes
        with pytest.raises(InputError, match=f"(?s){message}"):
            stage.run(build(EvalConfig, given))
    given = values(folder)
    given["drafters"] |= {"arms": {"one": {"draft": "ngram", "adaptive": True, "confidence": True}}}
    with pytest.raises(ConfigError, match=r"drafters\.arms\.one\.confidence=true.*predicts nothing"):
        stage.run(build(EvalConfig, given))
    given = values(folder)
    given["peers"] = given.get("peers", {}) | {"early_exit_layers": [99]}
    with pytest.raises(InputError, match=r"exit_layer=99, and .* layers"):
        stage.run(build(EvalConfig, given))
    given = values(folder) | {"drafts": {"mine": str(folder / "tasks_target")}}
    given["drafters"] |= {"texts": ["code"]}
    with pytest.raises(InputError, match="320"):
        stage.run(build(EvalConfig, given))


def test_too_few_prompts_are_said_with_what_asks_for_them(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    lines = [json.dumps({"question_id": one, "turns": [f"What is {one}?"]}) for one in range(3)]
    file.write_text("\n".join(lines))
    given = values(folder) | {"prompts": {"tokens": 12, "file": str(file)}}
    given["drafters"] |= {"texts": ["own"], "batches_timed": [3]}
    with pytest.raises(ConfigError, match=r"gives 3 prompts of kind own, not 3 to time and 1"):
        stage.run(build(EvalConfig, given))
    given = values(folder) | {"data": {"name": "jsonl", "path": str(file)}, "drafts": {}}
    given["drafters"] |= {"texts": ["edit"]}
    with pytest.raises(ConfigError, match="whole files"):
        stage.run(build(EvalConfig, given))


def test_bad_input_ends_with_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["eval", "mode=drafters", "+drafters.arms.one={draft: ngram, texts: [poem]}"])
    with pytest.raises(SystemExit) as error:
        cli.main()
    assert error.value.code == 2
    assert "poem" in capsys.readouterr().err


def test_own_prompts_are_timed_wherever_they_are_given(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(json.dumps({"turns": [f"What is {one}, or what is it not?"]}) for one in range(4)))
    given = values(folder) | {"prompts": {"tokens": 12, "file": str(file)}, "plan": True}
    given["drafters"] |= {"texts": ["code"], "tasks_target": None}
    stage.run(build(EvalConfig, given))
    plan = capsys.readouterr().out
    assert "writes code, own" in plan
    assert "arms for own: ngram, mine" in plan


@pytest.mark.parametrize("drafter", ["early_exit", "retrieval", "cascade", "mixture", "foreign"])
def test_a_report_names_the_mode_that_times_a_drafter_with_settings(folder: Path, drafter: str) -> None:
    """It named draft.settings, which is no key of it."""
    given = {"target": values(folder)["target"], "drafts": {"one": drafter}}
    with pytest.raises(ConfigError, match=rf"(?s)drafts\.one={drafter} .*mode=drafters '\+drafters\.arms\.one="):
        check_models(build(EvalConfig, given))


def test_kinds_of_questions_are_texts_of_their_own(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Spec-Bench's thirteen categories are six kinds; a file in another shape would be counted as what it is not."""
    file = tmp_path / "spec.jsonl"
    lines = [{"category": ("math", "writing", "qa", "rag")[one % 4], "turns": [f"What is {one}?"]} for one in range(24)]
    file.write_text("\n".join(map(json.dumps, lines)))
    kinds = {"talk": ["math", "writing"], "qa": ["qa"], "rag": ["rag"]}
    given = values(folder) | {"prompts": {"tokens": 12, "file": str(file), "kinds": kinds}, "plan": True}
    given["drafters"] |= {"texts": ["own"], "tasks_target": None}
    stage.run(build(EvalConfig, given))
    plan = capsys.readouterr().out
    assert "writes talk, qa, rag" in plan
    assert "arms for talk: ngram, mine" in plan
    given["prompts"]["kinds"] = {"code": ["math", "writing"], "qa": ["qa"], "rag": ["rag"]}
    with pytest.raises(ConfigError, match="prompts.kinds names code"):  # windows of the corpus were timed in its place
        build(EvalConfig, given)
    given["prompts"]["kinds"] = {"talk": ["math"], "qa": ["qa"], "sums": ["sums"]}
    with pytest.raises(InputError, match="lacks sums, and has 'rag', 'writing' besides"):
        stage.run(build(EvalConfig, given))
    with pytest.raises(ConfigError, match=r"prompts\.file is not set"):
        built("eval", ["mode=drafters", "prompts=spec_bench"])


def test_the_mode_brings_its_arms_and_those_of_each_draft() -> None:
    cfg = built("eval", ["mode=drafters", "+drafts.mine=runs/x", "drafters.datastore=runs/datastore"])
    assert isinstance(cfg, EvalConfig)
    assert cfg.output_dir == "runs/drafters/report"
    ways = {way.name: way for way in cfg.drafters.ways(cfg.drafts)}
    own = ["ngram", "ngram-tree", "edit", "ngram+edit", "retrieval", "jacobi", "early_exit"]
    assert list(ways) == [*own, "mine", "cascade-mine", "ngram+mine"]
    assert ways["ngram+mine"].settings == {"members": ["ngram", "runs/x"]}
    assert ways["retrieval"].settings == {"datastore": "runs/datastore"}
    assert [name for name, way in ways.items() if way.has_weights] == ["mine", "cascade-mine", "ngram+mine"]
    assert "retrieval" not in [way.name for way in DraftersConfig(arms=cfg.drafters.arms).ways({})]
