"""The environment of vLLM, which scripts/vllm_env.sh makes where it can."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def vllm_python() -> str:
    """The interpreter of .venv-vllm; the test is skipped, with the reason, where there is none."""
    python = ROOT / ".venv-vllm/bin/python"
    if not (ROOT / ".venv-vllm/.installed").is_file():
        pytest.skip(os.environ.get("NO_VLLM") or "no .venv-vllm; make it with `bash scripts/vllm_env.sh`")
    return str(python)
