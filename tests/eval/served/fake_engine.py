"""A server that answers as vLLM's does, of a model that writes by a rule: each token is the one before it plus one. As
a program it is what `running` starts, without torch; `--port` says where it listens."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from typing import Any

from eval.modes.served.engine.metrics import Counters
from tests.fake_server import Answer, FakeServer, Listening


@dataclass
class FakeEngine(FakeServer):
    """What it knows and counts: of every draft of `k` tokens, `right` are accepted."""

    model: str = "a/target"
    k: int = 2
    right: int = 1
    dies_after: int | None = None

    def __post_init__(self) -> None:
        self.counters = Counters(0, 0, (0,) * self.k)

    @property
    def written(self) -> list[dict[str, Any]]:
        """Requests for texts."""
        return [one for one in self.asked if "prompt" in one]

    def answer(self, path: str, content: dict[str, Any]) -> Answer:
        if content:
            return self.complete(content) if content["model"] == self.model else (404, {}, "no such model")
        pages: dict[str, Answer] = {
            "/health": "",
            "/metrics": self.metrics(),
            "/version": {"version": "0.0"},
            "/v1/models": {"data": [{"id": self.model, "root": self.model}]},
        }
        return pages.get(path, (404, {}, "no such page"))

    def complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        """An answer, which is counted."""
        if self.dies_after is not None and len(self.written) > self.dies_after:
            self.die()
        ids, counters = self.write(asked)
        self.counters += counters
        return {"choices": [{"token_ids": ids, "text": ""}]}

    def write(self, asked: dict[str, Any]) -> tuple[list[int], Counters]:
        """Tokens, and what became of the drafts."""
        drafts, k = -(-(asked["max_tokens"] - 1) // (self.right + 1)), len(self.counters.accepted)
        accepted = tuple(drafts if place < self.right else 0 for place in range(k))
        return [asked["prompt"][-1] + 1 + i for i in range(asked["max_tokens"])], Counters(drafts, drafts * k, accepted)

    def die(self) -> None:
        """As a process does."""
        sys.stdout.write("EngineDeadError: out of memory\n")
        sys.stdout.flush()
        os._exit(7)

    def metrics(self) -> str:
        """Prometheus text."""
        name, labels = "vllm:spec_decode_num", f'engine="0",model_name="{self.model}"'
        lines = [f"vllm:num_requests_running{{{labels}}} 0.0", f"# TYPE {name}_drafts_total counter"]
        if self.counters.accepted:
            lines += [
                f"{name}_drafts_total{{{labels}}} {float(self.counters.drafts)}",
                f"{name}_drafts_created{{{labels}}} 1.7e+09",
                f"{name}_draft_tokens_total{{{labels}}} {float(self.counters.drafted)}",
                f"{name}_accepted_tokens_total{{{labels}}} {float(sum(self.counters.accepted))}",
            ]
        for place, taken in enumerate(self.counters.accepted):
            lines.append(f'{name}_accepted_tokens_per_pos_total{{{labels},position="{place}"}} {float(taken)}')
        return "\n".join(lines) + "\n"


def main() -> None:
    """Serve until it is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--dies-after", type=int)
    given = parser.parse_args()
    sys.stdout.write("started\n")
    Listening(FakeEngine(dies_after=given.dies_after), given.port).serve_forever()


if __name__ == "__main__":
    main()
