"""Training of pruned drafts: zeros stay zero whatever trains them, and what was pruned is told beside what is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from decode import generate, load_drafter
from tests.train.kills import differences
from tests.train.test_engines import LAUNCHER, launch, on_two_ranks
from tests.train.toy import command, metrics, save_target, tiny_config
from train.drafts.pruning.lasting_zeros import fix_zeros, kept_places, put_zeros, zero_share
from train.drafts.pruning.pruning_config import PruningConfig
from train.stage import run

HALF, TWO_OF_FOUR = {"sparsity": 0.5}, {"sparsity": 0.5, "pattern": "2:4"}


def pruned(target: Path, **pruning: Any) -> dict[str, Any]:
    return {"init_from": str(target), "pruning": pruning}


def matrices(run_folder: Path) -> dict[str, Tensor]:
    """Of the exported layers."""
    weights = load_file(run_folder / "model" / "model.safetensors")
    return {name: value for name, value in weights.items() if "_proj.weight" in name}


def check_zeros(run_folder: Path, target: Path, pruning: dict[str, Any]) -> None:
    """Exactly those of the smallest weights of the model that it started from; the others were trained."""
    before = load_file(target / "model.safetensors")
    for name, after in matrices(run_folder).items():
        kept = kept_places(before[name], PruningConfig(**pruning))
        assert torch.equal(after != 0, kept), name
        assert not torch.equal(after, before[name] * kept), name


@pytest.mark.parametrize("pruning", [HALF, {"sparsity": 0.3}, TWO_OF_FOUR])
def test_the_largest_weights_of_a_matrix_are_kept(pruning: dict[str, Any]) -> None:
    weight = torch.randn(12, 20, generator=torch.Generator().manual_seed(0))
    kept = kept_places(weight, PruningConfig(**pruning))
    assert int((~kept).sum()) == round(pruning["sparsity"] * weight.numel())
    if "pattern" in pruning:
        fours, sizes = kept.unflatten(1, (-1, 4)), weight.abs().unflatten(1, (-1, 4))
        assert (fours.sum(2) == 2).all()
        assert (sizes.masked_fill(~fours, 9).amin(2) > sizes.masked_fill(fours, 0).amax(2)).all()
    else:
        assert weight[kept].abs().min() > weight[~kept].abs().max()


def test_zeros_are_plain_weights_once_they_are_fixed(target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(target)
    names, ids = set(model.state_dict()), torch.arange(9)[None]
    put_zeros(model, PruningConfig(sparsity=0.75))
    logits = model(ids).logits
    assert zero_share(model) == 0.75
    fix_zeros(model)
    assert set(model.state_dict()) == names
    assert zero_share(model) == 0.75
    assert torch.equal(model(ids).logits, logits)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("pruning", [HALF, TWO_OF_FOUR])
def test_zeros_stay_zero_through_training(
    tmp_path: Path, target: Path, records: Path, optimizer: str, pruning: dict[str, Any]
) -> None:
    """Momentum, weight decay and Muon's orthogonal updates reach every weight of a matrix."""
    other, tmp_path = save_target(tmp_path / "other", seed=1), tmp_path / "run"  # one that has all to learn
    draft = pruned(other, **pruning)
    run(tiny_config(tmp_path, target, records=str(records), draft=draft, optimizer=optimizer, weight_decay=0.1))
    check_zeros(tmp_path, other, pruning)
    told = json.loads((tmp_path / "result.json").read_text())
    assert told["zero_share"] == 0.5
    provenance = json.loads((tmp_path / "model" / "draftsmith.json").read_text())
    assert provenance["measured"]["zero_share"] == 0.5
    assert provenance["config"]["draft"]["pruning"]["sparsity"] == 0.5
    card = (tmp_path / "model" / "README.md").read_text()
    assert "50.0% are zero" in card
    assert f"Before training: alpha {told['start']['alpha']:.4f}" in card


def test_what_the_pruned_model_was_worth_before_its_first_step_is_told(
    tmp_path: Path, target: Path, records: Path
) -> None:
    """And it is kept where training only makes it worse: here nothing is left out, and p is the target's own."""
    draft = pruned(target, layers=2)
    run(tiny_config(tmp_path, target, records=str(records), draft=draft, lr=1.0))
    told, first = json.loads((tmp_path / "result.json").read_text()), metrics(tmp_path, "validation")[0]
    assert (first["step"], first["alpha"]) == (0, told["start"]["alpha"])
    assert told["start"]["alpha"] > 0.98
    assert told["step"] == 0


@pytest.mark.parametrize("pruning", [HALF, {"layers": 1, "mlp_width": 40, "heads": 1, "sparsity": 0.5}])
def test_a_resumed_run_ends_with_the_same_bits(
    tmp_path: Path, target: Path, records: Path, pruning: dict[str, Any]
) -> None:
    changes: dict[str, Any] = {"records": str(records), "draft": pruned(target, **pruning), "keep_checkpoints": 9}
    run(tiny_config(tmp_path / "whole", target, **changes))
    middle = tmp_path / "whole" / "checkpoints" / "step_00000003"
    run(tiny_config(tmp_path / "rest", target, **changes, resume=str(middle)))
    assert differences(tmp_path / "whole", tmp_path / "rest") == []
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "rest")]
    assert results[0] == results[1]


def test_a_pruned_draft_drafts_and_changes_no_text(tmp_path: Path, target: Path, records: Path) -> None:
    draft = pruned(target, layers=1, mlp_width=40, heads=1, sparsity=0.5)
    run(tiny_config(tmp_path, target, records=str(records), draft=draft))
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
    drafter, ids = load_drafter(str(tmp_path / "model"), target=model), torch.arange(20, 28)[None]
    told: dict[str, Any] = {"max_new_tokens": 24, "temperature": 1.0, "seed": 3}
    ours, alone = (generate(model, one, ids, **told) for one in (drafter, None))
    assert torch.equal(ours.sequences, alone.sequences)
    assert ours.stats.tau > 1


@pytest.mark.engines
@pytest.mark.parametrize(
    ("engine", "precision"), [("ddp", "fp32"), ("deepspeed_zero2", "bf16"), ("deepspeed_zero3", "bf16")]
)
def test_zeros_stay_zero_where_ranks_share_weights(
    tmp_path: Path, target: Path, records: Path, engine: str, precision: str
) -> None:
    """Also where an engine keeps and updates a copy of the weights of its own."""
    other, tmp_path = save_target(tmp_path / "other", seed=1), tmp_path / "run"
    settings = on_two_ranks(tmp_path, target, records, engine, draft=pruned(other, **HALF), weight_decay=0.1)
    settings["engine"]["precision"] = precision
    launch(command(settings, LAUNCHER))
    check_zeros(tmp_path, other, HALF)
