"""The speculators library loads our folder and computes our logits."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from decode.drafters.base import Batch
from decode.drafters.head_draft import HeadDraft
from tests.engines.environment import speculators_python
from tests.tiny import tiny_tokenizer
from tests.train.check import folders
from tests.train.check.folders import TARGETS, VOCAB
from tests.train.export.saved_heads import export, save_head

pytestmark = pytest.mark.engines
WORKER = Path(__file__).with_name("speculators_worker.py")
TOKENS, STEPS = 32, 3
SHAPE: dict[str, Any] = folders.SHAPE | {
    "head_dim": 16,
    "initializer_range": 0.02,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
HEADS = [
    ("llama", "eagle3", False),
    ("llama", "eagle3.1", True),
    ("qwen3", "eagle3.1", False),
    ("qwen3", "eagle3.1-one-norm", True),
]
"""(target, variant of tests.decode.heads, whether its vocabulary is reduced)."""


def save_target(folder: Path, kind: str) -> Path:
    tokenizer = tiny_tokenizer(VOCAB)
    torch.manual_seed(0)
    ends: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    AutoModelForCausalLM.from_config(TARGETS[kind](**SHAPE, **ends)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def our_logits(head: HeadDraft, ids: Tensor, states: Tensor) -> Tensor:
    """(STEPS, T, V_draft); ids (T + 1,), states (T, n * d) of all but the last of them."""
    every = Batch(
        ids=ids[None],
        positions=torch.arange(len(ids))[None],
        document=torch.zeros(1, len(ids), dtype=torch.long),
        loss_mask=torch.ones(1, len(ids), dtype=torch.bool),
        features=torch.cat([states, states[-1:]]).unflatten(-1, (len(head.taps), -1))[None],
    )
    steps = list(head.unroll(every))[:STEPS]
    return torch.stack([step.head(step.hidden)[0, : len(ids) - 1] for step in steps])


def test_its_logits_are_ours(tmp_path: Path) -> None:
    python, generator = speculators_python(), torch.Generator().manual_seed(0)
    targets = {kind: save_target(tmp_path / kind, kind) for kind in TARGETS}
    words, ours = [], []
    for number, (kind, name, is_reduced) in enumerate(HEADS):
        folder, vocab = tmp_path / f"{number}", torch.arange(0, VOCAB, 3) if is_reduced else None
        rope = SHAPE["rope_parameters"]
        head = save_head(folder / "head", targets[kind], name, vocab, taps=(1, 4, 6), head_dim=16, rope=rope)
        export(folder / "head", folder / "out", "speculators")
        ids = torch.randint(VOCAB, (TOKENS + 1,), generator=generator)
        states = torch.randn(TOKENS, 3 * SHAPE["hidden_size"], generator=generator)
        save_file({"ids": ids[1:].contiguous(), "states": states}, folder / "given")
        words += [str(folder / one) for one in ("out", "given", "made")]
        ours.append(our_logits(head, ids, states))
    apart = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    subprocess.run([python, "-P", str(WORKER), str(STEPS), *words], check=True, env=apart, cwd=tmp_path)
    for number, expected in enumerate(ours):
        found = load_file(tmp_path / f"{number}" / "made")["logits"]
        whole = slice(0, TOKENS - STEPS)  # the last slots have no true token for every step
        scale = expected.abs().max()
        assert found.shape == expected.shape
        torch.testing.assert_close(found[:, whole] / scale, expected[:, whole] / scale, rtol=0, atol=1e-5)
