"""Pairs of rule and tree: which are refused and how, before a model is loaded and after, and what lossy costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from decode.api import generate
from decode.common.errors import ConfigError
from decode.config import DecodeConfig, DrafterConfig, ModelConfig
from decode.drafters.lm import LMDraft
from decode.sampling.config import SamplingConfig
from decode.sampling.noise import Noise, row_keys, token_table
from decode.sampling.warp import Sampling
from decode.stage import run
from decode.trees.tree import Drawn, Tree
from decode.trees.tree_plans import Dynamic, Static, chain, k_ary
from decode.verify import VERIFIERS
from decode.verify.verdict import Question
from tests.decode.checks import check_noise_is_read_once, ragged_prompts
from tests.decode.drafters import OracleTree
from tests.tiers import by_default
from tests.tiny import save_tiny_target, tiny_llama

TREE, DYNAMIC, LINE = k_ary([3, 2]), Dynamic(3, 4, 9), Static((-1, 0, 1))
DRAWN = {
    ("coupled", LINE, False): "arbitrary",
    ("coupled", TREE, False): "arbitrary",
    ("greedy", DYNAMIC, False): "arbitrary",
    ("rejection", LINE, False): "iid",
    ("rejection", TREE, False): "swor",
    ("rejection", TREE, True): "iid",
    ("rejection", DYNAMIC, False): "arbitrary",
    ("block", LINE, False): "iid",
    ("typical", LINE, False): "iid",
    ("typical", TREE, False): "arbitrary",
}
INEXACT = [
    ({"verifier": "block", "tree": "3x2"}, "block.*chain"),
    ({"verifier": "block", "tree": "dynamic"}, "block.*chain"),
    ({"verifier": "block", "replacement": True}, "replacement=true.*replacement=false"),
    ({"verifier": "coupled", "tree": "3x2", "replacement": True}, "replacement=true.*replacement=false"),
    ({"verifier": "rejection", "replacement": True}, "replacement=true.*replacement=false"),
    ({"verifier": "rejection", "tree": "1x1", "replacement": True}, "replacement=true.*replacement=false"),
    ({"verifier": "rejection", "tree": "dynamic", "replacement": True}, "replacement=true.*replacement=false"),
    ({"verifier": "typical", "tree": "2x2", "replacement": True, "lossy": True}, "replacement=true.*replacement=false"),
    ({"verifier": "typical"}, "lossy=true"),
    ({"verifier": "greedy"}, "temperature"),
]


@pytest.mark.parametrize(("name", "shape", "replacement"), DRAWN, ids=str)
def test_rules_say_how_children_are_drawn(name: str, shape: Any, replacement: bool) -> None:
    assert VERIFIERS[name].drawn(shape, replacement) == DRAWN[name, shape, replacement]


@pytest.mark.parametrize(("settings", "message"), INEXACT, ids=lambda one: str(one) if isinstance(one, dict) else "")
def test_inexact_pairs_are_refused_with_a_way_out(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        SamplingConfig(**settings)
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        generate(tiny_llama(), None, torch.tensor([[1, 2]]), max_new_tokens=2, **settings)


def test_block_verification_refuses_trees() -> None:
    ids, _ = ragged_prompts(1)
    drafter = OracleTree(ids.tolist(), 64)
    with pytest.raises(ConfigError, match="takes chains.*Use verifier=coupled"):
        generate(tiny_llama(), drafter, ids, max_new_tokens=8, verifier="block", eos_token_id=(), seed=0)


def test_block_verification_of_chains_that_were_not_sampled_is_the_delta_rule() -> None:
    """Which the suite has shown to be exact: the same verdict for the same numbers."""
    scores = torch.randn(4, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    tree = Tree(scores.argmax(-1).roll(1, 1), (-1, 0, 1))
    noise = Noise(row_keys(0, [0, 1, 2, 3], scores.device), token_table(7, scores.device), torch.tensor(3))
    question = Question(tree, scores, Sampling(), noise, torch.arange(12).view(4, 3), None)
    block, rejection = VERIFIERS["block"](question), VERIFIERS["rejection"](question)
    assert 0 < block.num_accepted.sum() < 8
    assert torch.equal(block.tokens, rejection.tokens)
    assert torch.equal(block.path, rejection.path)


@pytest.mark.parametrize("shape", by_default(1, [TREE, chain(3), DYNAMIC]), ids=str)
def test_rejection_reads_no_number_twice_on_any_shape(shape: Any) -> None:
    check_noise_is_read_once("rejection", shape)


@pytest.mark.parametrize("tree", by_default(1, ["3x2", "chain", "dynamic"]))
def test_typical_acceptance_measures_its_distance(tree: str) -> None:
    model, draft = tiny_llama(dtype=torch.float64), LMDraft(tiny_llama(num_layers=1, seed=3, dtype=torch.float64))
    ids, mask = ragged_prompts(2)
    settings: dict[str, Any] = {"max_new_tokens": 12, "tree": tree, "verifier": "typical", "lossy": True}
    out = generate(model, draft, ids, mask, eos_token_id=(), **settings, seed=0)
    assert len(out.stats.distances) == out.stats.num_tokens == 24
    assert out.stats.distance is not None
    assert 0.05 < out.stats.distance < 1
    cold = generate(model, draft, ids, mask, eos_token_id=(), temperature=0, **settings, seed=0)
    assert cold.stats.distance == 0
    plain = generate(model, None, ids, mask, eos_token_id=(), temperature=0, max_new_tokens=12, seed=0)
    assert torch.equal(cold.sequences, plain.sequences)
    assert plain.stats.distance is None


def test_the_distance_of_a_lossy_rule_is_printed_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(save_tiny_target(tmp_path / "target"))
    settings = SamplingConfig(max_new_tokens=8, verifier="typical", lossy=True)
    out = tmp_path / "out"
    draft = DrafterConfig(path=target)
    run(DecodeConfig(ModelConfig(path=target), draft, settings, prompt="def f():", color="never", output_dir=str(out)))
    assert "lossy: mean TV distance" in capsys.readouterr().out
    assert '"distance"' in (out / "manifest.json").read_text()


QUESTIONS = [
    *((name, chain(3), "iid", False) for name in VERIFIERS),
    *((name, chain(3), "arbitrary", False) for name in VERIFIERS),
    *((name, TREE, "arbitrary", rows) for name in ("coupled", "rejection", "typical") for rows in (False, True)),
    *(("rejection", TREE, drawn, rows) for drawn in ("swor", "iid") for rows in (False, True)),
]
"""(rule, shape, drawn, whether rows have trees of their own)"""


@pytest.mark.parametrize(("name", "shape", "drawn", "rows_differ"), QUESTIONS, ids=str)
def test_verdicts_neither_wait_for_the_device_nor_leave_it(
    name: str, shape: Static, drawn: Drawn, rows_differ: bool
) -> None:
    """Tensors without content: asking for a value raises, as does a partner on another device."""
    meta, (batch, nodes, vocab) = torch.device("meta"), (2, shape.num_nodes, 7)
    static = shape.parents
    parents = torch.tensor([static] * batch).to(meta) if rows_differ else static
    scores = torch.empty(batch, nodes, vocab, device=meta)
    log_q = None if drawn == "arbitrary" else torch.empty_like(scores)
    tree = Tree(torch.empty(batch, nodes, dtype=torch.long, device=meta), parents, drawn, log_q, shape.depth)
    keys, table, number = (torch.empty(n, dtype=torch.long, device=meta) for n in (batch, vocab, ()))
    noise = Noise(keys, table, number)
    positions = torch.empty(batch, shape.depth + 1, dtype=torch.long, device=meta)
    gumbel = torch.empty(batch, shape.depth + 1, vocab, device=meta) if VERIFIERS[name].shares_noise else None
    for sampling in (Sampling(), Sampling(0)):
        told = VERIFIERS[name](Question(tree, scores, sampling, noise, positions, gumbel))
        assert told.tokens.shape == told.path.shape == (batch, shape.depth + 1)
        assert told.tokens.device == told.num_accepted.device == meta
