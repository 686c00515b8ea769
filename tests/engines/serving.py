"""What vLLM counts, by the worker that all tests of a session share."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from distill.engines.worker_process import Engine
from tests.engines.counters import Counters
from tests.engines.toys import NEW_TOKENS, PROMPTS

WORKER = Path(__file__).with_name("worker.py")
GREEDY, SAMPLED = {"temperature": 0.0}, {"temperature": 1.0, "seed": 7}


class RefusedError(Exception):
    """The engine did not start, or broke; what it said."""


def options(folder: Path) -> dict[str, Any]:
    """Those of the launch command on the card of an exported folder, by their names in Python."""
    card = (folder / "README.md").read_text(encoding="utf-8")
    (command,) = [line for line in card.splitlines() if line.startswith("vllm serve ")]
    words = shlex.split(command.replace("THIS_FOLDER", str(folder)))[3:]
    named = zip(words[::2], words[1::2], strict=True)
    return {
        name.removeprefix("--").replace("-", "_"): json.loads(value) if value.startswith("{") else value
        for name, value in named
    }


def served(engine: Engine, target: Path, folder: Path, *samplings: dict[str, Any]) -> list[Counters]:
    """What vLLM counts with the draft in `folder`, one after another for each sampling."""
    job = {"target": str(target), "options": options(folder), "samplings": samplings}
    answer = engine.call(job | {"prompts": PROMPTS, "new_tokens": NEW_TOKENS})
    if "error" in answer:
        raise RefusedError(answer["error"])
    return [Counters(**run) for run in answer["runs"]]
