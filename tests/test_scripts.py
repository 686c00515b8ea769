"""Scripts on machines that lack something, and a package that holds all of its files."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("decode", "distill", "train", "eval")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone without an environment, as far as the scripts' common part is concerned."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "common.sh", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def bash(folder: Path, commands: str, **variables: str) -> subprocess.CompletedProcess[str]:
    script = f"set -euo pipefail; source {folder}/scripts/common.sh; {commands}"
    return subprocess.run(
        ["bash", "-c", script], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )


def python_that_lacks(module: str, folder: Path) -> str:
    fake = folder / "python-without"
    fake.write_text(f'#!/bin/sh\ncase "$2" in *"{module}"*) exit 1;; esac\nexec {sys.executable} "$@"\n')
    fake.chmod(0o755)
    return str(fake)


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "scripts").glob("*.sh")))
def test_scripts_are_valid_bash(script: str) -> None:
    path = ROOT / "scripts" / script
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert "set -euo pipefail" in path.read_text() or script == "common.sh"


def test_no_python_is_said(clone: Path) -> None:
    done = bash(clone, "ensure_environment", PYTHON=python_that_lacks("version_info", clone))
    assert done.returncode == 1
    assert "No Python 3.11 or later found" in done.stderr
    assert not (clone / ".venv").exists()


def test_a_missing_venv_module_is_said_with_the_remedy(clone: Path) -> None:
    done = bash(clone, "ensure_environment", PYTHON=python_that_lacks("import venv", clone))
    assert done.returncode == 1
    assert "apt-get install python3-venv" in done.stderr
    assert not (clone / ".venv").exists()


@pytest.fixture
def clone_with_pip(clone: Path) -> Path:
    """A clone whose environment shows what it is asked to install, and installs nothing."""
    python = clone / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\n[ "$1" = -c ] || echo "python $*"\n')
    python.chmod(0o755)
    (python.parent / "activate").write_text("echo activated\n")
    return clone


def test_an_environment_that_is_up_to_date_is_only_activated(clone_with_pip: Path) -> None:
    shutil.copy(clone_with_pip / "pyproject.toml", clone_with_pip / ".venv" / ".installed-from")
    assert bash(clone_with_pip, "ensure_environment").stdout == "activated\n"


def test_torch_comes_from_the_index_that_the_user_names(clone_with_pip: Path) -> None:
    chosen = {"TORCH_INDEX_URL": "https://example.org/cpu", "TORCH_VERSION": "2.12.0"}
    lines = bash(clone_with_pip, "ensure_environment", **chosen).stdout
    assert "--index-url https://example.org/cpu torch==2.12.0" in lines
    assert (clone_with_pip / ".venv" / ".installed-from").read_text() == (clone_with_pip / "pyproject.toml").read_text()


def test_only_the_tests_install_deepspeed_and_each_environment_is_installed_once(clone_with_pip: Path) -> None:
    lines = bash(clone_with_pip, "ensure_environment").stdout
    assert "--editable .[train,eval,gguf]\n" in lines
    assert "deepspeed" not in lines
    lines = bash(clone_with_pip, "ensure_test_environment").stdout
    assert "--editable .[train,eval,deepspeed,gguf,grammar,quantization,dev]" in lines
    assert "torch==" not in lines
    assert bash(clone_with_pip, "ensure_test_environment").stdout == "activated\n"


def test_steps_are_shown_and_timed_and_a_failure_ends_the_script(clone: Path) -> None:
    done = bash(clone, "step first 7 echo hello; step second 5 true; show_times")
    assert "$ echo hello\nhello\n" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["first", "0", "7"] in rows
    assert rows[-1][0] == "total"
    assert rows[-1][2] == "12"
    failed = bash(clone, "step first 7 false; echo unreachable")
    assert failed.returncode == 1
    assert "unreachable" not in failed.stdout


def test_every_folder_with_code_is_a_package() -> None:
    """A folder without __init__.py would be left out of what is installed, silently."""
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").exists()]


@pytest.fixture
def repository(clone_with_pip: Path) -> Path:
    """A repository with the test script, whose tools only tell what they are asked; .ci/all_passed names its commit."""
    shutil.copy(ROOT / "scripts" / "test.sh", clone_with_pip / "scripts")
    for name in ("vllm", "speculators", "llamacpp"):
        (clone_with_pip / "scripts" / f"{name}_env.sh").write_text("")
    for name in ("ruff", "pyright", "mkdocs", "pytest"):
        tool = clone_with_pip / ".venv" / "bin" / name
        tool.write_text("#!/bin/sh\n")
        tool.chmod(0o755)
    (clone_with_pip / ".gitignore").write_text(".venv\n")
    (clone_with_pip / ".ci").mkdir()
    git(clone_with_pip, "init", "--quiet")
    commit(clone_with_pip, "README.md")
    (clone_with_pip / ".ci" / "all_passed").write_text(git(clone_with_pip, "rev-parse", "HEAD"))
    commit(clone_with_pip, "docs/index.md")
    return clone_with_pip


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    return subprocess.run(["git", "-C", folder, *who, *arguments], capture_output=True, text=True, check=True).stdout


def commit(folder: Path, changed: str) -> None:
    file = folder / changed
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("changed")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", changed)


def run_script(repository: Path, *arguments: str) -> list[str]:
    """The commands of pytest that the test script ran, without the tier's own marks."""
    where = {**os.environ, "PATH": f"{repository / '.venv' / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", str(repository / "scripts" / "test.sh"), *arguments]
    done = subprocess.run(command, env=where, capture_output=True, text=True, check=True)
    return [line.removeprefix("$ pytest ") for line in done.stdout.splitlines() if line.startswith("$ pytest")]


def test_changed_paths_ask_for_their_tests_and_nothing_else_does(repository: Path) -> None:
    assert run_script(repository, "--changed") == run_script(repository) == ["-q"]
    commit(repository, "distill/runtimes/x.py")
    default, slow, engines = run_script(repository, "--changed")
    assert (default, slow.rsplit(" ", 1)[1]) == ("-q", "tests/distill")
    assert {part for part in engines.split() if part.startswith("tests/")} == {
        "tests/engines/test_openai_servers.py",
        "tests/engines/test_records.py",
        "tests/engines/test_vllm_server.py",
    }
    assert run_script(repository) == ["-q"]


def test_every_tier_runs_where_it_is_asked_for_or_nothing_is_known(repository: Path) -> None:
    every = run_script(repository, "--all")
    assert [command.split(" ")[-1] for command in every] == ["-q", "tests", "tests"]
    assert (repository / ".ci" / "all_passed").read_text() == git(repository, "rev-parse", "HEAD")
    (repository / ".ci" / "all_passed").write_text("0" * 40)
    assert run_script(repository, "--changed") == every


def test_all_paths_that_changes_ask_for_are_there() -> None:
    table = (ROOT / "scripts" / "test.sh").read_text().split("ASKED='")[1].split("'")[0]
    patterns = [path for line in table.splitlines() if line for path in line.split()[2:]]
    assert len(patterns) > 8
    assert not [pattern for pattern in patterns if not list(ROOT.glob(pattern))]


def test_ci_runs_the_test_script() -> None:
    assert 'scripts/test.sh" --changed' in (ROOT / ".ci" / "run").read_text()
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"].values()
    (step,) = [step for step in job["steps"] if "run" in step]
    assert step["run"] == "bash .ci/run"
    assert {"TORCH_VERSION", "TORCH_INDEX_URL", "PYTHON"} == step["env"].keys()  # what scripts/common.sh heeds


def gpu_benchmark(folder: Path, *stages: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The script at toy size, its results in `folder`."""
    places = {"RUNS": str(folder / "runs"), "RESULTS": str(folder / "results"), "CUDA_VISIBLE_DEVICES": ""}
    environment = {**os.environ, **places, "TOY": "1", "PYTHON": sys.executable, **variables}
    command = ["bash", str(ROOT / "scripts" / "gpu_benchmark.sh"), *stages]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_an_unknown_stage_of_the_gpu_benchmark_is_named_with_the_known_ones(tmp_path: Path) -> None:
    done = gpu_benchmark(tmp_path, "tarGet")
    assert done.returncode == 1
    assert "There is no stage tarGet; choose from: bandwidth target records draft" in done.stderr


def test_missing_packages_of_the_gpu_machine_are_named(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho hydra\n")
    fake.chmod(0o755)
    done = gpu_benchmark(tmp_path, PYTHON=str(fake))
    assert done.returncode == 1
    assert "lacks: hydra" in done.stderr


@pytest.mark.slow
def test_a_call_of_the_gpu_benchmark_ends_in_time_and_says_to_go_on(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\n[ "$1" = -c ] || sleep 60\n')
    fake.chmod(0o755)
    done = gpu_benchmark(tmp_path, "target", PYTHON=str(fake), LIMIT_S="2")
    assert done.returncode == 124
    assert "Run the same command again" in done.stderr
    assert "$ python -m train experiment=gpu_target" in done.stdout


def test_a_failing_stage_ends_the_gpu_benchmark_with_its_code(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\n[ "$1" = -c ] || exit 2\n')
    fake.chmod(0o755)
    done = gpu_benchmark(tmp_path, "records", "draft", PYTHON=str(fake))
    assert done.returncode == 2
    assert "-m train" not in done.stdout


@pytest.mark.slow
def test_bandwidth_is_measured_and_rendered_on_any_device(tmp_path: Path) -> None:
    done = gpu_benchmark(tmp_path, "bandwidth")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "runs" / "bandwidth" / "bandwidth.json").read_text())
    weights = 2 * (found["num_parameters"] - 512 * 64 + 64)
    cache = 2 * 2 * 2 * 16 * 2 * (found["prompt_tokens"] + found["new_tokens"] / 2)
    assert found["bytes_per_token"] == weights + cache  # two layers of two heads of 16, keys and values, two bytes each
    for row in found["rows"]:
        assert row["share"] == pytest.approx(row["tokens_per_s"] / row["bound"])
    assert "share of the bound" in (tmp_path / "runs" / "bandwidth" / "bandwidth.md").read_text()


@pytest.mark.slow
def test_the_gpu_benchmark_runs_through_at_toy_size_and_repeats_nothing(tmp_path: Path) -> None:
    done = gpu_benchmark(tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    names = ("bandwidth", "decoders", "profile", "certificate")
    assert {path.name for path in (tmp_path / "results").iterdir()} == {
        f"{name}_cpu.{kind}" for name in names for kind in ("json", "md")
    }
    again = gpu_benchmark(tmp_path, "decoders")
    assert again.returncode == 0, again.stderr
    assert "already finished" in again.stderr
