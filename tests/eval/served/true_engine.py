"""A server's engine that writes and counts as our decoder does. Apart from the server, which as a program of its own
shall start without torch."""

from __future__ import annotations

from typing import Any

from eval.modes.served.counting import Pair
from eval.modes.served.engine.metrics import Counters
from tests.eval.served.fake_engine import FakeEngine

Answer = tuple[list[int], Counters]


class TrueEngine(FakeEngine):
    """One that writes as a target does, and counts as our decoder does with a drafter."""

    def __init__(self, pair: Pair, drafter: Any, answers: dict[tuple[Any, ...], Answer], **known: Any) -> None:
        """`answers` are those that are known, of engines that write and draft alike."""
        super().__init__(**known)
        self.pair, self.drafter, self.answers = pair, drafter, answers

    def write(self, asked: dict[str, Any]) -> Answer:
        """The same whenever the same is asked, so it is computed once."""
        k, seed = len(self.counters.accepted), asked.get("seed") or 0
        key = (tuple(asked["prompt"]), asked["max_tokens"], asked["temperature"], seed, k)
        if key not in self.answers:
            self.answers[key] = self._written(asked["prompt"], asked["max_tokens"], asked["temperature"], seed, k)
        return self.answers[key]

    def _written(self, prompt: list[int], limit: int, temperature: float, seed: int, k: int) -> Answer:
        (text,) = self.pair.write([prompt], limit + k, temperature, seed)
        if not k:
            return text[:limit], Counters(0, 0, ())
        (counters,) = self.pair.counters_along(self.drafter, [prompt], [text], limit, k)
        return text[:limit], counters
