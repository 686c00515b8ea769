"""The weights that are kept are the best ones, and what is exported and said at the end is of them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from decode.drafters.dspark import DSparkConfig, DSparkDraft
from tests.train.overfit import built_head
from tests.train.test_checkpoint import OneProcess
from tests.train.test_shapes import lm
from tests.train.toy import tiny_config
from train.checkpoints.run_checkpoints import Checkpoints
from train.checkpoints.state import TrainState
from train.config import TrainConfig
from train.drafts import head_blueprint
from train.drafts.head_blueprint import TrainableHead
from train.loss import DraftLoss
from train.metric_sums import Sums
from train.run_result import _export, facts, kept_draft
from train.training_inputs import Inputs

STATE = TrainState(
    step=9,
    tokens=5000,
    best_step=6,
    best=Sums(loss=6.0, loss_count=3.0, alpha=2.0, alpha_count=4.0, tau=9.0, tau_count=2.0, tokens=70.0),
    since_log=Sums(loss=1.0, loss_count=1.0, tau=1.0, tau_count=1.0, tokens=8.0),
)


def inputs(**fields: Any) -> Inputs:
    """With these fields alone."""
    names = ("target", "tokenizer", "blueprint", "train", "validation", "store", "data", "window")
    fields |= {"train": SimpleNamespace(num_tokens=2500)}
    return Inputs(**{name: fields.get(name) for name in names})  # type: ignore[arg-type]


def test_what_is_said_is_of_the_best_validation() -> None:
    blueprint = SimpleNamespace(num_parameters=123, depth=None)
    assert facts(inputs(blueprint=blueprint), STATE) == {
        "step": 6,
        "rule": "highest validation tau estimate",
        "loss": 2.0,
        "alpha": 0.5,
        "tau": 4.5,
        "alpha_greedy": 0.0,
        "tau_greedy": 0.0,
        "confidence_loss": None,
        "validation_tokens": 70,
        "tokens": 5000,
        "train_tokens": 2500,
        "num_parameters": 123,
    }


def small(**changes: Any) -> TrainConfig:
    return tiny_config(Path("out"), Path("there"), records="r", **changes)


@pytest.mark.parametrize("tied", [True, False])
def test_the_draft_that_is_kept_has_the_best_weights(tmp_path: Path, tied: bool) -> None:
    """Tied ones are in the file once. Weights of a later step lie beside them."""
    cfg, blueprint = small(), lm(tie_embeddings=tied)
    checkpoints, trained = Checkpoints(tmp_path, 2), {}
    for step in (6, 9):
        module = DraftLoss(blueprint.build().module, cfg.objective, 4)
        trained[step] = module.state_dict()
        checkpoints.save_best(OneProcess(), step, trained[step])  # type: ignore[arg-type]
    book: Any = SimpleNamespace(checkpoints=checkpoints)
    kept = kept_draft(cfg, inputs(blueprint=blueprint, window=4), book, STATE, None)
    for name, weight in kept.module.state_dict().items():
        assert torch.equal(weight, trained[6][f"draft.{name}"]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_is_in_the_precision_asked_for_and_says_what_was_measured(dtype: str) -> None:
    target = SimpleNamespace(
        path="hub/name", fingerprint="f", vocab_size=8, token_map_hash="t", chat_template_hash=None, quantization=None
    )
    cfg = small(export_dtype=dtype, window=3)
    cfg.target.revision = "abc"
    blueprint = SimpleNamespace(num_parameters=123, depth=2, attends=None, made_from=None, drafts_few=None)
    measured = facts(inputs(blueprint=blueprint), STATE)
    export = _export(
        cfg, inputs(target=target, blueprint=blueprint, window=3, data={"name": "text"}), measured, "weights"
    )
    assert export.dtype == getattr(torch, dtype)
    assert (export.tokenizer_source, export.tokenizer_revision, export.num_draft_tokens) == ("hub/name", "abc", 2)
    assert export.provenance["measured"] == measured
    assert export.provenance["target"] == vars(target) | {"weights": "weights"}
    assert export.provenance["data"] == {"name": "text"}
    assert "| alpha | 0.5000 |" in export.card
    assert "Teacher-forced on 70 validation tokens; kept: step 6 (highest validation tau estimate)" in export.card
    assert "the 2,500 tokens of the training split of records `r`, read 2 times" in export.card


def test_a_draft_takes_the_temperatures_that_were_fitted(monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    draft = built_head(target, "dspark").head
    assert isinstance(draft, DSparkDraft)
    validation: Any = ["a batch"]

    def calibrated(given: nn.Module, batches: Any, chunk_rows: int) -> tuple[DSparkConfig, dict[str, float]]:
        assert (given, batches, chunk_rows) == (draft, validation, 17)
        return replace(draft.config, temperatures=(1.0, 2.0, 3.0)), {"confidence_ece": 0.25}

    monkeypatch.setattr(head_blueprint, "calibrated", calibrated)
    assert TrainableHead(draft).calibrate(validation, 17) == {"confidence_ece": 0.25}
    assert draft.config.temperatures == (1.0, 2.0, 3.0)
    draft.config = replace(draft.config, confidence=False)
    assert TrainableHead(draft).calibrate(validation, 17) == {}
    assert lm().build().calibrate(validation, 17) == {}


def test_tau_decides_where_p_is_known() -> None:
    """2 tokens a pass are better than 1.5, with a higher loss and fewer accepted tokens."""
    better = Sums(loss=8.0, loss_count=4.0, alpha=2.0, alpha_count=4.0, tau=6.0, tau_count=3.0)
    worse = Sums(loss=4.0, loss_count=4.0, alpha=3.0, alpha_count=4.0, tau=4.5, tau_count=3.0)
    assert better.score() == 2.0
    assert worse.score() == 1.5
    assert better.rule == "highest validation tau estimate"


def test_the_lower_loss_decides_where_none_is() -> None:
    assert Sums(loss=4.0, loss_count=4.0).score() > Sums(loss=3.0, loss_count=2.0).score()
    assert Sums(loss=4.0, loss_count=4.0).rule == "lowest validation loss"


def test_what_is_no_number_is_worse_than_every_number() -> None:
    """Nothing is larger than NaN: kept once, it would stay."""
    nan, worst = float("nan"), Sums(loss=1e30, loss_count=1.0)
    for broken in (Sums(loss=nan, loss_count=1.0), Sums(loss=1.0, loss_count=1.0, tau=nan, tau_count=1.0)):
        assert broken.score() == -math.inf < worst.score()
