"""Scripts: machines that lack something, a package that holds all of its files, the overlap simulation against sums
done by hand, and the picture of `python -m decode`."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from html import unescape
from importlib.util import module_from_spec, spec_from_file_location
from itertools import accumulate
from operator import mul
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml

from decode.common.errors import InputError
from decode.stage import CYAN, DIM, GREEN, LEGEND, RED, RESET
from eval.results.schema import read_results
from tests.tiny import save_tiny_target

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
    # SECONDS is bash's clock: a step of ten minutes, which a busy machine may find a few seconds longer.
    done = bash(
        clone,
        "ten_minutes() { SECONDS=$((SECONDS + 600)); }\nstep first 7 echo hello; step second 5 ten_minutes; show_times",
    )
    assert "$ echo hello\nhello\n" in done.stdout
    assert "$ ten_minutes" not in done.stdout
    rows = {row[0]: row[1:] for line in done.stdout.splitlines() if len(row := line.split()) == 3 and row[0] != "$"}
    assert {name: row[1] for name, row in rows.items()} == {
        "step": "budget",
        "first": "7",
        "second": "5",
        "total": "12",
    }
    assert 0 <= int(rows["first"][0]) < 600 <= int(rows["second"][0]) < 700
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
    with (clone_with_pip / "scripts" / "common.sh").open("a") as common:
        common.write('\nemulates_bfloat16() { [ -n "${EMULATES:-}" ]; }\n')
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


def test_changed_paths_ask_for_their_tests_and_nothing_else_does(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setenv("EMULATES", "1")
    assert run_script(repository, "--changed") == [default, slow]


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


TOY = ROOT / "docs/results/toy.json"
N = 40_000


def loaded() -> Any:
    spec = spec_from_file_location("overlap_simulation", ROOT / "scripts/overlap_simulation.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)  # where a dataclass looks up its own annotations
    spec.loader.exec_module(module)
    return module


script = loaded()
Pair, simulate = script.Pair, script.simulate
PAIR = Pair("p", target_ms=10.0, token_ms=0.5, draft_ms=2.0, acceptance=(0.9, 0.7, 0.8))


def expected_tau(pair: Any, k: int) -> float:
    return 1 + sum(accumulate(pair.chances(k), mul))


def foreseen(pair: Any, k: int) -> float:
    return float(np.prod(pair.chances(k + 1))) ** pair.batch_size


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("link_ms", [0.0, 3.0])
@pytest.mark.parametrize("draft_ms", [0.5, 2.0, 12.0])
def test_without_jitter_rounds_take_what_the_sums_say(k: int, link_ms: float, draft_ms: float) -> None:
    pair = Pair("p", 10.0, 0.5, draft_ms, (0.9, 0.7, 0.8))
    verify, chance = 10 + 0.5 * k, foreseen(pair, k)
    turns, early = (simulate(way, pair, k, link_ms, 0.0, N, 1) for way in ("in turn", "ahead"))
    assert turns.milliseconds == pytest.approx(verify + k * draft_ms + 2 * link_ms)
    as_assumed = max(verify, 2 * link_ms + (k + 1) * draft_ms)
    anew = max(verify + link_ms, link_ms + (k + 1) * draft_ms) + k * draft_ms + link_ms
    assert np.unique(early.milliseconds.round(6)) == pytest.approx(sorted({as_assumed, anew}))
    wanted = chance * as_assumed + (1 - chance) * anew
    error = abs(as_assumed - anew) * (chance * (1 - chance) / N) ** 0.5
    assert early.milliseconds.mean() == pytest.approx(wanted, abs=5 * error + 1e-9)
    for rounds in (turns, early):
        assert rounds.tokens.mean() == pytest.approx(expected_tau(pair, k), abs=5 * rounds.tokens.std() / N**0.5)


def test_a_perfect_draft_costs_nothing_beside_the_target() -> None:
    pair = Pair("p", 10.0, 0.0, 1.0, (1.0,))
    rounds = simulate("ahead", pair, 4, 0.0, 0.0, 100)
    assert rounds.foreseen.all()
    assert (rounds.tokens == 5).all()
    assert rounds.milliseconds == pytest.approx(10.0)


def test_a_useless_draft_ahead_costs_what_is_in_the_way_of_the_next() -> None:
    slow = Pair("p", 10.0, 0.0, 4.0, (0.0,))
    turns, early = (simulate(way, slow, 4, 1.0, 0.0, 100) for way in ("in turn", "ahead"))
    assert not early.foreseen.any()
    assert early.milliseconds - turns.milliseconds == pytest.approx((4 + 1) * 4.0 - 10.0)


def test_in_a_batch_all_rows_have_to_be_as_assumed() -> None:
    pair = Pair("p", 10.0, 0.0, 1.0, (0.9,), batch_size=4)
    rounds = simulate("ahead", pair, 2, 0.0, 0.0, N, 3)
    assert rounds.foreseen.mean() == pytest.approx(0.9 ** (3 * 4), abs=1.2e-2)


def test_jitter_leaves_the_mean_of_rounds_in_turn_alone() -> None:
    still, moving = (simulate("in turn", PAIR, 3, 1.0, jitter, N).milliseconds for jitter in (0.0, 0.5))
    assert moving.mean() == pytest.approx(still.mean(), rel=1e-2)
    assert moving.std() > 1


def test_both_ways_accept_the_same_tokens() -> None:
    first, second = (simulate(way, PAIR, 3, 0.0, rounds=1000).tokens for way in ("in turn", "ahead"))
    assert (first == second).all()


def test_pairs_of_a_report_are_its_draft_lms_under_the_coupled_rule() -> None:
    found = {pair.name: pair for pair in script.measured(TOY)}
    assert set(found) == {f"{draft}, T={t}, batch 1" for draft in ("distilled", "undistilled") for t in (0, 1)}
    rows = [row for row in read_results(TOY)["rows"] if row["draft"] == "distilled" and row["temperature"] == 1]
    pair = found["distilled, T=1, batch 1"]
    assert pair.draft_ms == pytest.approx(1e3 * rows[0]["component_times"]["t_draft_s"])
    assert pair.chances(6) == [*rows[0]["acceptance_by_position"], *[rows[0]["acceptance_by_position"][-1]] * 2]


def test_a_report_without_such_rows_is_refused(tmp_path: Path) -> None:
    results = read_results(TOY)
    results["rows"] = [row for row in results["rows"] if row["drafter"] != "lm"]
    (tmp_path / "results.json").write_text(json.dumps(results))
    with pytest.raises(InputError, match="no row of a draft LM"):
        script.measured(tmp_path / "results.json")


def test_the_command_prints_the_published_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of docs/how-to/overlap.md."""
    asked = ["--target-ms", "10", "--draft-ms", "3.3", "--alpha", "0.8", "--links-ms", "0", "10"]
    monkeypatch.setattr(sys, "argv", ["overlap_simulation.py", *asked])
    script.main()
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| given | 0 | 3 | 1.48 | 2 | 1.77 | 51% | 1.20 |",
        "| given | 10 | 6 | 0.80 | 3 | 0.75 | 41% | 0.95 |",
    ]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([], "give either"),
        (["--target-ms", "1", "--draft-ms", "1"], "give either"),
        (["--target-ms", "0", "--draft-ms", "1", "--alpha", "0.5"], "0 is not from"),
        (["--target-ms", "1", "--draft-ms", "1", "--alpha", "1.5"], "1.5 is not from 0 to 1"),
        (["--target-ms", "1", "--draft-ms", "1", "--alpha", "nan"], "nan is not from"),
        (["--report", "nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_input_ends_with_2(
    asked: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["overlap_simulation.py", *asked])
    with pytest.raises(SystemExit) as error:
        script.main()
    assert error.value.code == 2
    assert message in capsys.readouterr().err


LAST_LINE = "3 tokens in 1 target passes: 3.00 tokens per pass, 99 tokens/s"
NAMES = "  ".join(f"{paint}{name}{RESET}" for name, paint in LEGEND)
TOKENS = f"{GREEN} if a < b &{RESET}{GREEN} c:{RESET}{RED} pass{RESET}{CYAN}\n    x{RESET}"
OUTPUT = f"{NAMES}\n\n{DIM}def f(a):{RESET}{TOKENS}\n\n{LAST_LINE}\n"


@pytest.fixture
def recorder() -> ModuleType:
    spec = spec_from_file_location("record_decode", ROOT / "scripts" / "record_decode.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def painted(svg: str) -> list[tuple[str, str]]:
    """(colour, text) of every piece of the picture, in order."""
    colours = dict(re.findall(r"\.(decode-r\d+) \{ fill: (#\w+)", svg))
    pieces = re.findall(r'<text class="(decode-r\d+)"[^>]*>([^<]*)</text>', svg)
    return [(colours[name], unescape(text).replace("\xa0", " ")) for name, text in pieces if text.strip()]


def shown(svg: str) -> str:
    return "".join(text for _, text in painted(svg))


def test_tokens_keep_the_colours_of_the_legend(recorder: ModuleType) -> None:
    found = painted(recorder.picture(OUTPUT, "python -m decode"))
    green, red, cyan = (next(colour for colour, text in found if text == name) for name, _ in LEGEND)
    dim, plain = (next(colour for colour, text in found if part in text) for part in ("def f", LAST_LINE))
    assert len({green, red, cyan, dim, plain}) == 5
    assert "".join(text for colour, text in found if colour == green) == "accepted if a < b & c:"
    assert [text for colour, text in found if colour == red] == ["correction", " pass"]
    assert [text.strip() for colour, text in found if colour == cyan] == ["bonus", "x"]


def test_the_command_comes_first_and_the_figures_last(recorder: ModuleType) -> None:
    svg = recorder.picture(OUTPUT, "python -m decode prompt='a b'")
    assert shown(svg).startswith("$ python -m decode prompt='a b'")
    assert shown(svg).endswith(LAST_LINE)


def test_the_picture_fetches_nothing_and_is_the_same_every_time(recorder: ModuleType) -> None:
    svg = recorder.picture(OUTPUT, "python -m decode")
    assert svg == recorder.picture(OUTPUT, "python -m decode")
    assert "url(" not in svg.replace("url(#", "")
    assert "@font-face" not in svg


@pytest.mark.parametrize("name", ["decode", "edit"])
def test_the_committed_pictures_are_of_their_commands(recorder: ModuleType, name: str) -> None:
    svg = (recorder.DOCS / f"{name}.svg").read_text(encoding="utf-8")
    text = shown(svg)
    assert "".join(shlex.join(["python", "-m", "decode", *recorder.RECORDINGS[name]]).split()) in "".join(text.split())
    assert re.search(r"\d+ tokens in \d+ target passes: [\d.]+ tokens per pass, \d+ tokens/s$", text)
    assert {name for name, _ in LEGEND} <= {text for _, text in painted(svg)}


@pytest.mark.slow
def test_a_command_is_run_and_recorded_and_a_failing_one_leaves_the_picture(
    recorder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "ROOT", tmp_path)
    monkeypatch.setattr(recorder, "DOCS", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    target = save_tiny_target(tmp_path / "target")
    arguments = [f"target.path={target}", f"draft.path={target}", "prompt=def", "decode.max_new_tokens=8"]
    assert recorder.main("decode", arguments) == 0
    before = (tmp_path / "decode.svg").read_text(encoding="utf-8")
    assert "8 tokens in" in shown(before)
    assert recorder.main("decode", [*arguments, "decode.top_p=2"]) == 2
    assert (tmp_path / "decode.svg").read_text(encoding="utf-8") == before
