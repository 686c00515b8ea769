"""Train the same draft by draftsmith and by what one would use otherwise, one process after another, and write
docs/results/training_peers.md:

    bash scripts/trl_env.sh && bash scripts/speculators_env.sh
    python scripts/training_peers/chats.py RECORDS TARGET CHATS
    python scripts/training_peers TARGET CHATS OUTPUT    # adds a run to docs/results/training_peers/runs.json

TARGET is a folder of SmolLM2-135M-Instruct, CHATS are messages that end in its own answers, a chat a line. The cases of
toy width have targets of random weights and read source code. Ten minutes, of a machine without other work. A run's
number is its seed; its drafts lie in OUTPUT.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run from anywhere, as a script

from cases import CASES, by_own_choice, given_to  # noqa: E402
from page import COMMAND, FIGURES, OURS, OWN, PAGE, page_of  # noqa: E402

from decode.common.environment import environment  # noqa: E402
from train.metrics_log import METRICS, read_metrics  # noqa: E402

WARM = 2
"""Steps before the clock starts, as in peer.py."""
TOOLS = {"transformers Trainer": "trainer", "TRL GKDTrainer": "trl", "speculators": "speculators"}


def arms_of(case: str) -> list[str]:
    """Ours first."""
    others = ["speculators"] if case.startswith("EAGLE-3") else ["transformers Trainer", "TRL GKDTrainer"]
    return [OURS, *([] if case.endswith("toy width") else [OWN]), *others]


def environment_of() -> dict[str, str]:
    """Of the processes."""
    return os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}


def trained(arm: str, folder: Path, given: list[str]) -> dict[str, float]:
    """Tokens a second and the most bytes of one process that trains."""
    words = [sys.executable, "-m", "train", "log_every=1", "validate_every=100000", "validation_rows=1"]
    if arm == OWN:
        given = by_own_choice(given)
    elif arm != OURS:
        tool = TOOLS[arm]
        python = sys.executable if tool == "trainer" else str(ROOT / f".venv-{tool}/bin/python")
        words = [python, str(Path(__file__).with_name("peer.py")), tool]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.log", "wb") as log:
        words += [*given, f"output_dir={folder}"]
        process = subprocess.Popen(words, env=environment_of(), stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{arm} failed; {folder}.log says why")
    speed = speed_of_ours(folder) if arm in (OURS, OWN) else json.loads((folder / "speed.json").read_text())
    return {"tokens_per_s": speed["tokens"] / speed["seconds"], "bytes": 1024 * used.ru_maxrss}


def speed_of_ours(folder: Path) -> dict[str, float]:
    """Tokens and seconds after the first WARM steps, from the log of every step."""
    steps = [line for line in read_metrics(folder / METRICS) if line["kind"] == "train"]
    read = [after["tokens"] - before["tokens"] for before, after in zip(steps, steps[1:], strict=False)]
    pairs = list(zip(read, steps[1:], strict=True))[WARM - 1 :]
    return {"tokens": sum(tokens for tokens, _ in pairs), "seconds": sum(n / one["tokens_per_s"] for n, one in pairs)}


def judged(folders: dict[str, Path], given: list[str]) -> dict[str, dict[str, float]]:
    """Acceptance of the arms' drafts on the held-out texts, in a process of its own."""
    named = json.dumps({name: str(folder) for name, folder in folders.items()})
    words = [sys.executable, str(Path(__file__).with_name("judge.py")), named, *given, "output_dir=unset"]
    found = subprocess.run(words, check=True, capture_output=True, env=environment_of())
    return json.loads(found.stdout.splitlines()[-1])


def run(target: str, chats: str, output: Path, seed: int) -> dict[str, Any]:
    """Every case, its arms one after another."""
    found: dict[str, Any] = {"seed": seed, "date": date.today().isoformat(), "cases": {}}
    found["machine"] = f"{environment()['cpu']}, {os.cpu_count()} cores"
    for number, case in enumerate(CASES):
        given = given_to(case, target, chats, output, seed)
        folders = {arm: output / f"{seed}/{number}/{TOOLS.get(arm, arm)}" for arm in arms_of(case)}
        order = list(folders)[:: 1 if seed % 2 else -1]  # no arm is always the first
        arms = {arm: trained(arm, folders[arm], given) for arm in order}
        if not case.endswith("toy width"):
            drafts = {arm: folder / ("model" if arm in (OURS, OWN) else "draft") for arm, folder in folders.items()}
            for arm, chances in judged(drafts, given).items():
                arms[arm] |= chances
        found["cases"][case] = {arm: arms[arm] for arm in folders}
        sys.stderr.write(f"{case}: {found['cases'][case]}\n")
    return found


def main(target: str, chats: str, output: str) -> None:
    """A run more."""
    found = json.loads(FIGURES.read_text()) if FIGURES.is_file() else {"command": COMMAND, "runs": []}
    found["runs"].append(run(target, chats, Path(output), len(found["runs"])))
    FIGURES.parent.mkdir(exist_ok=True)
    FIGURES.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(page_of(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
