"""The real command lines: what they refuse, and what they say when they do."""

import json
import random
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from decode.common.checked_json import read_json
from tests.bad_configurations import bad_arguments, good_commands, tiny_training
from tests.commands import MINIMUM, MODULES, ROOT, STAGES, main_of
from tests.tiers import by_default


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs a stage in this process: (exit code, standard error)."""

    def run(stage: str, *arguments: str) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", [f"draftsmith-{stage}", *arguments])
        with pytest.raises(SystemExit) as ended:
            main_of(stage)()
        return ended.value.code, capsys.readouterr().err

    return run


@pytest.mark.parametrize("stage", ["export", "check"])
def test_a_folder_in_place_of_a_part_is_told_the_key(call, stage: str) -> None:
    """conf/draft is training's, so that Hydra took the folder for one of its options."""
    code, shown = call(stage, "draft=some/folder")
    assert code == 2
    assert "draft has keys of its own, and no value. Set one of them: draft.path" in shown


def test_every_stage_has_a_console_script() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {f"draftsmith-{stage}": f"{module}.__main__:main" for stage, module in MODULES.items()}


@pytest.mark.parametrize(
    "stage", [stage for stage in STAGES if stage not in ("export", "datastore")]
)  # which draw nothing
@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_an_unknown_key_is_refused_with_its_nearest_neighbour(call, stage: str, prefix: str) -> None:
    code, shown = call(stage, *MINIMUM[stage], f"{prefix}sed=1")
    assert code == 2
    assert "unknown key 'sed'. Did you mean 'seed'?" in shown


@pytest.mark.parametrize(
    ("stage", "given", "meant"),
    [
        ("decode", "temperature=0", "'decode.temperature'"),
        ("decode", "temperatur=0", "'decode.temperature'"),
        ("decode", "sampling.temperature=0", "'decode.temperature'"),
        ("decode", "draft.num_draft_tokens=3", "'decode.num_draft_tokens'"),
        ("decode", "decode.draft=eagle3", "'draft'"),
        ("decode", "path=x", "'target.path' or 'draft.path'"),
        ("distill", "temperature=0", "'sampling.temperature'"),
        ("distill", "draft.path=x", "'sampling.draft.path', 'target.path' or 'data.path'"),
        ("distill", "max_new_token=3", "'sampling.max_new_tokens'"),
        ("datastore", "text_field=x", "'data.text_field'"),
        ("train", "depth=3", "'draft.head.depth'"),
        ("train", "head.depth=3", "'draft.head.depth'"),
        ("train", "+rank=3", "'draft.lora.rank'"),
        ("eval", "temperature=0", "'decode.temperature' or 'temperatures'"),
        ("export", "quantization=int8", "'target.quantization'"),
        ("check", "device=cpu", "'target.device'"),
        *[(stage, "experment=x", "'experiment'") for stage in ("distill", "train", "decode", "eval")],
    ],
)
def test_an_unknown_key_is_told_where_it_was_meant(call, stage: str, given: str, meant: str) -> None:
    code, shown = call(stage, *MINIMUM[stage], given)
    assert code == 2
    assert f"unknown key {given.split('=')[0].lstrip('+')!r}. Did you mean {meant}?" in shown


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("draft=eagel3", "Did you mean 'eagle3'?"),
        ("experiment=toy_drafts", "Did you mean 'toy_draft'?"),
        ("output_dir=???", "output_dir is not set, and nothing stands in for it. Add output_dir=VALUE"),
    ],
)
def test_a_choice_that_is_none_and_a_value_that_is_missing_are_told(call, given: str, said: str) -> None:
    code, shown = call("train", *MINIMUM["train"], given)
    assert code == 2
    assert said in shown


def test_so_it_is_in_a_file(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    monkeypatch.setattr("decode.common.compose.CONF", tmp_path / "conf")
    for text, said in (
        ("temperature: 0", "unknown key 'temperature'. Did you mean 'decode.temperature'?"),
        ("draft:\n  temperature: 0", "unknown key 'draft.temperature'. Did you mean 'decode.temperature'?"),
    ):
        (tmp_path / "conf/experiment/mine.yaml").write_text(f"# @package _global_\n{text}\n")
        assert said in call("decode", *MINIMUM["decode"], "experiment=mine")[1]


@pytest.mark.parametrize("count", by_default(1, [6, 50]))
@pytest.mark.parametrize("stage", by_default(3, STAGES))
def test_generated_bad_configurations_end_with_a_message(
    call, stage: str, count: int, tmp_path: Path, monkeypatch
) -> None:
    """Everything but the one mistake is right, files included, so that the mistake alone is what stops the stage."""
    monkeypatch.chdir(tmp_path)
    good = good_commands(tmp_path)[stage]
    rng = random.Random(f"bad {stage} {count}")
    for _ in range(count):
        arguments = [*good, *bad_arguments(stage, rng, tmp_path)]
        code, shown = call(stage, *arguments)
        assert code == 2, f"{arguments}: exit code {code}\n{shown}"
        assert "error: " in shown, f"{arguments}\n{shown}"
        assert "Traceback" not in shown, f"{arguments}\n{shown}"
        assert not (tmp_path / "out").exists(), f"{arguments} left files behind"
    if count > 10:  # else no command may have been drawn that writes there
        assert (tmp_path / "taken" / "mine.txt").read_text() == "somebody's work"
        assert len(list((tmp_path / "taken").iterdir())) == 1


def without_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def with_more_layers(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": 5}))


def with_a_program(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nmkdir\n(V" + str(folder / "made").encode() + b"\ntR.")


@pytest.mark.parametrize(
    ("damage", "words"),
    by_default(
        1,
        [
            (without_a_tensor, "missing: model.layers.0.self_attn.q_proj.weight"),
            (with_more_layers, "num_hidden_layers=5, and the weights have 2"),
            (with_a_program, "nothing of it was run"),
        ],
    ),
)
def test_weights_that_are_not_what_they_should_be_end_with_a_message(
    call, damage: Callable[[Path], None], words: str, tmp_path: Path, monkeypatch
) -> None:
    """Wherever a stage names a model, and before anything is written."""
    monkeypatch.chdir(tmp_path)
    good = good_commands(tmp_path)
    bad = shutil.copytree(tmp_path / "target", tmp_path / "bad")
    damage(bad)
    places = {"distill": ["target.path"], "train": ["target.path", "draft.init_from"]}
    places |= {"decode": ["target.path", "draft.path"], "eval": ["target.path", "drafts.one"]}
    for stage, key in [(stage, key) for stage, keys in places.items() for key in keys]:
        own = ["tokenizer.train_entries=null"] if (stage, key) == ("train", "target.path") else []
        code, shown = call(stage, *good[stage], *own, f"{key}={bad}")
        assert code == 2, (stage, key, shown)
        assert words in shown, (stage, key, shown)
        assert "Traceback" not in shown
        assert not (tmp_path / "out").exists()
    assert not (bad / "made").exists()


def test_a_plan_says_what_would_run_and_writes_nothing(call, tmp_path: Path) -> None:
    code, shown = call("train", *tiny_training(tmp_path), "plan=true")
    assert code == 0
    assert "parameters" in shown
    assert "tokens" in shown
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_sweep_of_real_training_skips_what_is_finished(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "train", "--multirun", *tiny_training(tmp_path), "seed=0,1"]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    jobs = [tmp_path / "out" / f"seed-{seed}" for seed in (0, 1)]
    assert [json.loads((job / "run.json").read_text())["seed"] for job in jobs] == [0, 1]
    written = [(job / "manifest.json").stat().st_mtime_ns for job in jobs]
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stderr
    assert second.stderr.count("already finished") == 2
    assert [(job / "manifest.json").stat().st_mtime_ns for job in jobs] == written
    lines = [line.split() for line in (tmp_path / "out" / "sweep.md").read_text().splitlines() if line.startswith("| ")]
    assert lines[0][1::2] == ["seed", "alpha", "tau", "loss", "seconds", "folder", "status"]
    losses = {str(seed): read_json(job / "manifest.json")["loss"] for seed, job in enumerate(jobs)}
    assert [line[1] for line in lines[2:]] == sorted(losses, key=lambda seed: losses[seed])  # there is no tau
    assert [line[7] for line in lines[2:]] == [f"{losses[line[1]]:.4g}" for line in lines[2:]]
    assert [line[-2] for line in lines[2:]] == ["skipped", "skipped"]
