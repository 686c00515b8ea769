"""`python -m train`, writing down on every rank which rows it read and how much optimizer state it holds; with
DIE_AT=STEP every rank kills itself there."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from torch import Tensor
from torch.distributed.tensor import DTensor

from train.__main__ import main
from train.training_loop import TrainingLoop

rows_read: list[list[int]] = []
take_step = TrainingLoop.take_step
run = TrainingLoop.run


def probed_step(self: TrainingLoop, step: int, batches: list) -> None:
    rank = self.reader.split[0]
    if step == int(os.environ.get("DIE_AT", "-1")):
        os.kill(os.getpid(), signal.SIGKILL)
    rows_read.append([row for micro in self.reader.rows_of(step, rank) for row in micro])
    take_step(self, step, batches)


def probed_run(self: TrainingLoop):
    state = run(self)
    found = {
        "rows": rows_read,
        "optimizer_elements": sum(map(_elements, self.compute.optimizers)),
        "num_parameters": sum(_whole_size(weight) for weight in self.compute.module.parameters()),
    }
    Path(self.cfg.output_dir, f"probe_{os.environ['RANK']}.json").write_text(json.dumps(found))
    return state


def _elements(optimizer) -> int:
    """Elements of the two averages of AdamW that this rank holds."""
    while hasattr(optimizer, "optimizer"):  # accelerate's wrapper, then DeepSpeed's
        optimizer = optimizer.optimizer
    tensors = (value for state in optimizer.state.values() for value in state.values())
    return sum(_own(value).numel() for value in tensors if isinstance(value, Tensor) and value.numel() > 1)


def _own(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole_size(weight) -> int:
    return getattr(weight, "ds_numel", weight.numel())


TrainingLoop.take_step = probed_step  # type: ignore[method-assign]
TrainingLoop.run = probed_run  # type: ignore[method-assign]

if __name__ == "__main__":
    main()
