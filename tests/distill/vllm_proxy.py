"""A worker in place of vLLM's: tokens that follow from seeds, and states that follow from tokens (`state_of`). It notes
what it is asked in `asked.jsonl` beside it, dies where a file `die` lies there, and answers for another text where one
`other_text` does. It runs as a process of its own, and starts at once."""

import json
import sys
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


def left(settings: dict[str, Any], ids: list[int], number: int, turned: bool) -> str:
    """The file with the states of one text."""
    from safetensors.numpy import save_file

    width = json.loads((Path(settings["target"]) / "config.json").read_text())["hidden_size"]
    asked = settings["states"]
    folder = Path(asked["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    states = np.stack([state_of(ids, layer, width) for layer in asked["layers"]], 1)
    told = np.array(ids[::-1] if turned else ids, np.int64)
    save_file({"hidden_states": states, "token_ids": told}, folder / f"{number}.safetensors")
    return str(folder / f"{number}.safetensors")


def main() -> None:
    """Serve calls until standard input ends."""
    here, settings = Path(sys.argv[0]).parent, {}
    for line in sys.stdin:
        call = json.loads(line)
        with (here / "asked.jsonl").open("a") as file:
            file.write(line)
        if not settings:
            settings, answer = call, {"ready": "0.fake"}
        elif (here / "die").exists():
            sys.exit("no room on the device")
        elif "rows" in call:
            turned = (here / "other_text").exists()
            answer = {"files": [left(settings, ids, n, turned) for n, ids in enumerate(call["rows"])]}
        else:
            answer = written(call)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
