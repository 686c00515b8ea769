"""Drafts and datastores that hold the text of the comparison's prompts are refused, wherever an arm names them."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from decode.common.errors import InputError
from decode.common.typed_config import build
from distill.corpora.config import DataConfig
from distill.datastore import stage as datastore
from distill.datastore.config import DatastoreConfig
from eval import __main__ as cli
from eval import stage
from eval.config import EvalConfig
from eval.modes.compare import mode
from eval.modes.compare.drafters_config import DraftersConfig
from tests.eval.compare.tiny_comparison import make_models, values

RETRIEVAL = {"datastore": "DATASTORE"}
HELPED = {"draft": "DRAFT", "helper": "retrieval", "helper_settings": RETRIEVAL}
ARMS: dict[str, dict[str, Any]] = {
    "alone": {"draft": "retrieval", "settings": RETRIEVAL},
    "in a cascade": {"draft": "cascade", "settings": HELPED},
    "in a mixture": {
        "draft": "mixture",
        "settings": {"members": ["ngram", "retrieval"], "settings": {"retrieval": RETRIEVAL}},
    },
    "in a cascade of a mixture": {
        "draft": "mixture",
        "settings": {"members": ["ngram", "cascade"], "settings": {"cascade": HELPED}},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, and a datastore of a split that holds out less than `values` does."""
    found = tmp_path_factory.mktemp("drafters")
    make_models(found)
    data = {"name": "text", "path": str(found / "sources"), "heldout_share": 0.1, "validation_share": 0.3}
    out = str(found / "store")
    datastore.run(build(DatastoreConfig, {"target": {"path": str(found / "target")}, "data": data, "output_dir": out}))
    return found


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode, "load_model", lambda *_: pytest.fail("a model was loaded"))


def config(folder: Path, store: Path, arm: dict[str, Any], **changes: Any) -> EvalConfig:
    """A comparison of one arm, which is planned, not run."""
    given: dict[str, Any] = values(folder) | {"plan": True} | changes
    arms = {"ngram": {"draft": "ngram"}}
    given["drafters"] |= {"texts": ["code"], "datastore": str(store), "arms": arms, "draft_arms": {"NAME": arm}}
    return build(EvalConfig, given)


@pytest.mark.parametrize("arm", ARMS.values(), ids=ARMS)
def test_a_datastore_of_other_shares_is_refused_before_a_model_is_loaded(folder: Path, arm: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"(?s)/store of arm mine.*heldout_share=0.1.*heldout_share=0.4"):
        stage.run(config(folder, folder / "store", arm))


@pytest.mark.parametrize("arm", ARMS.values(), ids=ARMS)
def test_a_datastore_of_the_same_shares_or_of_another_corpus_is_taken(
    folder: Path, arm: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = values(folder)["data"]
    (tmp_path / "elsewhere").symlink_to(folder / "sources")
    same = asked | {"heldout_share": 0.1}
    other = asked | {"path": str(tmp_path / "elsewhere")}
    for data in (same, other):
        stage.run(config(folder, folder / "store", arm, data=data))
        assert "arms for code: ngram, mine" in capsys.readouterr().out


def test_an_older_datastore_says_nothing_of_its_corpus_and_is_taken(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a draft is whose folder does not say it."""
    store = tmp_path / "old"
    store.mkdir()
    for file in (folder / "store").iterdir():
        (store / file.name).write_bytes(file.read_bytes())
    told = json.loads((store / "manifest.json").read_text())
    del told["data"]
    (store / "manifest.json").write_text(json.dumps(told))
    stage.run(config(folder, store, ARMS["alone"]))
    assert "arms for code: ngram, mine" in capsys.readouterr().out


def test_all_that_a_way_drafts_with_is_found_at_any_depth() -> None:
    given = {"arms": {"ngram": {"draft": "ngram"}}, "datastore": "runs/store"}
    for name, arm in ARMS.items():
        (_, way) = build(DraftersConfig, given | {"draft_arms": {"NAME": arm}}).ways({name: "runs/draft"})
        assert way.datastores == ["runs/store"]
        assert way.folders == (["runs/draft"] if "cascade" in name else [])


def test_a_draft_inside_an_arm_is_refused_as_a_draft_alone_is(folder: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    for file in (folder / "draft").iterdir():
        (draft / file.name).write_bytes(file.read_bytes())
    data = asdict(DataConfig(**values(folder)["data"] | {"heldout_share": 0.1}))
    (draft / "draftsmith.json").write_text(json.dumps({"schema": 1, "family": "lm", "data": data}))
    for arm in ({"draft": "DRAFT"}, {"draft": "mixture", "settings": {"members": ["ngram", "DRAFT"]}}):
        with pytest.raises(InputError, match=r"drafts.mine=.*heldout_share=0.1.*heldout_share=0.4"):
            stage.run(config(folder, folder / "store", arm, drafts={"mine": str(draft)}))


def test_the_command_ends_with_2(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["data=text", f"data.path={folder / 'sources'}", "data.heldout_share=0.4", "data.validation_share=0.3"]
    given = ["mode=drafters", f"target.path={folder / 'target'}", "drafters.texts=[code]", "drafters.tasks_target=null"]
    given += ["drafters.arms.early_exit.settings.exit_layer=1"]  # of two
    given += ["drafters.batches_timed=[2,1]", f"output_dir={tmp_path / 'report'}"]
    monkeypatch.setattr(sys, "argv", ["eval", *given, *data, f"drafters.datastore={folder / 'store'}"])
    with pytest.raises(SystemExit) as error:
        cli.main()
    assert error.value.code == 2
    assert "of arm retrieval was made of text split with data.heldout_share=0.1" in capsys.readouterr().err
