"""A comparison of ways to draft on two tiny targets, and numbers for one that was never run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.arms.base import our_name
from eval.results.compared import DraftingArm
from tests.tiny import save_tiny_target

ARMS = {
    "ngram": {"draft": "ngram"},
    "edit": {"draft": "edit", "texts": ["edit"], "num_draft_tokens": 2},
    "both": {"draft": "mixture", "settings": {"members": ["ngram", "edit"]}, "tree": "dynamic", "texts": ["edit"]},
    "retrieval": {"draft": "retrieval", "settings": {"datastore": "DATASTORE"}},
}
DRAFT_ARMS = {"NAME": {"draft": "DRAFT", "num_draft_tokens": [2]}}
PLAIN = ("own autoregressive loop", "transformers generate")
Paces = dict[str, Sequence[float | None]]
"""Arm -> seconds per token of each batch of prompts."""
FUNCTION = '''
def f{number}(values, limit):
    """The values of module {number} below a limit."""
    kept = []
    for value in values:
        if value < limit + {number}:
            kept.append(value)
    return kept


def g{number}(values):
    """What is left over in module {number}."""
    total = {number}
    for value in values:
        total -= value
    return total
'''


def write_sources(folder: Path, number: int = 60) -> None:
    """Modules of a few functions with docstrings, such as tasks are made of."""
    folder.mkdir()
    for one in range(number):
        (folder / f"m{one}.py").write_text(
            f'"""Module {one} does this."""\n' + 2 * FUNCTION.replace("{number}", str(one))
        )


def make_models(folder: Path) -> None:
    """A target, a draft of it, and a target for tasks with another tokenizer."""
    room = {"max_position_embeddings": 2048}
    save_tiny_target(folder / "target", seed=0, **room)
    save_tiny_target(folder / "draft", seed=0, initializer_range=0.29, **room)
    save_tiny_target(folder / "tasks_target", vocab_size=320, seed=2, **room)
    write_sources(folder / "sources")


def values(folder: Path) -> dict[str, Any]:
    """Of an EvalConfig."""
    return {
        "output_dir": str(folder / "report"),
        "mode": "drafters",
        "target": {"path": str(folder / "target")},
        "drafts": {"mine": str(folder / "draft")},
        "data": {"name": "text", "path": str(folder / "sources"), "heldout_share": 0.4, "validation_share": 0.3},
        "prompts": {"tokens": 12},
        "decode": {"max_new_tokens": 6},
        "timing": {"rounds": 1, "screening_tokens": 4},
        "temperatures": [0.0],
        "peers": {"num_assistant_tokens": [], "prompt_lookup_num_tokens": [3]},
        "drafters": {
            "texts": ["code", "edit"],
            "tasks_target": str(folder / "tasks_target"),
            "arms": ARMS,
            "draft_arms": DRAFT_ARMS,
            "draft_lengths": [2, 3],
            "batch_sizes": [1],
            "batches_timed": [2],
            "screening_prompts": 1,
        },
    }


def cell(paces: Paces, text: str = "edit") -> dict[str, Any]:
    """A timed cell, names as arms have them."""
    return {
        "batch_size": 1,
        "temperature": 0.0,
        "text": text,
        "prompts": len(next(iter(paces.values()))),
        "seconds": 1.0,
        "settings": {},
        "left_out": {},
        "vllm_version": None,
        "rows": [],
        "arms": [
            {"arm": name, "seconds_per_token": pace, "call_seconds_per_token": pace, "tokens": 9}
            for name, pace in paces.items()
        ],
    }


def ours(**paces: Sequence[float | None]) -> Paces:
    """The same by our names."""
    return {our_name(name): pace for name, pace in paces.items()}


def arm(draft: str, members: Sequence[str] = (), has_weights: bool = False) -> DraftingArm:
    """What results.json says of an arm."""
    settings = {"members": list(members)} if members else {}
    told = {"draft": draft, "settings": settings, "changes": {}, "texts": ["edit"], "members": list(members)}
    return DraftingArm.model_validate(told | {"has_weights": has_weights})
