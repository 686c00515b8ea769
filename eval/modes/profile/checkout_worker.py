"""The decoder of another checkout behind standard input and output: a JSON object per line in, one out.

Its `decode` and `eval` are imported, so only what earlier versions have, too, is asked of them. The first line holds
{"target", "draft"}, answered by {"ready": folder of its package}. Each further line names what is wanted: a `call`
or its `operators`, {"prompts", "settings", "is_drafted"}, or the seconds of its bare `passes`, {"context", "nodes",
"batch_size", "repeats", "is_drafted"}.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import decode
from decode import generate, load_drafter
from decode.autotune.timing import measure
from decode.config import ModelConfig
from decode.models.load import load_model
from eval.measure.continuations import left_padded
from eval.measure.operators import profiled


class Decoder:
    """Target and draft of that checkout."""

    def __init__(self, target: dict[str, Any], draft: str) -> None:
        self.model = load_model(ModelConfig(**target))
        self.drafter = load_drafter(draft, target=self.model)

    def generate(self, asked: dict[str, Any]) -> Any:
        """What one call counted; no end token cuts it short."""
        ids, mask = left_padded(asked["prompts"], 0, self.model.device)
        drafter = self.drafter if asked["is_drafted"] else None
        free = {"eos_token_id": (), "stop_strings": ()}
        return generate(self.model, drafter, ids, attention_mask=mask, **free, **asked["settings"]).stats

    def call(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Timed here: the pipe is not counted."""
        began = time.perf_counter()
        stats = self.generate(asked)
        seconds = time.perf_counter() - began
        counted = {"tokens": stats.num_tokens, "rounds": len(stats.arrival_s), "phases": stats.seconds}
        return {"seconds": seconds, **counted}

    def operators(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Seconds by phase and class of operator."""
        found: list[Any] = []
        seconds = profiled(lambda: found.append(self.generate(asked)), self.model.device.type == "cuda")
        return {"seconds": seconds, "rounds": len(found[0].arrival_s)}

    def passes(self, asked: dict[str, Any]) -> dict[str, float]:
        """Seconds of one draft token and of the target's pass."""
        drafter, nodes = (self.drafter if asked["is_drafted"] else None), asked["nodes"]
        costs = measure(self.model, drafter, asked["context"], [nodes], asked["batch_size"], asked["repeats"])
        return {"t_draft": costs.t_draft, "t_target": costs.t_target[nodes]}


def main() -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else is printed goes to standard error

    def say(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    decoder = Decoder(**json.loads(sys.stdin.readline()))
    say({"ready": str(Path(decode.__file__).parent.parent)})
    for line in sys.stdin:
        asked = json.loads(line)
        wanted = {"call": decoder.call, "operators": decoder.operators, "passes": decoder.passes}[asked["wanted"]]
        say(wanted(asked))


if __name__ == "__main__":
    main()
