"""Train the same draft by draftsmith and by what one would use otherwise, one process after another, and write
docs/results/training_peers.md:

    bash scripts/trl_env.sh && bash scripts/speculators_env.sh
    python scripts/training_peers.py TARGET CHATS OUTPUT    # adds a run to docs/results/training_peers/runs.json

CHATS are messages that end in TARGET's own answers, a chat a line; TARGET is a folder. The cases of toy width have
targets of random weights and read source code. Ten minutes, of a machine without other work. A run's number is its
seed; its drafts lie in OUTPUT.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run from anywhere, as a script
PAGE, FIGURES = ROOT / "docs/results/training_peers.md", ROOT / "docs/results/training_peers/runs.json"
WARM = 2
"""Steps before the clock starts, as in training_peer.py."""
LM = ("draft=lm", "target_source=live", "optimizer=adamw", "lr=0.001", "batch_size=2")
EAGLE3 = ("draft=eagle3", "target_source=live", "optimizer=adamw", "lr=0.001", "batch_size=1", "sequence_length=1024")
TOY = ("data=python_stdlib", "data.max_documents=100", "steps=16", "batch_size=4")
CASES = {
    "draft LM, 49,152 tokens": (*LM, "steps=42"),
    "draft LM, 4,096 tokens, toy width": (*LM, *TOY),
    "draft LM, 151,936 tokens, toy width": (*LM, *TOY),
    "EAGLE-3, 49,152 tokens": (*EAGLE3, "draft.head.depth=3", "draft.head.vocab=8192", "steps=42"),
}
"""Case -> the settings of its arms."""
TOOLS = {"transformers Trainer": "trainer", "TRL GKDTrainer": "trl", "speculators": "speculators"}
OURS = "draftsmith"
HEAD = """# Training beside other tools

The same draft on the same texts, tokens, weights to begin with, optimizer (AdamW), rates and precision, the target read
beside it. A draft LM is trained by `python -m train`, by transformers' Trainer with forward KL written by hand, and by TRL's
GKDTrainer (lmbda=0, beta=0: the same loss); an EAGLE-3 head by ours and by the speculators library.

"""


def arms_of(case: str) -> list[str]:
    """Ours first."""
    others = ["speculators"] if case.startswith("EAGLE-3") else ["transformers Trainer", "TRL GKDTrainer"]
    return [OURS, *others]


def given_to(case: str, target: str, chats: str, output: Path, seed: int) -> list[str]:
    """The settings that all arms of a case share."""
    if case.endswith("toy width"):
        target = str(toy_target(int(case.split()[2].replace(",", "")), target, output))
    texts = [] if case.endswith("toy width") else ["data=jsonl", "data.learn_prompt=false", f"data.path={chats}"]
    found = [f"target.path={target}", *texts, *CASES[case], f"seed={seed}"]
    if case.startswith("draft LM"):
        found += [f"draft.init_from={untrained(target, output / 'begins' / case.split()[2], seed)}"]
    return found


def toy_target(vocab: int, like: str, output: Path) -> Path:
    """A target of random weights over so many tokens; its tokenizer is that of `like`, or one of 4,096 tokens."""
    from transformers import AutoTokenizer

    from distill.corpora.config import DataConfig
    from distill.corpora.configured import load_corpus
    from distill.prompts.tokenizer import train_bpe

    folder = output / f"target_{vocab}"
    if not folder.is_dir():
        known = AutoTokenizer.from_pretrained(like)
        if len(known) > vocab:
            corpus = load_corpus(DataConfig(name="python_stdlib", max_documents=100))
            known = train_bpe((one.text or "" for one in corpus.documents("train")), vocab)
        model(vocab, 256, 4, seed=0).save_pretrained(folder)
        known.save_pretrained(folder)
    return folder


def untrained(target: str, folder: Path, seed: int) -> Path:
    """A draft LM of one layer and random weights, over the target's tokens."""
    from transformers import AutoConfig, AutoTokenizer

    path = folder.with_name(f"{folder.name}_{seed}")
    config = AutoConfig.from_pretrained(target)
    model(config.vocab_size, config.hidden_size // 2 // 64 * 64, 1, seed).save_pretrained(path)
    AutoTokenizer.from_pretrained(target).save_pretrained(path)
    return path


def model(vocab: int, width: int, layers: int, seed: int) -> Any:
    """A Llama of random weights with heads of 64 channels."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_attention_heads": width // 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab, num_hidden_layers=layers, tie_word_embeddings=True, **sizes))


def trained(arm: str, folder: Path, given: list[str]) -> dict[str, float]:
    """Tokens a second and the most bytes of one process that trains."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    words = [sys.executable, "-m", "train", "log_every=1", "validate_every=100000", "validation_rows=1"]
    if arm != OURS:
        tool = TOOLS[arm]
        python = sys.executable if tool == "trainer" else str(ROOT / f".venv-{tool}/bin/python")
        words = [python, str(ROOT / "scripts/training_peer.py"), tool]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.log", "wb") as log:
        process = subprocess.Popen([*words, *given, f"output_dir={folder}"], env=environment, stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{arm} failed; {folder}.log says why")
    speed = speed_of_ours(folder) if arm == OURS else json.loads((folder / "speed.json").read_text())
    return {"tokens_per_s": speed["tokens"] / speed["seconds"], "bytes": 1024 * used.ru_maxrss}


def speed_of_ours(folder: Path) -> dict[str, float]:
    """Tokens and seconds after the first WARM steps, from the log of every step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    read = [after["tokens"] - before["tokens"] for before, after in zip(steps, steps[1:], strict=False)]
    pairs = list(zip(read, steps[1:], strict=True))[WARM - 1 :]
    return {"tokens": sum(tokens for tokens, _ in pairs), "seconds": sum(n / one["tokens_per_s"] for n, one in pairs)}


def run(target: str, chats: str, output: Path, seed: int) -> dict[str, Any]:
    """Every case, its arms one after another."""
    from decode.common.environment import environment

    found: dict[str, Any] = {"seed": seed, "date": date.today().isoformat(), "cases": {}}
    found["machine"] = f"{environment()['cpu']}, {os.cpu_count()} cores"
    for number, case in enumerate(CASES):
        given = given_to(case, target, chats, output, seed)
        arms = arms_of(case)[:: 1 if seed % 2 else -1]  # no arm is always the first
        found["cases"][case] = {
            arm: trained(arm, output / f"{seed}/{number}/{TOOLS.get(arm, OURS)}", given) for arm in arms
        }
        sys.stderr.write(f"{case}: {found['cases'][case]}\n")
    return found
