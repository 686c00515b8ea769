"""What vLLM counts, by the worker that all tests of a session share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eval.arms.vllm_peer import Engine
from tests.engines.counters import Counters
from tests.engines.toys import NEW_TOKENS, PROMPTS, K

WORKER = Path(__file__).with_name("worker.py")
GREEDY, SAMPLED = {"temperature": 0.0}, {"temperature": 1.0, "seed": 7}


class RefusedError(Exception):
    """The engine did not start, or broke; what it said."""


def served(
    engine: Engine, target: Path, draft: Path, method: str, *samplings: dict[str, Any], **more: Any
) -> list[Counters]:
    """What vLLM counts with this draft, one after another for each sampling; `more` goes to `vllm.LLM`."""
    job = {
        "target": str(target),
        "speculation": {"method": method, "model": str(draft), "num_speculative_tokens": K},
        "engine": more,
        "prompts": PROMPTS,
        "new_tokens": NEW_TOKENS,
        "samplings": samplings,
    }
    answer = engine.call(job)
    if "error" in answer:
        raise RefusedError(answer["error"])
    return [Counters(**run) for run in answer["runs"]]
