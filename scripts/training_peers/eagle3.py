"""EAGLE-3 by the speculators library's own model, loss and optimizer, for peer.py.

Its Trainer asks for a GPU, so that the loop is ours; flex_attention has no backward pass on CPUs and its losses are
Triton kernels, so that attention and loss are those of its reference.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from speculators.models.eagle3.core import Eagle3DraftModel  # pyright: ignore[reportMissingImports]
from speculators.train.optimizers import build_optimizers  # pyright: ignore[reportMissingImports]
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoConfig

from decode.models.load import load_model
from train.batches import StepReader
from train.config import TrainConfig
from train.optimizers import Schedule
from train.packing import Order
from train.training_inputs import Inputs


def by_speculators(cfg: TrainConfig, inputs: Inputs, clock: Any) -> Any:
    """An EAGLE-3 head over the same rows, layers and draft vocabulary as ours."""
    target, head = load_model(cfg.target), cfg.draft.head
    draft = new_head(cfg, inputs)
    (optimizer,) = build_optimizers(draft, SimpleNamespace(optimizer="adamw", lr=cfg.lr, weight_decay=cfg.weight_decay))
    for group in optimizer.param_groups:
        group["betas"] = cfg.betas
    schedule = LambdaLR(optimizer, Schedule([optimizer], cfg).factor)
    told, _ = Eagle3DraftModel.get_trainer_kwargs(
        loss_fn="kl_div", loss_implementation="eager", ttt_steps=head.depth, ttt_step_loss_decay=1.0
    )
    reader = StepReader(inputs.train, Order(len(inputs.train.rows), 1, cfg.seed), (0, 1, 1, 1))
    for step, (batch,) in enumerate(reader.steps(0, cfg.steps), 1):
        clock.read(int((batch.document >= 0).sum()))
        given = told | read_by(target, batch, inputs.blueprint.layers_read)
        with torch.autocast("cpu", torch.bfloat16):
            _, loss, _ = draft(**given)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), cfg.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        clock.step(step)
    return draft


def new_head(cfg: TrainConfig, inputs: Inputs) -> Any:
    """Of random weights, with the vocabulary that our own head would draw from."""
    config, vocab = AutoConfig.from_pretrained(cfg.target.path), inputs.blueprint.vocab  # type: ignore[attr-defined]
    config.num_hidden_layers = 1
    known = torch.zeros(config.vocab_size, dtype=torch.bool)
    known[vocab] = True
    return Eagle3DraftModel.from_training_args(
        config,
        t2d=known,
        d2t=vocab - torch.arange(len(vocab)),
        draft_vocab_size=len(vocab),
        norm_before_residual=False,
        fc_norm=True,  # EAGLE-3.1, as ours by default
        norm_output=True,
        target_layer_ids=list(inputs.blueprint.layers_read),
        verifier_name_or_path=cfg.target.path,
        ttt_steps=cfg.draft.head.depth,
        draft_attn_impl="eager",
    )


@torch.no_grad()
def read_by(target: Any, batch: Any, layers: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """A row's hidden states, shifted as the library's own reader shifts them: token i + 1 beside the state of i."""
    last: list[torch.Tensor] = []
    with target.model.norm.register_forward_pre_hook(lambda module, given: last.append(given[0])):
        found = target.model(batch.ids, position_ids=batch.positions, output_hidden_states=True)
    states = torch.cat([found.hidden_states[layer] for layer in layers], -1)
    document = batch.document
    return {
        "hidden_states": states[:, :-1].float(),
        "input_ids": batch.ids[:, 1:],
        "document_ids": document[:, 1:],
        "loss_mask": batch.loss_mask[:, 1:],
        "position_ids": batch.positions[:, 1:],
        "verifier_last_hidden_states": last[0][:, 1:].float(),
    }
