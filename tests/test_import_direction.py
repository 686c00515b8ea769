"""Imports run one way (decode <- distill <- train, eval on top), and configuration loads nothing heavy."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from decode.drafters.saved_head import HEADS
from tests.commands import MODULES

ROOT = Path(__file__).resolve().parents[1]
MOST_FLOORS = {"decode": 12, "distill": 18, "train": 18, "eval": 22}
"""Of decode 18 before its drafters stopped importing what they only name."""
MAY_IMPORT = {
    "decode": {"decode"},
    "distill": {"decode", "distill"},
    "train": {"decode", "distill", "train"},
    "eval": {"decode", "distill", "train", "eval"},
}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_modules(path: Path) -> Iterator[str]:
    package = path.relative_to(ROOT).parts[0]
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield package if node.level else node.module or ""


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_the_floors_below(package: str) -> None:
    forbidden = (MAY_IMPORT.keys() | {"tests"}) - MAY_IMPORT[package]
    files = list((ROOT / package).rglob("*.py"))
    wrong = [f"{path}: {name}" for path in files for name in imported_modules(path) if name.split(".")[0] in forbidden]
    assert files
    assert not wrong


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_has_few_floors(package: str) -> None:
    """Modules on the longest chain of imports at run time; each is a hop for who reads from the top."""
    files = [path for below in MAY_IMPORT[package] for path in (ROOT / below).rglob("*.py")]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}
    above = {name: set(imported_at_once(path)) & set(modules) for name, path in modules.items()}

    @cache
    def floors(name: str) -> tuple[str, ...]:
        return max((floors(one) for one in above[name]), key=len, default=()) + (name,)

    longest = max(map(floors, modules), key=len)
    assert len(longest) <= MOST_FLOORS[package], " <- ".join(longest)


def imported_at_once(path: Path) -> Iterator[str]:
    """What importing the module imports; annotations alone (TYPE_CHECKING) and late imports do not count."""
    for node in parsed(path).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_decoder_needs_small_libraries_alone() -> None:
    """What `from decode import generate, load_drafter, speculative` imports, from module to module."""
    found, new = set(), {"decode", "decode.api", "decode.custom_generate", "decode.drafters.saved_draft"}
    while new:
        found |= new
        files = [ROOT / Path(*name.split(".")) for name in new if name.split(".")[0] == "decode"]
        files = [file for path in files for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()]
        new = {name for file in files for name in imported_at_once(file)} - found
    foreign = {name.split(".")[0] for name in found} - sys.stdlib_module_names - {"decode"}
    assert "torch" in foreign
    assert foreign <= {"torch", "transformers", "huggingface_hub", "numpy", "pydantic", "safetensors", "tqdm"}


def test_files_of_vllm_s_environment_need_nothing_of_ours() -> None:
    files = list((ROOT / "distill/engines/inside_vllm").glob("vllm_*.py"))
    assert len(files) == 5
    assert not {name for path in files for name in imported_modules(path) if name.split(".")[0] in MAY_IMPORT}


def test_what_modes_stand_on_imports_no_mode() -> None:
    folders = ("arms", "measure", "prompts", "render", "results")
    files = [path for folder in folders for path in (ROOT / "eval" / folder).rglob("*.py")]
    assert files
    assert not [(path, name) for path in files for name in imported_modules(path) if name.startswith("eval.modes")]


def test_eval_never_hides_the_builtin() -> None:
    hiding = re.compile(r"^\s*import eval\b", flags=re.MULTILINE)  # `from eval import x` binds x alone
    files = [path for folder in (*MAY_IMPORT, "tests", "scripts") for path in (ROOT / folder).rglob("*.py")]
    assert not [str(path) for path in files if hiding.search(path.read_text(encoding="utf-8"))]


def test_training_knows_no_family() -> None:
    """Outside of train/drafts, and of exports, whose layouts are each a family's, nothing imports one, and there the
    registry alone imports what a family gives."""
    decoding = {kind.__module__ for kinds in HEADS.values() for kind in kinds} | {"decode.drafters.lm"}
    training = {f"train.drafts.{path.stem}" for path in (ROOT / "train" / "drafts").glob("*_blueprint.py")}
    training |= {"train.drafts.confidence"}
    assert len(training) == 3
    for path in (ROOT / "train").rglob("*.py"):
        known = set(imported_modules(path)) & (decoding | training)
        if path.is_relative_to(ROOT / "train" / "export"):
            known -= decoding
        if path.parent.name != "drafts":
            if path.name == "live_target.py":  # reads packed rows of the target as a draft model reads its own
                known -= {"decode.drafters.lm"}
            assert not known, f"{path} imports {known}"
        elif path.name == "registry.py":
            assert known == training - {"train.drafts.confidence"}
        else:
            assert not {name for name in known if name.endswith("_blueprint")}, path


EXTRAS = {
    "decode": ["adapters", "gguf", "grammar", "quantization"],
    "distill": ["train"],
    "train": ["train", "deepspeed"],
    "eval": ["train", "eval", "energy"],
}
"""What of pyproject.toml a package may import besides the plain dependencies; decode works with those alone as long as
no setting asks for more."""
OPTIONAL = "optional-dependencies"
ELSEWHERE = {"vllm", "vllm_options", "vllm_temperatures"}
"""Of environments of their own, and files beside the one that imports them there."""


NAMES = {"pynvml": ["nvidia-ml-py"]}
"""Packages that need not be installed, where they are imported by another name."""


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_what_is_imported_is_declared(package: str) -> None:
    """In pyproject.toml: a package that only others bring along may go with their next version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for name in EXTRAS[package] for line in project[OPTIONAL][name])]
    declared = {_normal(re.split(r"[<>=\[]", line)[0]) for line in lines}
    files = (ROOT / package).rglob("*.py")
    imported = {name.split(".")[0] for path in files for name in imported_modules(path)}
    foreign = {
        name for name in imported if name not in sys.stdlib_module_names | MAY_IMPORT.keys() and name not in ELSEWHERE
    }
    known = NAMES | dict(packages_distributions())
    missing = {name for name in foreign if not declared & {_normal(one) for one in known.get(name, [name])}}
    assert foreign
    assert not missing


def _normal(name: str) -> str:
    return name.strip().lower().replace("_", "-")


@pytest.mark.parametrize("stage", MODULES.values())
def test_configuration_imports_nothing_heavy(stage: str) -> None:
    heavy = "{'torch', 'transformers', 'accelerate', 'datasets', 'wandb', 'matplotlib'} & set(sys.modules)"
    code = f"import sys; from {stage} import config, __main__; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
