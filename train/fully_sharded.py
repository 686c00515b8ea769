"""engine=fsdp2: each process holds a part of every weight, of its gradient and of the optimizer's state, and a part of
a live target. torch's fully_shard (FSDP2) gathers a weight where it is used; its distributed checkpoints (DCP) go on
with any number of processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.checkpoint.state_dict_saver import save as save_parts
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Optimizer
from transformers import PreTrainedModel

from decode.models.structure import decoder_of, layers_of
from train.loss import DraftLoss

if TYPE_CHECKING:
    from accelerate import Accelerator

PARTS = "parts"
"""Folder of a checkpoint with what DCP writes."""


def all_processes(device: torch.device) -> DeviceMesh:
    """The mesh that weights are spread over; every process calls this."""
    return init_device_mesh(device.type, (dist.get_world_size(),))


def shard_draft(module: DraftLoss, blocks: Sequence[nn.Module], device: torch.device) -> None:
    """In place, before its optimizers are built; `blocks` are gathered one by one."""
    mesh = all_processes(device)
    module.to(device)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)


def shard_target(load: Callable[[], PreTrainedModel], accelerator: Accelerator) -> PreTrainedModel:
    """The frozen target, its layers spread; embedding and output head, which heads use too, stay whole. Processes load
    one after the other, so that one whole copy is in memory at a time."""
    mesh = all_processes(accelerator.device)
    model: PreTrainedModel | None = None
    for turn in range(accelerator.num_processes):
        if turn == accelerator.process_index:
            model = _spread(load(), mesh, accelerator.device)
        accelerator.wait_for_everyone()
    assert model is not None
    return model


def _spread(model: PreTrainedModel, mesh: DeviceMesh, device: torch.device) -> PreTrainedModel:
    ends = {*model.get_input_embeddings().parameters(), *cast(nn.Module, model.get_output_embeddings()).parameters()}
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(decoder_of(model), mesh=mesh, ignored_params=ends)
    return model.to(device)  # type: ignore[arg-type]


def is_sharded(module: nn.Module) -> bool:
    """Whether its forward pass takes all processes."""
    return isinstance(module, FSDPModule)


def whole_weights(accelerator: Accelerator, module: nn.Module) -> dict[str, Tensor]:
    """All weights by name, on rank 0 (and maybe on others), under any engine; every process calls this."""
    if is_sharded(module):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        found = cast(dict[str, Tensor], get_model_state_dict(module, options=options))
        # tied weights were gathered for each of their names
        every = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        again = every - {name for name, _ in module.named_parameters()}
        return {name: one for name, one in found.items() if name not in again}
    return cast(dict[str, Tensor], accelerator.get_state_dict(module))


def keep_in_checkpoints(accelerator: Accelerator, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Have accelerate's checkpoints, which then hold random generators alone, hold these too."""

    def state() -> dict[str, Any]:
        weights, averages = get_state_dict(module, optimizers)
        return {"model": weights, "optimizer": averages}

    def save(_models: Any, _weights: Any, folder: str) -> None:
        save_parts(state(), checkpoint_id=str(Path(folder, PARTS)))

    def load(_models: Any, folder: str) -> None:
        found = state()
        load_parts(found, checkpoint_id=str(Path(folder, PARTS)))
        set_state_dict(module, optimizers, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
