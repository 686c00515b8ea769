"""Which weights which optimizer moves, and the learning rate as a function of the step."""

from pathlib import Path

import pytest
from torch.optim import AdamW, Muon

from decode.drafters.lm import LMDraft
from distill.config import ObjectiveConfig
from tests.tiny import tiny_llama
from tests.train.toy import tiny_config
from train.loss import DraftLoss
from train.optim import Schedule, build_optimizers


def names_of(optimizer, module) -> set[str]:
    held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    return {name.split("model.")[-1] for name, weight in module.named_parameters() if id(weight) in held}


@pytest.mark.parametrize("tied", [False, True])
def test_muon_moves_the_matrices_of_the_layers_only(tied: bool) -> None:
    module = DraftLoss(LMDraft(tiny_llama(num_layers=1, tie_word_embeddings=tied)), ObjectiveConfig(), 2)
    cfg = tiny_config(Path("out"), Path("target"), records="r", optimizer="muon")
    muon, adamw = build_optimizers(module, cfg)
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


def test_the_rate_rises_then_falls_on_a_cosine() -> None:
    cfg = tiny_config(Path("out"), Path("target"), records="r", steps=100, warmup=0.1, final_lr=0.1, lr=2.0)
    optimizers = build_optimizers(DraftLoss(LMDraft(tiny_llama()), ObjectiveConfig(), 2), cfg)
    schedule = Schedule(optimizers, cfg)
    rates = [schedule.apply(optimizers, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == rates[9] == 2.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(2.0 * 0.55)
    assert rates[-1] == pytest.approx(0.2, rel=1e-2)
    assert optimizers[0].param_groups[0]["lr"] == rates[-1]
