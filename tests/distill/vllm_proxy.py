"""A worker in place of vLLM's: tokens that follow from seeds, and states that follow from tokens (`state_of`), the
target's own embeddings before its layers, and p by the target's norm and head. It notes what it is asked in
`asked.jsonl` beside it. Files there make a bad day: it dies (`die`), hangs (`hang`), takes its time and says so
(`slow`), answers for another text (`other_text`), ends a file too early (`full`), or gives states that are none (`bad`
holds a name in BAD; with `late` beside it only from the second text on). It runs as a process of its own, and starts at
once."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

BAD = {
    "zeros": lambda states: 0 * states,
    "zeros of one layer": lambda states: states * (np.arange(states.shape[1]) < states.shape[1] - 1)[None, :, None],
    "zeros of a block": lambda states: states * (np.arange(len(states)) < len(states) // 2)[:, None, None],
    "nan": lambda states: np.where((np.arange(len(states)) == 1)[:, None, None], np.float32("nan"), states),
    "constant": lambda states: np.repeat(states[-1:], len(states), 0),
    "half": lambda states: states.astype(np.float16),
    "one layer less": lambda states: states[:, 1:],
    "one layer twice": lambda states: np.repeat(states[:, -1:], states.shape[1], 1),
    "turned": lambda states: states[:, ::-1],
    "a token late": lambda states: np.roll(states, 1, 0),
    "other weights": lambda states: states + np.float32(0.3) * np.roll(states, 1, 2),
}


def state_of(ids: list[int], layer: int, width: int) -> np.ndarray:  # (L, width) float32
    """The state of each token of a text behind `layer` layers."""
    return np.random.default_rng([layer, *ids]).standard_normal((len(ids), width)).astype(np.float32)


def written(call: dict[str, Any]) -> dict[str, Any]:
    """Responses as long as they may be, but the first, which ends after two tokens; two tokens a step."""
    new = [[(seed + n) % 200 + 5 for n in range(call["max_new_tokens"])] for seed in call["seeds"]]
    new[0] = [*new[0][:2], call["eos"][0]]
    passes = [-(-len(ids) // 2) for ids in new]
    reasons = ["stop"] + ["length"] * (len(new) - 1)
    return {"new_ids": new, "finish_reasons": reasons, "seconds": 1.0, "passes": passes}


def log_p_of(target: Path, ids: list[int]) -> np.ndarray:  # (L, V)
    """By the norm and head of the target's folder, on the last layer's states."""
    from safetensors.numpy import load_file

    config, tensors = json.loads((target / "config.json").read_text()), load_file(target / "model.safetensors")
    states = state_of(ids, config["num_hidden_layers"], config["hidden_size"])
    normed = states / np.sqrt((states**2).mean(-1, keepdims=True) + config["rms_norm_eps"])
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    logits = normed * tensors["model.norm.weight"] @ head.T
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def read(settings: dict[str, Any], call: dict[str, Any]) -> dict[str, Any]:
    """The files, and what the engine says of the texts."""
    rows, log_p = call["rows"], [log_p_of(Path(settings["target"]), ids) for ids in call["rows"]]
    bad = Path(sys.argv[0]).parent / "bad"
    shift = int(bad.exists() and bad.read_text() == "another token")
    next_ids = [(int(one[-1].argmax()) + shift) % one.shape[1] for one in log_p]
    answer = {"files": [left(settings, ids, n) for n, ids in enumerate(rows)], "next_ids": next_ids}
    if call.get("log_p"):
        told = zip(rows, log_p, strict=True)
        answer["log_p"] = [[float(p[n, token]) for n, token in enumerate(ids[1:])] for ids, p in told]
    return answer


def left(settings: dict[str, Any], ids: list[int], number: int) -> str:
    """The file with the states of one text."""
    from safetensors.numpy import load_file, save_file

    here, target = Path(sys.argv[0]).parent, Path(settings["target"])
    width = json.loads((target / "config.json").read_text())["hidden_size"]
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    asked = settings["states"]
    folder = Path(asked["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    states = np.stack([state_of(ids, layer, width) if layer else embedding[ids] for layer in asked["layers"]], 1)
    if (here / "late").exists():
        (here / "late").unlink()
    elif (here / "bad").exists():
        states = np.ascontiguousarray(BAD.get((here / "bad").read_text(), np.copy)(states))
    told = np.array(ids[::-1] if (here / "other_text").exists() else ids, np.int64)
    file = folder / f"{number}.safetensors"
    save_file({"hidden_states": states, "token_ids": told}, file)
    if (here / "full").exists():
        file.write_bytes(file.read_bytes()[:-1])
    return str(file)


def bad_day(here: Path) -> None:
    """Of every call but that of the fixed text."""
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
            if "log_p" not in call:
                bad_day(here)
            if "rows" in call:
                answer = read(settings, call)
            else:
                answer = written(call)
        say(answer)


if __name__ == "__main__":
    main()
