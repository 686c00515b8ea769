"""The environments of vLLM, llama.cpp and the speculators library, which scripts/*_env.sh make where they can."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def vllm_python() -> str:
    """The interpreter of .venv-vllm; the test is skipped, with the reason, where there is none."""
    return _python("vllm")


def speculators_python() -> str:
    """That of .venv-speculators, likewise."""
    return _python("speculators")


def llamacpp_python() -> str:
    """That of .venv-llamacpp, likewise; the converter lies in llama.cpp/ beside its bin/."""
    return _python("llamacpp")


def _python(name: str) -> str:
    folder = ROOT / f".venv-{name}"
    if not (folder / ".installed").is_file():
        why = os.environ.get(f"NO_{name.upper()}")
        pytest.skip(why or f"no {folder.name}; make it with `bash scripts/{name}_env.sh`")
    return str(folder / "bin/python")
