"""Which weights which optimizer moves, and the learning rate as a function of the step."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Muon

from decode.drafters.lm import LMDraft
from distill.objectives.config import ObjectiveConfig
from tests.architectures import random_model
from tests.tiny import tiny_llama
from tests.train.toy import tiny_config
from train.config import TrainConfig
from train.drafts.blueprint import Blueprint
from train.drafts.lm_blueprint import TrainableLM
from train.loss import DraftLoss
from train.optimizers import Schedule, WideMuon, build_optimizers
from train.settled import settled


def names_of(optimizer, module) -> set[str]:
    held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    return {name.split("model.")[-1] for name, weight in module.named_parameters() if id(weight) in held}


@pytest.mark.parametrize("tied", [False, True])
def test_muon_moves_the_matrices_of_the_layers_only(tied: bool) -> None:
    draft = TrainableLM(LMDraft(tiny_llama(num_layers=1, tie_word_embeddings=tied)))
    module = DraftLoss(draft.module, ObjectiveConfig(), 2)
    cfg = tiny_config(Path("out"), Path("target"), records="r", optimizer="muon")
    muon, adamw = build_optimizers(module, draft.token_tables(), cfg)
    assert isinstance(muon, Muon)
    assert isinstance(adamw, AdamW)
    matrices = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
    matrices |= {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert names_of(muon, module) == {f"layers.0.{name}" for name in matrices}
    ends = {"embed_tokens.weight", "norm.weight"} | (set() if tied else {"lm_head.weight"})
    norms = {"layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight"}
    assert names_of(adamw, module) == ends | norms
    moved = sum(len(group["params"]) for optimizer in (muon, adamw) for group in optimizer.param_groups)
    assert moved == len(list(module.parameters()))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_output_heads_bias_is_moved_once(optimizer: str) -> None:
    """GPT-J's and Phi's have one: with a row for each token, and no matrix."""
    draft = TrainableLM(LMDraft(random_model("gptj")))
    for weight in draft.model.parameters():
        weight.requires_grad_(True)
    module = DraftLoss(draft.module, ObjectiveConfig(), 2)
    cfg = tiny_config(Path("out"), Path("target"), records="r", optimizer=optimizer, weight_decay=0.1)
    *_, adamw = build_optimizers(module, draft.token_tables(), cfg)
    decays = {id(weight): group["weight_decay"] for group in adamw.param_groups for weight in group["params"]}
    head: Any = draft.model.get_output_embeddings()
    assert decays[id(head.weight)] == cfg.weight_decay > 0.0 == decays[id(head.bias)]


class Odd(nn.Module):
    """A table, a matrix and vectors; 1 everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear, self.norm = nn.Embedding(3, 2), nn.Linear(2, 2), nn.LayerNorm(2)
        for weight in self.parameters():
            nn.init.ones_(weight)


def config(**changes: Any) -> TrainConfig:
    return tiny_config(Path("out"), Path("target"), **{"records": "r"} | changes)


@pytest.mark.parametrize(("device", "kind"), [(None, WideMuon), (torch.device("cuda"), Muon)])
def test_muon_goes_by_the_device_that_weights_will_lie_on(
    monkeypatch: pytest.MonkeyPatch, device: torch.device | None, kind: type
) -> None:
    """They are on the CPU, which may emulate bfloat16, when optimizers are made."""
    monkeypatch.setattr("train.optimizers.is_emulated", lambda dtype, device: device.type == "cpu")
    given = config(optimizer="muon", lr=0.1, muon_lr=0.4)
    assert type(build_optimizers(Odd(), [], given, device)[0]) is kind


@pytest.mark.parametrize(("optimizer", "kept_of_matrix"), [("adamw", 1 - 0.1 * 0.5), ("muon", 1 - 0.4 * 0.5)])
def test_weight_decay_shrinks_matrices_and_nothing_else(optimizer: str, kept_of_matrix: float) -> None:
    """By its rate times the decay, where there is no gradient: neither norms nor biases."""
    module = Odd()
    for weight in module.parameters():
        weight.grad = torch.zeros_like(weight)
    for one in build_optimizers(
        module, [module.table.weight], config(optimizer=optimizer, lr=0.1, muon_lr=0.4, weight_decay=0.5)
    ):
        one.step()
    left = {name: sorted(set(weight.flatten().tolist())) for name, weight in module.named_parameters()}
    wanted = dict.fromkeys(["linear.bias", "norm.weight", "norm.bias"], 1.0)
    wanted |= {"table.weight": 1 - 0.1 * 0.5, "linear.weight": kept_of_matrix}
    assert left == {name: [pytest.approx(value)] for name, value in wanted.items()}


def test_adamw_averages_as_its_betas_say() -> None:
    """Gradients 1 and 3 with betas 0.5 and 0.25: first 1/1, then (0.25 + 1.5) / 0.75 over the root of
    (0.1875 + 6.75) / 0.9375."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    (adamw,) = build_optimizers(module, [], config(lr=0.1, betas=[0.5, 0.25]))
    for gradient in (1.0, 3.0):
        module.weight.grad = torch.full((1, 1), gradient)
        adamw.step()
    assert float(module.weight.detach()) == pytest.approx(-0.1 * (1 + (1.75 / 0.75) / 7.4**0.5))


def test_muons_updates_are_of_adamws_size() -> None:
    """A root mean square of 0.2 of its rate, whatever the matrix's shape."""
    for rows, columns in ((128, 128), (128, 16)):
        module = nn.Linear(columns, rows, bias=False)
        nn.init.zeros_(module.weight)
        both = nn.ModuleList([module, nn.LayerNorm(2)])
        muon, _ = build_optimizers(both, [], config(optimizer="muon", muon_lr=0.5))
        module.weight.grad = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
        muon.step()
        assert float(module.weight.detach().square().mean().sqrt()) == pytest.approx(0.2 * 0.5, rel=0.2)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_frozen_weights_are_nobodys(optimizer: str) -> None:
    module = Odd()
    module.table.requires_grad_(False)
    module.norm.requires_grad_(False)
    held = set()
    for one in build_optimizers(module, [module.table.weight], config(optimizer=optimizer)):
        held |= names_of(one, module)
    assert held == {"linear.weight", "linear.bias"}


def rates(**changes: Any) -> list[float]:
    """Of AdamW at every step."""
    cfg = config(**changes)
    optimizers = build_optimizers(nn.Linear(1, 1), [], cfg)
    schedule = Schedule(optimizers, cfg)
    return [schedule.apply(optimizers, step) for step in range(cfg.steps)]


def test_the_rate_of_every_step_by_hand() -> None:
    """Two steps of warm-up, then eight of a cosine from 1 towards 0.1: at 0, 45, 90 and 157.5 degrees."""
    found = rates(lr=1.0, steps=10, warmup=0.2, final_lr=0.1)
    assert found[:3] == pytest.approx([0.5, 1.0, 1.0])
    assert [found[4], found[6], found[9]] == pytest.approx([0.868198, 0.55, 0.134254], rel=1e-5)


def test_a_run_without_warmup_begins_at_the_peak() -> None:
    assert rates(lr=0.3, steps=1, warmup=0.0) == [0.3]
    assert rates(lr=0.3, steps=3, warmup=0.0) == pytest.approx([0.3, 0.3, 0.15])  # a step at the peak
    assert rates(lr=0.3, steps=4, warmup=1.0) == pytest.approx([0.075, 0.15, 0.225, 0.3])
    accumulated = rates(lr=0.3, steps=4, warmup=0.5, gradient_accumulation=8)
    assert accumulated[:2] == pytest.approx([0.15, 0.3])  # micro-steps are not steps


def test_each_optimizer_follows_its_own_peak() -> None:
    cfg = config(optimizer="muon", lr=0.1, muon_lr=0.4, steps=4, warmup=0.5)
    module = Odd()
    optimizers = build_optimizers(module, [module.table.weight], cfg)
    schedule = Schedule(optimizers, cfg)
    for step, factor in ((0, 0.5), (1, 1.0)):  # nothing is left of the step before
        assert schedule.apply(optimizers, step) == pytest.approx(0.4 * factor)
        have = [[group["lr"] for group in one.param_groups] for one in optimizers]
        assert have == [[pytest.approx(0.4 * factor)], [pytest.approx(0.1 * factor)] * 2]


@pytest.mark.parametrize(
    ("changes", "width", "optimizer", "lr", "muon_lr"),
    [
        ({}, 512, "muon", 3e-3, 1e-2),
        ({}, 256, "muon", 6e-3, 2e-2),
        ({}, 64, "muon", 1.2e-2, 4e-2),  # never above what was tried
        ({}, 4096, "muon", 3.75e-4, 1.25e-3),
        ({"engine": {"name": "deepspeed_zero2"}}, 512, "adamw", 3e-3, 1e-2),
        ({"draft": {"init_from": "x"}}, 1024, "adamw", 1.5e-4, 5e-4),
        ({"draft": {"init_from": "x", "lora": {"rank": 4}}}, 1024, "adamw", 1.5e-3, 5e-3),
        ({"optimizer": "muon", "draft": {"init_from": "x"}, "lr": 1e-5}, 512, "muon", 1e-5, 1e-3),
        ({"lr": 2e-3}, 512, "adamw", 2e-3, 1e-2),  # it would else move norms and tables alone
        ({"lr": 2e-3, "muon_lr": 5e-3}, 512, "muon", 2e-3, 5e-3),
        ({"optimizer": "adamw", "lr": 2.0, "muon_lr": 4.0}, 4096, "adamw", 2.0, 4.0),
    ],
)
def test_what_is_left_open_depends_on_width_engine_and_where_weights_come_from(
    changes: dict[str, Any], width: int, optimizer: str, lr: float, muon_lr: float
) -> None:
    draft = cast(Blueprint, SimpleNamespace(width=width, muon_lr=1e-2))
    found = settled(config(**{"optimizer": "auto", "lr": None, "muon_lr": None} | changes), draft, 152_064)
    assert found.objective.chunk_rows == 64  # as the toy says; else so many that logits take 128 MB
    assert settled(config(objective={"chunk_rows": None}), draft, 152_064).objective.chunk_rows == 220
    assert found.optimizer == optimizer
    assert (found.lr, found.muon_lr) == (pytest.approx(lr), pytest.approx(muon_lr))
