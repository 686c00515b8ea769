"""A corpus, a target and records of a few kilobytes, and training runs on them that take a second."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from decode.common.typed_config import build
from decode.config import ModelConfig
from distill.config import DistillConfig
from distill.corpora.config import DataConfig
from tests.tiny import save_tiny_target
from train.config import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
WORDS = (
    "def return import class self value if else for in range None print yield with open as lambda not and or".split()
)


def write_corpus(folder: Path, documents: int = 40, words: int = 120) -> Path:
    """Text files of random words, the same every time."""
    folder.mkdir(parents=True)
    generator = random.Random(0)
    for number in range(documents):
        text = " ".join(generator.choice(WORDS) for _ in range(words))
        (folder / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    return folder


def text_data(folder: Path) -> DataConfig:
    """The corpus in `folder`, with enough documents in every split."""
    return DataConfig(name="text", path=str(folder), validation_share=0.2, heldout_share=0.1)


def save_target(folder: Path, **overrides: Any) -> Path:
    """A tiny target with a tokenizer of 300 entries."""
    return save_tiny_target(folder, hidden_size=32, num_layers=2, initializer_range=0.1, **overrides)


def write_records(
    folder: Path,
    target: Path,
    corpus: Path,
    store: list[str] | None = None,
    features: dict[str, Any] | None = None,
    dtype: str = "auto",
) -> Path:
    """Records of the target's own continuations of the corpus."""
    from distill.stage import run

    container = {
        "target": {"path": str(target), "dtype": dtype},
        "data": {"name": "text", "path": str(corpus), "validation_share": 0.2, "heldout_share": 0.1},
        "prompts": {"tokens": 8, "per_document": 2, "count": 24, "validation_count": 6},
        "sampling": {"max_new_tokens": 16},
        "records": {"store": ["head_tail"] if store is None else store, "shard_size": 8, "features": features or {}},
        "output_dir": str(folder),
    }
    run(build(DistillConfig, container))
    return folder


def tiny_settings(output_dir: Path, target: Path | None, **changes: Any) -> dict[str, Any]:
    """The fields of a run of 6 steps on the CPU in fp32, as plain values."""
    settings: dict[str, Any] = {
        "output_dir": str(output_dir),
        "target": {"path": None if target is None else str(target)},
        "draft": {"layers": 1, "width": 16, "heads": 2},
        "objective": {"chunk_rows": 64},
        "engine": {"device": "cpu", "precision": "fp32"},
        "sequence_length": 32,
        "batch_size": 2,
        "steps": 6,
        "optimizer": "adamw",
        "lr": 1e-2,
        "muon_lr": 4e-3,
        "log_every": 2,
        "validate_every": 3,
        "validation_rows": 4,
        "checkpoint_every": 3,
        "export_dtype": "float32",
    }
    for name, value in changes.items():
        is_nested = isinstance(value, dict) and isinstance(settings.get(name), dict)
        settings[name] = settings[name] | value if is_nested else value
    return settings


def tiny_config(output_dir: Path, target: Path | None, **changes: Any) -> TrainConfig:
    """The same as a configuration."""
    return build(TrainConfig, tiny_settings(output_dir, target, **changes))


OPTIONS = {"engine": ("name", "single"), "draft": ("family", "lm")}
HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {"head": {"depth": 3, "taps": [0, 1, -1]}},
    "peagle": {"layers": 2, "head": {"depth": 3, "taps": [0, 1, -1]}},
    "exit_adapter": {"head": {"taps": [1]}},
    "dspark": {"layers": 1, "head": {"depth": 3, "taps": [0, 1], "anchors": 32, "markov_rank": 8}},
    "dflash2": {
        "layers": 1,
        "head": {"depth": 3, "taps": [0, 1], "anchors": 32, "markov_rank": 8, "candidates": 200},
    },
    "lilicorr": {"layers": 1, "head": {"depth": 3, "taps": [0, 1], "anchors": 32, "candidates": 200}},
}
"""Heads for a target of two layers, and of nearly uniform distributions, of families whose defaults do not fit it."""


def head_settings(output_dir: Path, target: Path, family: str = "eagle3", **changes: Any) -> dict[str, Any]:
    """The fields of a run of 6 steps of a head, p and hidden states from the live target where nothing is said."""
    settings: dict[str, Any] = {"target_source": "records" if "records" in changes else "live"} | changes
    of_family = HEADS.get(family, {"head": {"depth": 3}})
    head = of_family["head"] | settings.pop("head", {})
    own = of_family | settings.pop("draft", {}) | {"family": family, "head": head}
    return tiny_settings(output_dir, target, **settings) | {"draft": own}


def head_config(output_dir: Path, target: Path, family: str = "eagle3", **changes: Any) -> TrainConfig:
    """The same as a configuration."""
    return build(TrainConfig, head_settings(output_dir, target, family, **changes))


def data_settings(corpus: Path) -> dict[str, Any]:
    """`text_data` as plain values."""
    return {"name": "text", "path": str(corpus), "validation_share": 0.2, "heldout_share": 0.1}


def command(
    settings: dict[str, Any], launcher: tuple[str, ...] = (sys.executable,), module: str = "train"
) -> list[str]:
    """The command line of these settings."""
    return [*launcher, "-m", module, *(f"{key}={_value(value)}" for key, value in _flat(settings))]


def metrics(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if kind in (None, line["kind"])]


def model_config(path: Path) -> ModelConfig:
    """A saved model, as training is told of it."""
    return ModelConfig(path=str(path))


def _flat(settings: dict[str, Any], where: str = "") -> list[tuple[str, Any]]:
    pairs = []
    for key, value in settings.items():
        name = f"{where}{key}"
        if name in OPTIONS:  # a group: one of its fields is the option
            field, usual = OPTIONS[name]
            pairs += [(name, value.get(field, usual))]
            value = {key: entry for key, entry in value.items() if key != field}
        pairs += _flat(value, f"{name}.") if isinstance(value, dict) else [(name, value)]
    return pairs


def _value(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
