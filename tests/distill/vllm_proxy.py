"""A worker in place of vLLM's: tokens that follow from seeds, and states that follow from tokens (`state_of`). It notes
what it is asked in `asked.jsonl` beside it. Files there make a bad day: it dies (`die`), hangs (`hang`), takes its time
and says so (`slow`), answers for another text (`other_text`), or ends a file too early (`full`). It runs as a process
of its own, and starts at once."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def state_of(ids: list[int], layer: int, width: int) -> np.ndarray:  # (L, width) float32
    """The state of each token of a text behind `layer` layers."""
    return np.random.default_rng([layer, *ids]).standard_normal((len(ids), width)).astype(np.float32)


def written(call: dict[str, Any]) -> dict[str, Any]:
    """Responses as long as they may be, but the first, which ends after two tokens; two tokens a step."""
    new = [[(seed + n) % 200 + 5 for n in range(call["max_new_tokens"])] for seed in call["seeds"]]
    new[0] = [*new[0][:2], call["eos"][0]]
    steps = range(0, call["max_new_tokens"], 2)
    arrivals = [(float(at), [len(ids[at : at + 2]) for ids in new]) for at in steps]
    reasons = ["stop"] + ["length"] * (len(new) - 1)
    return {"new_ids": new, "finish_reasons": reasons, "seconds": 1.0, "arrivals": arrivals}


def left(settings: dict[str, Any], ids: list[int], number: int) -> str:
    """The file with the states of one text."""
    from safetensors.numpy import save_file

    here = Path(sys.argv[0]).parent
    width = json.loads((Path(settings["target"]) / "config.json").read_text())["hidden_size"]
    asked = settings["states"]
    folder = Path(asked["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    states = np.stack([state_of(ids, layer, width) for layer in asked["layers"]], 1)
    told = np.array(ids[::-1] if (here / "other_text").exists() else ids, np.int64)
    file = folder / f"{number}.safetensors"
    save_file({"hidden_states": states, "token_ids": told}, file)
    if (here / "full").exists():
        file.write_bytes(file.read_bytes()[:-1])
    return str(file)


def bad_day(here: Path) -> None:
    """Of every call."""
    if (here / "die").exists():
        sys.exit("no room on the device")
    if (here / "hang").exists():
        time.sleep(600)
    for _ in range(5 if (here / "slow").exists() else 0):
        time.sleep(0.5)
        say({"alive": True})


def say(content: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve calls until standard input ends."""
    here, settings = Path(sys.argv[0]).parent, {}
    for line in sys.stdin:
        call = json.loads(line)
        with (here / "asked.jsonl").open("a") as file:
            file.write(line)
        if not settings:
            settings, answer = call, {"ready": "0.fake"}
        else:
            bad_day(here)
            if "rows" in call:
                answer = {"files": [left(settings, ids, n) for n, ids in enumerate(call["rows"])]}
            else:
                answer = written(call)
        say(answer)


if __name__ == "__main__":
    main()
