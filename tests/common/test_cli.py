"""The command line of a toy stage: routes of keys, exit codes, sweeps, and readers who leave early."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from decode.common import compose
from decode.common.command_line import stage_main
from decode.common.sweep_table import Figures
from tests.commands import MINIMUM, STAGES, main_of
from tests.tiny import save_tiny_target

_FILES = {
    "conf/toystage.yaml": """
        defaults:
          - experiment: null
          - optim: sgd
          - _self_
        output_dir: runs/toy
        resume: never
        plan: false
        seed: 0
        outcome: done
    """,
    "conf/optim/sgd.yaml": "name: sgd\n",
    "conf/optim/adam.yaml": "name: adam\nlr: 0.01\n",
    "conf/experiment/long.yaml": "# @package _global_\nsteps: 1000\n",
    "toystage/__init__.py": "",
    "toystage/config.py": """
        from dataclasses import dataclass, field
        from typing import Literal
        from decode.common.typed_config import require

        @dataclass
        class Optim:
            name: Literal["sgd", "adam"] = "sgd"
            lr: float = 0.1

            def __post_init__(self):
                require(self.lr > 0, f"lr = {self.lr} must be positive.")

        @dataclass
        class Config:
            output_dir: str
            resume: str = "never"
            plan: bool = False
            seed: int = 0
            steps: int = 10
            outcome: Literal["done", "input_error", "run_error", "broken_pipe", "interrupted"] = "done"
            optim: Optim = field(default_factory=Optim)
            extra: Optim | None = None
    """,
    "toystage/stage.py": """
        import signal
        from pathlib import Path
        from decode.common.errors import InputError, RunError
        from decode.common.checked_json import write_json
        from decode.common.run_folder import open_run

        def run(config):
            if config.outcome == "input_error":
                raise InputError("no such file")
            if config.outcome == "run_error":
                raise RunError("loss is NaN")
            if config.outcome == "broken_pipe":
                raise BrokenPipeError("the worker is gone")
            if config.outcome == "interrupted":
                raise KeyboardInterrupt
            with open_run(config.output_dir, "toystage", config, config.resume) as folder:
                if Path("on_the_way").exists():
                    if Path("on_the_way").read_text() == "sigterm":
                        signal.raise_signal(signal.SIGTERM)
                    raise {"crash": ZeroDivisionError, "disk": OSError, "ctrl-c": KeyboardInterrupt}[
                        Path("on_the_way").read_text()
                    ]("no more")
                if not folder.is_finished:
                    write_json(folder.file("seen.json"), {"steps": config.steps, "lr": config.optim.lr})
                    folder.finish({"figures": {"score": config.optim.lr}})
    """,
    "toystage/__main__.py": """
        import sys
        from pathlib import Path
        from decode.common import compose
        from decode.common.command_line import stage_main
        from decode.common.sweep_table import Figures

        compose.CONF = Path(__file__).resolve().parents[1] / "conf"
        if __name__ == "__main__":
            stage_main("toystage", "toystage.config:Config", "toystage.stage:run", Figures({}))
    """,
}


def write_toy_stage(folder: Path) -> None:
    """Write the stage's package and conf folder under `folder`."""
    for name, text in _FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"))


ROOT = Path(__file__).resolve().parents[2]
FIGURES = Figures({"score": "figures.score", "loss": "loss"}, highest="score", lowest="loss")


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the toy stage in this process; returns its exit code."""
    write_toy_stage(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(compose, "CONF", tmp_path / "conf")

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["toystage", *arguments])
        with pytest.raises(SystemExit) as ended:
            stage_main("toystage", "toystage.config:Config", "toystage.stage:run", FIGURES)
        assert isinstance(ended.value.code, int)
        return ended.value.code

    yield run
    for name in [name for name in sys.modules if name.startswith("toystage")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, None)],
)
def test_threads_spin_briefly_unless_the_user_says_otherwise(
    tmp_path: Path, given: dict[str, str], found: str | None
) -> None:
    """Set before torch is imported: OpenMP looks once."""
    write_toy_stage(tmp_path)
    (tmp_path / "toystage/stage.py").write_text(
        "import os, sys\ndef run(config):\n"
        "    assert 'torch' not in sys.modules\n    print('spins', os.environ.get('GOMP_SPINCOUNT'))\n"
    )
    kept = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [sys.executable, "-m", "toystage"]
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(command, cwd=tmp_path, env=kept | path | given, capture_output=True, text=True, check=True)
    assert f"spins {found}" in done.stdout


def seen(folder: str) -> dict:
    return json.loads(Path(folder, "seen.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {"steps": 10, "lr": 0.1}),
        (["steps=3"], {"steps": 3, "lr": 0.1}),  # a field that the YAML leaves out
        (["+steps=3"], {"steps": 3, "lr": 0.1}),
        (["optim.lr=1e-4", "extra.lr=2"], {"steps": 10, "lr": 0.0001}),
        (["optim=adam"], {"steps": 10, "lr": 0.01}),
        (["+optim=adam"], {"steps": 10, "lr": 0.01}),
        (["experiment=long"], {"steps": 1000, "lr": 0.1}),
        (["+experiment=long", "+optim=adam", "steps=4"], {"steps": 4, "lr": 0.01}),
        (["hydra.job.chdir=false", "steps=2"], {"steps": 2, "lr": 0.1}),
    ],
)
def test_values_from_every_route(stage, arguments: list[str], expected: dict) -> None:
    assert stage(*arguments) == 0
    assert seen("runs/toy") == expected
    assert sorted(path.name for path in Path("runs/toy").iterdir()) == ["manifest.json", "run.json", "seen.json"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["stepz=3"], ["unknown key 'stepz'", "'steps'"]),
        (["+stepz=3"], ["unknown key 'stepz'", "'steps'"]),
        (["++stepz=3"], ["unknown key 'stepz'"]),
        (["optim.lrr=3"], ["unknown key 'optim.lrr'", "'optim.lr'"]),
        (["+optim.lrr=3"], ["unknown key 'optim.lrr'"]),
        (["extra.lrr=3"], ["unknown key 'extra.lrr'"]),
        (["+optim={lrr: 3}"], ["optim"]),
        (["optim.lr.x=3"], ["optim.lr"]),
        (["optim=adamw"], ["adamw", "sgd"]),
        (["experiment=none"], ["experiment = 'none' must be one of 'long'"]),
        (["tracker=wandb"], ["unknown key 'tracker'"]),
        (["+tracker=wandb"], ["unknown key 'tracker'"]),
        (["~output_dir"], ["missing output_dir"]),
        (["output_dir=???"], ["output_dir"]),
        (["steps=1,2"], ["steps"]),
        (["steps=${nowhere}"], ["nowhere"]),
        (["steps=["], ["steps=["]),
        (["extra=adam"], ["extra=adam: extra has keys of its own", "extra.lr"]),
        (["optim.lr=-1"], ["optim: lr = -1.0 must be positive"]),
        (["nonsense"], ["nonsense"]),
        (["--config-name", "absent"], ["absent"]),
        (["--run", "--cfg", "job"], ["Only one of"]),
        (["outcome=input_error"], ["no such file"]),
        (["-m"], ["without a swept value"]),
        (["-m", "steps=interval(1,2)"], ["continuous"]),
        (["-m", "stepz=1,2"], ["unknown key 'stepz'"]),
        (["-m", "optim.lr=1,-1"], ["must be positive"]),
        (["-m", "steps=glob(*)"], ["glob"]),
        (["-m", "steps=3,3"], ["a combination twice", "steps-3"]),
    ],
)
def test_a_bad_request_is_a_message_and_exit_code_2(stage, capsys, arguments: list[str], said: list[str]) -> None:
    assert stage(*arguments) == 2
    shown = capsys.readouterr().err
    assert all(part in shown for part in said), shown
    assert "Traceback" not in shown
    assert shown.startswith("draftsmith toystage: error: ")
    assert not Path("runs").exists()


def test_an_unknown_key_in_a_yaml_fails_too(stage, capsys) -> None:
    Path("conf/experiment/long.yaml").write_text("# @package _global_\nstepz: 1\n")
    assert stage("experiment=long") == 2
    assert "unknown key 'stepz'" in capsys.readouterr().err


def test_malformed_yaml_is_a_message(stage, capsys) -> None:
    Path("conf/experiment/long.yaml").write_text("a: [1\n")
    assert stage("experiment=long") == 2
    assert "long.yaml" in capsys.readouterr().err


def test_an_install_without_conf_says_so(stage, capsys) -> None:
    Path("conf/toystage.yaml").unlink()
    assert stage() == 2
    assert "Install draftsmith again: pip install ." in capsys.readouterr().err


def test_failures_on_the_way_have_their_own_codes(stage, capsys) -> None:
    assert stage("outcome=run_error") == 1
    assert "failed: loss is NaN" in capsys.readouterr().err
    assert stage("outcome=interrupted") == 130


@pytest.mark.parametrize(("how", "code"), [("ctrl-c", 130), ("sigterm", 143), ("disk", 1), ("crash", 1)])
def test_a_run_that_ended_on_its_way_says_how_to_go_on_and_so_does_the_next_start(stage, capsys, how, code) -> None:
    Path("on_the_way").write_text(how)
    hint = "What is finished is kept in runs/toy; to go on, run the same command"
    if how == "crash":  # with its traceback, of which this is the end
        with pytest.raises(ZeroDivisionError) as error:
            stage()
        assert error.value.__notes__ == [f"{hint} with resume=auto"]
    else:
        assert stage() == code
        assert f"{hint} with resume=auto\n" in capsys.readouterr().err
    assert stage() == 2
    refused = capsys.readouterr().err
    assert refused.index("resume=auto to go on with it") < refused.index("another output_dir")
    assert "and not finished" in refused
    if how == "ctrl-c":
        assert stage("resume=auto") == 130
        assert f"{hint} again\n" in capsys.readouterr().err
    Path("on_the_way").unlink()
    assert stage("resume=auto") == 0


def test_what_ends_before_it_began_promises_nothing(stage, capsys) -> None:
    assert stage("outcome=interrupted") == 130
    assert capsys.readouterr().err == "\ndraftsmith toystage: interrupted\n"


def test_an_interrupted_sweep_says_how_to_go_on(stage, capsys, monkeypatch) -> None:
    def ctrl_c(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("decode.common.sweep._execute", ctrl_c)
    assert stage("-m", "steps=1,2") == 130
    assert "interrupted. Finished jobs are kept; to go on, run the same command with resume=auto" in (
        capsys.readouterr().err
    )


def test_one_message_for_many_ranks(stage, capsys, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert stage("stepz=1") == 2
    assert capsys.readouterr().err == ""
    assert stage("outcome=input_error") == 2
    assert "on rank 1: no such file" in capsys.readouterr().err


def test_showing_the_configuration_runs_nothing(stage, capsys) -> None:
    assert stage("--cfg", "job", "steps=3") == 0
    assert "steps: 3" in capsys.readouterr().out
    assert stage("steps=3", "--cfg", "job") == 0
    assert not Path("runs").exists()


def test_the_stage_is_imported_only_for_a_good_configuration(stage) -> None:
    assert stage("stepz=1") == 2
    assert "toystage.stage" not in sys.modules


def test_an_existing_folder_needs_resume(stage, capsys) -> None:
    assert stage() == 0
    assert stage() == 2
    assert "resume=auto" in capsys.readouterr().err
    assert stage("resume=auto") == 0


@pytest.mark.slow
def test_a_sweep_runs_each_job_once_and_names_the_failed(stage, capfd) -> None:
    sweep = ["--multirun", "optim.lr=0.2,0.3", 'output_dir="runs/it\'s"']
    folder = Path("runs/it's/optim.lr-0.3")
    Path("runs/it's/optim.lr-0.2").mkdir(parents=True)
    Path("runs/it's/optim.lr-0.2/mine.txt").write_text("in the way")
    assert stage("optim=adam", *sweep) == 1
    shown = capfd.readouterr()
    assert "1 of 2 jobs failed: optim.lr-0.2" in shown.err
    first = rows_of(Path("runs/it's/sweep.md").read_text())
    assert [row[:3] + row[-1:] for row in first] == [
        ["optim.lr", "score", "loss", "status"],
        ["0.3", "0.3", "-", "finished"],
        ["0.2", "-", "-", "failed, exit code 2"],
    ]
    assert rows_of(shown.out) == first
    assert seen(str(folder))["lr"] == 0.3
    written = (folder / "manifest.json").stat().st_mtime_ns
    Path("runs/it's/optim.lr-0.2/mine.txt").unlink()
    assert stage("optim=adam", *sweep) == 0
    assert capfd.readouterr().err.count("already finished") == 1
    again = rows_of(Path("runs/it's/sweep.md").read_text())
    assert [row[:2] + row[-2:] for row in again[1:]] == [
        ["0.3", "0.3", str(folder), "skipped"],
        ["0.2", "0.2", "runs/it's/optim.lr-0.2", "finished"],
    ]
    assert (folder / "manifest.json").stat().st_mtime_ns == written
    assert stage("optim=adam", *sweep, "steps=11") == 2
    assert "steps: 10 there, 11 now" in capfd.readouterr().err


def rows_of(text: str) -> list[list[str]]:
    """Cells of the table in a text."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| --")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.slow
def test_a_plan_of_a_sweep_leaves_no_table(stage, capfd) -> None:
    assert stage("-m", "steps=1,2", "plan=true", "outcome=done") == 0
    assert "status" not in capfd.readouterr().out
    assert not Path("runs/toy/sweep.md").exists()


def test_a_sweep_takes_no_launcher(stage, capsys, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert stage("-m", "steps=1,2") == 2
    assert "no launcher" in capsys.readouterr().err


def test_a_bad_configuration_costs_no_heavy_import(tmp_path: Path) -> None:
    write_toy_stage(tmp_path)
    code = (
        "import sys, runpy; sys.argv = ['toystage', 'stepz=1']\n"
        "try: runpy.run_module('toystage', run_name='__main__')\n"
        "except SystemExit as e: sys.exit(e.code if not {'torch', 'transformers'} & set(sys.modules) else 99)"
    )
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr


def pipe_without_reader() -> int:
    """The end to write to of a pipe whose other end is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def end_of(monkeypatch: pytest.MonkeyPatch, stage: str, *arguments: str) -> object:
    """Exit code of a stage in this process, whose standard output nobody reads."""
    with os.fdopen(pipe_without_reader(), "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "argv", [f"draftsmith-{stage}", *arguments])
        with pytest.raises(SystemExit) as ended:
            main_of(stage)()
    return ended.value.code


@pytest.mark.parametrize("shown", ["--help", "--cfg job"])
@pytest.mark.parametrize("stage", ["decode", *(pytest.param(name, marks=pytest.mark.slow) for name in STAGES)])
def test_what_hydra_shows_may_be_cut_short(monkeypatch, capfd, stage: str, shown: str) -> None:
    assert end_of(monkeypatch, stage, *MINIMUM[stage], *shown.split()) == 141
    assert capfd.readouterr().err == ""


def test_streamed_text_may_be_cut_short(tmp_path: Path, monkeypatch, capfd) -> None:
    target = save_tiny_target(tmp_path / "target")
    out = tmp_path / "out"
    arguments = [f"target.path={target}", "prompt=def main", "decode.max_new_tokens=8", f"output_dir={out}"]
    assert end_of(monkeypatch, "decode", *arguments) == 141
    assert "roken" not in capfd.readouterr().err
    assert [path.name for path in out.iterdir()] == ["run.json"]  # given back, and not finished


def run_toy(folder: Path, argument: str, stdout: int, stderr: int) -> subprocess.CompletedProcess[bytes]:
    write_toy_stage(folder)
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "toystage", argument]
    return subprocess.run(command, cwd=folder, env=environment, check=False, stdout=stdout, stderr=stderr)


def test_the_interpreter_has_nothing_to_add_at_its_end(tmp_path: Path) -> None:
    """What is left in a buffer is written when Python ends, after all code of ours."""
    done = run_toy(tmp_path, "--help", stdout=pipe_without_reader(), stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (141, b"")


def test_messages_that_nobody_reads_end_a_stage_too(tmp_path: Path) -> None:
    assert run_toy(tmp_path, "stepz=1", stdout=subprocess.DEVNULL, stderr=pipe_without_reader()).returncode == 141


def test_another_broken_pipe_is_a_failure(tmp_path: Path) -> None:
    done = run_toy(tmp_path, "outcome=broken_pipe", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert b"failed: the worker is gone" in done.stderr


KEPT = """
from decode.common.environment import keep_freed_memory
keep_freed_memory()
size = 1 << 27
held = bytearray(b"x") * size
pages = int(open("/proc/self/statm").read().split()[1])
del held
print((pages - int(open("/proc/self/statm").read().split()[1])) * 4096 < size // 2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
@pytest.mark.parametrize(("asked", "keeps"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False)])
def test_a_process_on_a_cpu_keeps_what_it_frees_unless_variables_say_otherwise(
    asked: dict[str, str], keeps: bool
) -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run([sys.executable, "-c", KEPT], env=plain | asked, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(keeps and not any(Path("/dev").glob("nvidia[0-9]*")))
