"""Drafts as the engine is given them: ours are exported, those of others taken as they are; what it does not take is
refused."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from decode.common.errors import InputError
from decode.common.typed_config import build
from decode.config import ModelConfig
from decode.models.describe import describe_model
from distill.engines.vllm_command import speculation
from eval.config import EvalConfig
from eval.modes.served.engine.jobs import Job, command, jobs, target_options
from eval.modes.served.folders import ServedDraft, check_drafts, prepare
from tests.tiny import save_tiny_target
from tests.train.export.saved_heads import save_head, save_padded_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafts")
    save_padded_target(folder / "target")
    save_head(folder / "eagle3", folder / "target", "eagle3", taps=(2, 3, 4))
    for name in ("medusa", "hydra"):
        save_head(folder / name, folder / "target", name)
    return folder


def config(folder: Path, drafts: dict[str, str], **served: object) -> EvalConfig:
    content = {
        "mode": "served",
        "target": {"path": str(folder / "target"), "device": "cpu"},
        "drafts": drafts,
        "decode": {"num_draft_tokens": 5},
        "served": {"draft_lengths": [1, 2, 6], "rounds": 2, **served},
    }
    return build(EvalConfig, content)


def prepared(cfg: EvalConfig, name: str, place: Path) -> ServedDraft:
    target = describe_model(cfg.target)
    check_drafts(cfg, target)
    return prepare(cfg, name, target, place)


@pytest.mark.parametrize(("family", "lengths"), [("eagle3", (1, 2, 5, 6)), ("medusa", (1, 2, 4))])
def test_ours_is_exported_and_what_was_exported_is_taken_as_it_is(
    folder: Path, tmp_path: Path, family: str, lengths: tuple[int, ...]
) -> None:
    ours = prepared(config(folder, {"x": str(folder / family)}), "x", tmp_path / "export")
    assert (ours.form, ours.method, ours.folder) == (family, family, str(tmp_path / "export"))
    assert ours.lengths == lengths
    assert ours.compared == min(5, lengths[-1])
    taken = prepared(config(folder, {"x": ours.folder}), "x", tmp_path / "unused")
    assert not (tmp_path / "unused").exists()
    assert taken == ServedDraft("x", ours.folder, ours.folder, family, ours.compared, lengths, ours.options)
    assert prepared(config(folder, {"x": str(folder / family)}), "x", tmp_path / "export") == ours


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_ours_is_written_in_the_precision_that_it_is_served_in(folder: Path, tmp_path: Path, dtype: str) -> None:
    """A head is saved in bfloat16, and engines are given the target's own rows with it: those of SmolLM2 in float32,
    rounded to that, made vLLM accept other tokens than we do."""
    cfg = config(folder, {"x": str(folder / "eagle3")})
    cfg.target.dtype = dtype  # type: ignore[assignment]
    ours = prepared(cfg, "x", tmp_path / "export")
    weights = load_file(f"{ours.folder}/model.safetensors")
    assert {str(one.dtype) for one in weights.values() if one.is_floating_point()} == {f"torch.{dtype}"}


def test_a_language_model_of_others_is_taken_as_it_is(folder: Path, tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "lm", 320)
    cfg = config(folder, {"x": str(tmp_path / "lm")})
    found = prepared(cfg, "x", tmp_path / "unused")
    assert (found.form, found.method, found.folder) == ("lm", "draft_model", str(tmp_path / "lm"))


def test_what_the_engine_does_not_serve_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"drafts\.x=.*vLLM 0\.32 does not serve it.*Hydra"):
        prepared(config(folder, {"x": str(folder / "hydra")}), "x", tmp_path / "export")


def test_a_folder_that_the_engine_would_read_otherwise_is_refused(folder: Path, tmp_path: Path) -> None:
    ours = prepared(config(folder, {"x": str(folder / "eagle3")}), "x", tmp_path / "export")
    shutil.copytree(ours.folder, tmp_path / "edited")
    file = tmp_path / "edited/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_theta": 7.0, "rope_parameters": None}))
    with pytest.raises(InputError, match="rope"):
        prepared(config(folder, {"x": str(tmp_path / "edited")}), "x", tmp_path / "unused")


def test_servers_of_a_round_are_the_target_alone_and_each_length(folder: Path, tmp_path: Path) -> None:
    cfg = config(folder, {"e": str(folder / "eagle3"), "m": str(folder / "medusa")}, options=["--enforce-eager"])
    drafts = [prepared(cfg, name, tmp_path / name) for name in cfg.drafts]
    every = jobs(cfg, drafts)
    first = [(one.draft and one.draft.name, one.k) for one in every if one.round == 0]
    # k = 0 is measured with a draft that follows a schedule, which Medusa heads do not
    assert first == [(None, 0), ("e", 0), ("e", 1), ("e", 2), ("e", 5), ("e", 6), ("m", 1), ("m", 2), ("m", 4)]
    assert len(every) == 2 * len(first)
    assert [(one.draft.name, one.k, one.round) for one in every if one.draft and one.compares] == [
        ("e", 5, 0),
        ("m", 4, 0),
    ]
    words = command(cfg, Job(drafts[1], 2, 4, 0))
    assert speculation(words) == {"method": "medusa", "model": drafts[1].folder, "num_speculative_tokens": 2}
    assert words[-1] == "--enforce-eager"
    only = [(one.k, one.round) for one in jobs(config(folder, cfg.drafts, batch_sizes=[]), drafts)]
    assert only == [(5, 0), (4, 0)]


def test_the_engine_is_told_revision_and_precision_of_the_target() -> None:
    assert target_options(ModelConfig("a/b")) == []
    given = ModelConfig("a/b", revision="v1", dtype="bfloat16", trust_remote_code=True)
    wanted = "--dtype bfloat16 --revision v1 --tokenizer-revision v1 --trust-remote-code"
    assert target_options(given) == wanted.split()
