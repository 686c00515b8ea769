"""A head of any family, trained on one text that its target wrote until it knows that text by heart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from decode import generate
from decode.drafters.base import Batch
from decode.drafters.head_draft import HeadDraft
from decode.models.describe import describe_model
from decode.models.output_head import ends_of
from distill.objectives.config import ObjectiveConfig
from tests.train.toy import head_config, model_config
from train.drafts.head_blueprint import head_blueprint
from train.live_target import LiveTarget
from train.loss import DraftLoss
from train.metric_sums import Sums

PROMPT = torch.tensor([[5, 17, 250, 33, 90, 120]])
NEW_TOKENS = 24


@dataclass(frozen=True)
class BuiltHead:
    """A head between the ends of its target."""

    target: PreTrainedModel
    head: HeadDraft


@dataclass(frozen=True)
class Overfitted(BuiltHead):
    """What came of it."""

    text: Tensor
    """(1, T) the prompt and the target's greedy continuation of it."""
    loss: float
    """Cross-entropy of a token at the end, in nats."""


def built_head(target_folder: Path, family: str) -> BuiltHead:
    """As training builds it, with random weights."""
    target = AutoModelForCausalLM.from_pretrained(target_folder)
    cfg = head_config(Path("out"), target_folder, family, data={"name": "python_stdlib"})
    blueprint = head_blueprint(cfg, describe_model(model_config(target_folder)), None)
    torch.manual_seed(0)
    head = blueprint.build(ends_of(target)).module
    assert isinstance(head, HeadDraft)
    return BuiltHead(target, head)


def overfit(target_folder: Path, family: str, steps: int = 400) -> Overfitted:
    """Train on the text's own tokens until their loss falls below 0.05, but for no longer than `steps`.

    Cross-entropy, since not every family can copy a whole distribution: Medusa's last layer adds silu(x) > -0.28 to its
    input.
    """
    built = built_head(target_folder, family)
    target, head = built.target, built.head
    text = generate(target, None, PROMPT, max_new_tokens=NEW_TOKENS, eos_token_id=(), temperature=0.0, seed=0).sequences
    batch = LiveTarget(target, head.config.taps)(one_document(text))
    module = DraftLoss(head, ObjectiveConfig(name="cross_entropy", chunk_rows=64), None)
    optimizer, value = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.0), 0.0
    for _ in range(steps):
        loss, values = module(batch)
        value = Sums.from_tensor(values).means()["loss"] or 0.0
        if value < 0.05:
            break
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
    return Overfitted(target, head.requires_grad_(False).eval(), text, value)


def one_document(text: Tensor) -> Batch:  # (1, T)
    """All of whose tokens are learned."""
    positions = torch.arange(text.shape[1])[None]
    return Batch(text, positions, torch.zeros_like(text), torch.ones_like(text, dtype=torch.bool))
