"""vLLM's own class of LiLiCorr's lattice takes all of an export and gives our scores; its runner needs a GPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decode.drafters.lilicorr import LiLiCorrDraft
from tests.engines.environment import vllm_python
from tests.train.export.saved_heads import export, save_head, save_padded_target

pytestmark = pytest.mark.engines
WORKER = Path(__file__).with_name("lilicorr_worker.py")
ROWS, BLOCKS = 320, 3


@pytest.mark.parametrize(("name", "candidates"), [("lilicorr", 4), ("lilicorr-convolved", 8)])
@torch.no_grad()
def test_its_scores_are_ours(tmp_path: Path, name: str, candidates: int) -> None:
    target = save_padded_target(tmp_path / "target", ROWS)
    given: dict[str, Any] = {"taps": (1, 3, 4), "mask_token": 17, "candidates": candidates}
    draft = save_head(tmp_path / "head", target, name, None, **given)
    assert isinstance(draft, LiLiCorrDraft)
    export(tmp_path / "head", tmp_path / "vllm", "vllm")
    width, depth, k = draft.config.hidden_size, draft.config.depth, draft.config.candidates
    torch.manual_seed(0)
    states, before = torch.randn(BLOCKS, depth, width), torch.randn(BLOCKS, width)
    is_there = torch.arange(BLOCKS) > 0
    log_q, rows = torch.randn(BLOCKS, depth, ROWS).log_softmax(-1).topk(k)
    inputs = {"token_embeddings": draft.embed(rows), "candidate_log_probs": log_q, "pass_hidden": states}
    inputs |= {"anchor_hidden": before, "anchor_valid": is_there.long()}
    save_file({one: value.contiguous() for one, value in inputs.items()}, tmp_path / "inputs")
    words = [vllm_python(), str(WORKER), *(str(tmp_path / one) for one in ("vllm", "inputs", "outputs"))]
    subprocess.run(words, check=True, env=os.environ | {"PYTHONPATH": ""}, timeout=240)
    theirs = load_file(tmp_path / "outputs")
    first, pairs = draft.lilicorr(draft.embed(rows), log_q, states, before, is_there)
    torch.testing.assert_close(theirs["first"], first, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(theirs["pairs"], pairs, rtol=1e-4, atol=1e-4)
