"""What `pip install .` brings: a wheel is built, laid out in a folder of its own, and run from a folder that is neither
that one nor the clone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from decode import __version__
from decode.common.errors import ConfigError
from decode.common.extras import require_installed
from decode.common.sweep_table import Row, comparison
from distill.corpora.config import DataConfig
from distill.corpora.configured import load_corpus
from eval.stage import run as run_eval
from tests.eval.samples import config as eval_config
from tests.train.toy import tiny_config
from train.config import EngineConfig, TrainConfig
from train.drafts.lm_blueprint import lm_blueprint
from train.engine import check_launcher
from train.trackers import check_tracker

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("decode", "distill", "train", "eval")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OF_EXTRAS = {
    "datasets",
    "deepspeed",
    "matplotlib",
    "pandas",
    "peft",
    "pyarrow",
    "pydivsufsort",
    "pynvml",
    "wandb",
    "xgrammar",
}
"""Packages that the stages run without, as long as no setting asks for them."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the files that git knows, since an old build/ in the clone would add what it holds."""
    folder = tmp_path_factory.mktemp("build")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *PACKAGES, "conf", "pyproject.toml", "README.md", "LICENSE"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(lambda name: (ROOT / name).exists(), listed.stdout.splitlines()):
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "source" / name)
    (folder / "source" / "decode" / "__pycache__").mkdir()
    pip("wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", str(folder), str(folder / "source"))
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel is installed into."""
    folder = tmp_path_factory.mktemp("site")
    pip("install", "--no-deps", "--no-index", "--no-compile", "--target", str(folder), str(wheel))
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another one that holds what the tests' environment does, without ourselves and what only extras bring."""
    folder = tmp_path_factory.mktemp("bare")
    for site in (Path(entry) for entry in sys.path if entry.endswith("site-packages")):
        for entry in site.iterdir():
            name = entry.name.split("-")[0].split(".")[0]
            if name not in OF_EXTRAS | {*PACKAGES, "conf", "draftsmith"} and not name.startswith("__editable__"):
                (folder / entry.name).symlink_to(entry)
    return folder


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def python(cwd: Path, *arguments: str, paths: list[Path]) -> subprocess.CompletedProcess[str]:
    """Python in `cwd`, without the environment's own packages where `paths` replace them (-S)."""
    site = ["-S"] if len(paths) > 1 else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, *site, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{arguments}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


def test_a_wheel_holds_code_values_templates_and_types_and_nothing_else(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {f"{package}/py.typed" for package in PACKAGES}
    wanted |= {str(path.relative_to(ROOT)) for path in (ROOT / "conf").rglob("*.yaml")}
    kinds = ("*.py", "*.yaml")
    wanted |= {str(path.relative_to(ROOT)) for one in PACKAGES for kind in kinds for path in (ROOT / one).rglob(kind)}
    wanted |= {str(path.relative_to(ROOT)) for path in (ROOT / "eval" / "render" / "templates").iterdir()}
    assert held == wanted


TEXT = ["data=python_stdlib", "data.max_documents=24", "data.heldout_share=0.3", "data.validation_share=0.3"]
FITTING = ["sequence_length=64", "batch_size=2", "steps=2", "validation_rows=2", "validate_every=2"]
MODEL = ["draft.layers=1", "draft.width=32", "draft.heads=2", "draft.max_positions=128"]
PAIR = ["target.path=runs/target/model", "target.device=cpu"]


@pytest.mark.slow
def test_every_stage_runs_from_a_wheel_anywhere_with_what_it_needs_and_no_more(
    installed: Path, bare: Path, tmp_path: Path
) -> None:
    def run(stage: str, *arguments: str) -> None:
        python(tmp_path, "-m", stage, *arguments, paths=[installed, bare])

    alone = ["objective=cross_entropy", "tokenizer.train_entries=300"]
    run("train", *TEXT, *FITTING, *MODEL, *alone, "output_dir=runs/target")
    kept = ["prompts.tokens=8", "prompts.count=16", "prompts.validation_count=8", "sampling.max_new_tokens=16"]
    run("distill", *PAIR, *TEXT, *kept, "output_dir=runs/records")
    run("train", *PAIR, "records=runs/records", *FITTING, *MODEL, "output_dir=runs/draft")
    draft = ["draft.path=runs/draft/model", "prompt='def '", "decode.max_new_tokens=8"]
    run("decode", *PAIR, *draft, "output_dir=runs/text")
    report = [*PAIR, "+drafts.one=runs/draft/model", *TEXT, "prompts.tokens=8", "output_dir=runs/report"]
    small = ["temperatures=[1.0]", "timing.sweep=[]", "curve_temperatures=[]", "timing.prompts=2", "timing.rounds=1"]
    small += ["timing.screening_prompts=1", "timing.screening_tokens=4"]
    small += ["lossless.prompts=2", "lossless.tokens=8", "lossless.other_prompts=1", "lossless.other_tokens=4"]
    small += ["decode.max_new_tokens=8", "timing.cost_repeats=1", "peers.num_assistant_tokens=[]"]
    python(tmp_path, "-m", "eval", *report, *small, paths=[installed])
    assert "tokens per target pass" in (tmp_path / "runs" / "report" / "index.html").read_text()
    stages = {"target": "train", "records": "distill", "draft": "train", "text": "decode", "report": "eval"}
    for name, stage in stages.items():
        started = json.loads((tmp_path / "runs" / name / "run.json").read_text())
        assert started["argv"][0] == str(installed / stage / "__main__.py")
        assert started["packages"]["draftsmith"] == PROJECT["version"]
        assert started["git"] == {"revision": None, "dirty": None}
        figures = comparison(
            [Row({}, tmp_path / "runs" / name, "finished")], import_module(f"{stage}.__main__").FIGURES
        )
        assert name == "target" or " - " not in figures, figures  # every stage writes what a sweep compares it by


@pytest.mark.slow
def test_a_wheel_helps_plans_and_names_its_version(installed: Path, bare: Path, tmp_path: Path) -> None:
    for stage in PACKAGES:
        assert f"python -m {stage} " in python(tmp_path, "-m", stage, "--help", paths=[installed, bare]).stdout
    script = installed / "bin" / "draftsmith-train"
    assert python(tmp_path, str(script), "--version", paths=[installed]).stdout == f"draftsmith {PROJECT['version']}\n"
    arguments = [*TEXT, *FITTING, *MODEL, "objective=cross_entropy", "tokenizer.train_entries=300", "output_dir=out"]
    planned = python(tmp_path, str(script), *arguments, "plan=true", paths=[installed]).stderr
    assert "trained: " in planned
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_importing_the_decoder_loads_torch_transformers_and_small_libraries(tmp_path: Path) -> None:
    """Of the others nothing but what transformers loads by itself where it finds it."""
    code = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationMixin, PreTrainedModel
before = set(sys.modules)
from decode import generate, load_drafter, speculative
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))
"""
    loaded = set(python(tmp_path, "-c", code, paths=[ROOT]).stdout.split())
    assert "decode" in loaded
    assert not loaded & (OF_EXTRAS | {"hydra", "omegaconf", "scipy", "sklearn"})


def test_the_version_stands_in_one_place() -> None:
    texts = [path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert not [text for text in texts if f'"{PROJECT["version"]}"' in text]
    for package in PACKAGES:
        assert __import__(package).__version__ == __version__
    assert f"## {PROJECT['version']}" in (ROOT / "docs" / "changelog.md").read_text()


def test_a_folder_of_a_packages_name_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B leaves `wandb/` where it ran, which Python imports as a namespace of nothing."""
    (tmp_path / "nopackage").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="tracker=x needs the package nopackage, which is not installed here. Do y"):
        require_installed("nopackage", "tracker=x", "Do y")
    require_installed("json", "x", "y")


def training(**changes: dict) -> TrainConfig:
    return tiny_config(Path("out"), Path("target"), records="records", **changes)


@pytest.mark.parametrize(
    ("ask", "said", "name"),
    [
        (lambda: load_corpus(DataConfig(name="hub", path="a/b")), "data=hub needs the package datasets", "train"),
        (lambda: load_corpus(DataConfig(name="dataset", path=".")), "data=dataset needs the package datasets", "train"),
        (lambda: load_corpus(DataConfig(name="parquet", path=".")), "data=parquet needs the package pyarrow", "train"),
        (
            lambda: lm_blueprint(training(draft={"init_from": "draft", "lora": {"rank": 8}}), None, None),
            "draft.lora.rank=8 needs the package peft",
            "train",
        ),
        (lambda: check_tracker(training(tracker={"name": "wandb"})), "tracker=wandb needs the package wandb", "train"),
        (lambda: check_launcher(EngineConfig(name="deepspeed_zero2")), "needs the package deepspeed", "deepspeed"),
        (lambda: run_eval(eval_config()), "a report needs the package matplotlib", "eval"),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_command_that_brings_it(
    ask: Callable[[], object], said: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode.common.extras.find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"{said}.*pip install 'draftsmith\[{name}\]'"):
        ask()
    assert any(said.endswith(package.split(">")[0]) for package in PROJECT["optional-dependencies"][name])
