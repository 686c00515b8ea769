"""The servers that are timed: the target alone, and each draft at each length, none among them where it follows a
schedule."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from eval.modes.served.engine.vllm import SPECULATION, serve_command
from eval.modes.served.schedule.in_vllm import SCHEDULED, held_at
from eval.modes.served.schedule.speeds import Arm

ALONE = "target"
"""The arm without a draft."""


@dataclass(frozen=True)
class Engine:
    """What all servers have in common."""

    python: str
    target: str
    options: Sequence[str]

    def alone(self) -> Arm:
        """The target without a draft."""
        return Arm(ALONE, 0, serve_command(self.python, self.target, (), 0, self.options))

    def drafting(self, name: str, draft: Sequence[str], lengths: Sequence[int]) -> list[Arm]:
        """With the draft that its options `draft` load, at each of these lengths."""
        method, longest = method_of(draft), max(lengths)
        every = sorted({0, *lengths} if method in SCHEDULED else set(lengths))
        return [
            Arm(
                f"{name}-k{k}",
                k,
                serve_command(self.python, self.target, draft, longest, self.options, held_at(method, k, longest)),
            )
            for k in every
        ]


def method_of(draft: Sequence[str]) -> str:
    """As vLLM calls it, from the options that load a draft."""
    return json.loads(draft[list(draft).index(SPECULATION) + 1])["method"]
