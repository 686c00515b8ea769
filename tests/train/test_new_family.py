"""A draft family is added as CONTRIBUTING.md says: one file, its two lines in tables, a YAML. The tests take it from
there: what holds of every head holds of it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("decode", "distill", "train", "eval", "conf", "tests", "scripts")
FAMILY = '''
"""Medusa's heads on the hidden state before the last layer."""
from dataclasses import dataclass

from decode.drafters.medusa import MedusaConfig, MedusaDraft


@dataclass(frozen=True, kw_only=True)
class EarlyConfig(MedusaConfig):
    family: str = "early_medusa"

    @classmethod
    def default_taps(cls, num_layers):
        return (num_layers - 1,)


class EarlyDraft(MedusaDraft):
    pass
'''
LINES = {
    "decode/drafters/saved_head.py": [
        (
            "from decode.drafters.dspark ",
            "from decode.drafters.early_medusa import EarlyConfig, EarlyDraft\n",
        ),
        ('    "dspark": (DSparkConfig', '    "early_medusa": (EarlyConfig, EarlyDraft),\n'),
    ],
    "train/drafts/draft_config.py": [('"mtp", ', '"early_medusa", ')],
}
"""Where a line, or a name in one, comes in before another."""
HELD = (
    "tests/train/test_heads.py::test_a_head_learns_and_drafts",
    "tests/decode/test_families.py",
)


@pytest.mark.slow
def test_a_family_is_a_file_its_names_and_a_yaml(tmp_path: Path) -> None:
    for name in COPIED:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "decode/drafters/early_medusa.py").write_text(FAMILY)
    (tmp_path / "conf/draft/early_medusa.yaml").write_text("family: early_medusa\ninit_from: null\n")
    for name, lines in LINES.items():
        file = tmp_path / name
        text = file.read_text()
        for before, new in lines:
            text = text.replace(before, new + before, 1)
        file.write_text(text)
    asked = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", "early_medusa"]
    done = subprocess.run(
        [*asked, "-m", "slow or not slow", *HELD],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(done.stdout.split(" passed")[0].split()[-1]) >= 3, done.stdout
    plan = subprocess.run(
        [sys.executable, "-m", "train", "draft=early_medusa", "--cfg", "job"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "family: early_medusa" in plan.stdout, plan.stderr
