"""`python -m distill.datastore`: what is indexed, killed builds, bad input, and drafting from it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decode import generate, load_drafter
from decode.common.errors import ConfigError, InputError
from decode.common.typed_config import build
from decode.config import DecodeConfig, DrafterConfig, ModelConfig
from decode.drafters.untrained.index.datastore import manifest_of
from decode.drafters.untrained.index.several_texts import BETWEEN
from decode.models.describe import describe_model
from decode.models.load import load_model
from decode.sampling.config import SamplingConfig
from decode.stage import run as run_decode
from distill.datastore import stage
from distill.datastore.config import DatastoreConfig
from tests.distill.chats import DATED, chats_of, set_template
from tests.tiny import save_tiny_target, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and texts."""
    path = tmp_path_factory.mktemp("datastore")
    save_tiny_target(path / "target")
    (path / "texts").mkdir()
    for number in range(30):
        (path / "texts" / f"{number}.txt").write_text(f"def f{number}(x):\n    return x + {number}\n" * 3)
    return path


def config(folder: Path, **changes: Any) -> DatastoreConfig:
    values = {
        "target": {"path": str(folder / "target")},
        "data": {"name": "text", "path": str(folder / "texts")},
        "output_dir": str(folder / "store"),
    }
    return build(DatastoreConfig, values | changes)


@pytest.fixture(scope="module")
def store(folder: Path) -> Path:
    stage.run(config(folder))
    return folder / "store"


def test_places_are_sorted_by_the_text_before_them(store: Path) -> None:
    tokens = np.fromfile(store / "tokens.bin", dtype=np.int32).tolist()
    order = np.fromfile(store / "order.bin", dtype=np.int32).tolist()
    assert sorted(order) == list(range(len(tokens)))
    backwards = [tokens[: place + 1][::-1] for place in order]
    assert backwards == sorted(backwards)
    assert tokens.count(BETWEEN) > 20


def test_held_out_documents_are_not_indexed(folder: Path, tmp_path: Path) -> None:
    shares = {"name": "text", "path": str(folder / "texts"), "heldout_share": 0.5}
    stage.run(config(folder, data=shares, output_dir=str(tmp_path / "half")))
    half = np.fromfile(tmp_path / "half/tokens.bin", dtype=np.int32).tolist()
    assert 5 < half.count(BETWEEN) < 25


def test_the_manifest_names_the_corpus_as_a_draft_does(folder: Path, store: Path) -> None:
    data = config(folder).data
    assert json.loads((store / "manifest.json").read_text())["data"] == asdict(data)
    found = manifest_of(store)
    assert found is not None
    assert found.data is not None
    assert found.data.model_dump() == asdict(data)


def test_a_limit_on_tokens_holds(folder: Path, tmp_path: Path) -> None:
    stage.run(config(folder, tokens=50, output_dir=str(tmp_path / "few")))
    assert len(np.fromfile(tmp_path / "few/tokens.bin", dtype=np.int32)) == 50


def test_a_killed_build_is_never_served_and_is_begun_anew(
    folder: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(tokens: np.ndarray) -> np.ndarray:
        raise KeyboardInterrupt

    out = tmp_path / "killed"
    with monkeypatch.context() as patch:
        patch.setattr(stage, "sorted_places", killed)
        with pytest.raises(KeyboardInterrupt):
            stage.run(config(folder, output_dir=str(out)))
    model = load_model(ModelConfig(str(folder / "target")))
    with pytest.raises(InputError, match="not finished"):
        load_drafter("retrieval", target=model, datastore=str(out))
    stage.run(config(folder, output_dir=str(out), resume="auto"))
    for name in ("tokens.bin", "order.bin"):
        assert (out / name).read_bytes() == (store / name).read_bytes()
    with pytest.raises(ConfigError, match="resume"):
        stage.run(config(folder, output_dir=str(out)))


def test_the_text_is_that_of_plain_decoding(folder: Path, store: Path) -> None:
    model = load_model(ModelConfig(str(folder / "target"), dtype="float64"))
    ids = torch.randint(3, 60, (3, 10), generator=torch.Generator().manual_seed(0))
    asked: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.7, "seed": 3, "eos_token_id": (), "batch_size": 2}
    plain = generate(model, None, ids, **asked)
    drafter = load_drafter("retrieval", target=model, datastore=str(store), least_match=1)
    for tree in ("chain", "dynamic"):
        out = generate(model, drafter, ids, num_draft_tokens=3, tree=tree, audit=True, **asked)
        assert torch.equal(out.sequences, plain.sequences)
        assert any(one.drafted for one in out.stats.rounds)


def test_the_command_drafts_from_a_datastore_and_from_documents(
    folder: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for settings in ({"datastore": str(store)}, {"documents": str(folder / "texts"), "least_match": 1}):
        draft = DrafterConfig(path="retrieval", settings=settings)
        target, sampling = ModelConfig(str(folder / "target")), SamplingConfig(max_new_tokens=8)
        run_decode(DecodeConfig(target, draft, sampling, prompt="def f1(x):\n", color="never"))
        assert "tokens per pass" in capsys.readouterr().out


def test_what_cannot_be_drafted_from_is_refused_before_weights_are_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode.stage.load_model", lambda *_: pytest.fail("weights were loaded"))
    (tmp_path / "empty.txt").write_text(" \n")
    for settings, message in (
        ({"datastore": str(tmp_path)}, "no manifest.json"),
        ({"documents": str(tmp_path)}, "holds no text"),
        ({"documents": str(tmp_path / "none")}, "cannot be read"),
    ):
        draft = DrafterConfig(path="retrieval", settings=settings)
        with pytest.raises(InputError, match=message):
            run_decode(DecodeConfig(ModelConfig(str(folder / "target")), draft, prompt="a", color="never"))
    with pytest.raises(ConfigError, match="neither is given"):
        DrafterConfig(path="retrieval")


def test_a_corpus_without_training_text_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match="no text file"):
        stage.run(config(folder, data={"name": "text", "path": str(tmp_path / "none")}, output_dir=str(tmp_path / "o")))


def test_a_plan_writes_nothing(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage.run(config(folder, plan=True, output_dir=str(tmp_path / "planned")))
    assert "bytes a token" in capsys.readouterr().out
    assert not (tmp_path / "planned").exists()


def test_chats_are_written_by_their_settings_and_by_one_template(tmp_path: Path) -> None:
    set_template(tmp_path / "target", DATED)
    data = asdict(chats_of(tmp_path, date="2026-02-03", template={"think": False}))
    stage.run(config(tmp_path, data=data))
    tokens = np.fromfile(tmp_path / "store" / "tokens.bin", dtype=np.int32).tolist()
    assert str(tiny_tokenizer().decode(tokens[: tokens.index(BETWEEN)])).startswith("03 Feb 2026\n<|user|>def f")
    told = manifest_of(tmp_path / "store")
    before = describe_model(ModelConfig(path=str(tmp_path / "target"))).chat_template_hash
    assert told is not None
    assert told.chat_template_hash == before
    set_template(tmp_path / "target", DATED + "!")
    with pytest.raises(ConfigError, match=f"begun with chat_template_hash {before}"):
        stage.run(config(tmp_path, data=data, resume="auto"))
