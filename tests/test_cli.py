"""The four real command lines: what they refuse, and what they say when they do."""

import json
import random
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.bad_configurations import bad_arguments, good_commands, tiny_training
from tests.commands import MINIMUM, ROOT, STAGES

BAD_COMMANDS_PER_STAGE = 50


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs a stage in this process: (exit code, standard error)."""

    def run(stage: str, *arguments: str) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", [f"draftsmith-{stage}", *arguments])
        with pytest.raises(SystemExit) as ended:
            import_module(f"{stage}.cli").main()
        return ended.value.code, capsys.readouterr().err

    return run


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_an_unknown_key_is_refused_with_its_nearest_neighbour(call, stage: str, prefix: str) -> None:
    code, shown = call(stage, *MINIMUM[stage], f"{prefix}sed=1")
    assert code == 2
    assert "unknown key 'sed'. Did you mean 'seed'?" in shown


@pytest.mark.parametrize("stage", STAGES)
def test_generated_bad_configurations_end_with_a_message(call, stage: str, tmp_path: Path, monkeypatch) -> None:
    """Everything but the one mistake is right, files included, so that the mistake alone is what stops the stage."""
    monkeypatch.chdir(tmp_path)
    good = good_commands(tmp_path)[stage]
    rng = random.Random(f"bad {stage}")
    for _ in range(BAD_COMMANDS_PER_STAGE):
        arguments = [*good, *bad_arguments(stage, rng, tmp_path)]
        code, shown = call(stage, *arguments)
        assert code == 2, f"{arguments}: exit code {code}\n{shown}"
        assert "error: " in shown, f"{arguments}\n{shown}"
        assert "Traceback" not in shown, f"{arguments}\n{shown}"
        assert not (tmp_path / "out").exists(), f"{arguments} left files behind"
    assert (tmp_path / "taken" / "mine.txt").read_text() == "somebody's work"
    assert len(list((tmp_path / "taken").iterdir())) == 1


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
