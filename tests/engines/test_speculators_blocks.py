"""The speculators library loads our DFlash and DSpark folders and computes our logits and chances."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode.drafters.base import Batch
from decode.drafters.dspark import DSparkDraft
from tests.engines.environment import speculators_python
from tests.train.export.saved_heads import export, save_head, save_padded_target

pytestmark = pytest.mark.engines
WORKER = Path(__file__).with_name("block_speculators_worker.py")
TOKENS, ROWS, TAPS = 24, 320, (4, 1, 3)
"""TAPS are not in the order in which engines hand states over."""
REDUCED = torch.arange(0, ROWS, 3)
HEADS: list[tuple[str, Tensor | None, dict[str, Any]]] = [
    ("dflash", None, {}),
    ("dflash", REDUCED, {"layers": 1}),
    ("dspark", None, {}),
    ("dspark", REDUCED, {}),
    ("dspark", None, {"markov_rank": 0}),
]


def ours(head: DSparkDraft, ids: Tensor, states: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor | None]:
    """Logits (blocks, N, V_draft) and the chances before their sigmoid (blocks, N) of blocks at those places."""
    batch = Batch(
        ids=ids[None],
        positions=torch.arange(TOKENS)[None],
        document=torch.zeros(1, TOKENS, dtype=torch.long),
        loss_mask=torch.ones(1, TOKENS, dtype=torch.bool),
        features=states[None],
    )
    logits, chances = [], []
    for number, step in enumerate(head.unroll(batch)):
        places = (step.target_rows[0] - number).tolist()
        rows = [places.index(anchor) for anchor in anchors.tolist()]
        logits.append(step.head(step.hidden[0, rows]))
        chances.append(None if step.confidence is None else step.confidence[0, rows])
    known = [one for one in chances if one is not None]
    return torch.stack(logits, 1), torch.stack(known, 1) if known else None


def test_its_logits_and_chances_are_ours(tmp_path: Path) -> None:
    python, generator = speculators_python(), torch.Generator().manual_seed(0)
    target = save_padded_target(tmp_path / "target", ROWS)
    words, made = [], []
    for number, (name, vocab, fields) in enumerate(HEADS):
        folder = tmp_path / f"{number}"
        given: dict[str, Any] = {"taps": TAPS, "mask_token": 17, "anchors": TOKENS} | fields
        head = save_head(folder / "head", target, name, vocab, **given)
        export(folder / "head", folder / "out", "speculators")
        ids = torch.randint(ROWS, (TOKENS,), generator=generator)
        states = torch.randn(TOKENS, len(TAPS), head.config.hidden_size, generator=generator)
        in_order = states[:, [1, 2, 0]].flatten(1)
        save_file({"ids": ids, "states": in_order.contiguous()}, folder / "given")
        words += [str(folder / one) for one in ("out", "given", "made")]
        made.append((head, ids, states))
    apart = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    subprocess.run([python, "-P", str(WORKER), *words], check=True, env=apart, cwd=tmp_path)
    for number, (head, ids, states) in enumerate(made):
        assert isinstance(head, DSparkDraft)
        found = load_file(tmp_path / f"{number}" / "made")
        logits, chances = ours(head, ids, states, found["anchors"])
        first = head.config.slots - head.config.depth
        torch.testing.assert_close(found["logits"][:, first:], logits, rtol=0, atol=1e-5)
        assert (chances is None) == ("chances" not in found)
        if chances is not None:
            torch.testing.assert_close(found["chances"][:, first:], chances, rtol=0, atol=1e-5)
