"""The checkpoints of a run: written, read back, and the old ones dropped."""

from __future__ import annotations

import re
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decode.common.run_folder import on_main
from train.checkpoints.state import TrainState, read_state, write_state
from train.checkpoints.whole_folders import fresh, give_name, remove

if TYPE_CHECKING:
    from accelerate import Accelerator

BEST_WEIGHTS = "model.safetensors"
"""Of the kept weights, and as accelerate calls those of a checkpoint."""
WRAPPED = "module."


class Checkpoints:
    """The folder `checkpoints/` of a run: `step_N` with all of the state, `best_N` with the kept weights alone."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def newest(self) -> Path | None:
        """The last complete checkpoint."""
        found = self._numbered("step")
        return found[max(found)] if found else None

    def best_weights(self, step: int) -> Path:
        """File of the weights kept at `step`."""
        return self.folder / f"best_{step:08d}" / BEST_WEIGHTS

    def save(self, accelerator: Accelerator, state: TrainState) -> None:
        """Write the checkpoint of `state.step`; every rank calls this."""
        final = self.folder / f"step_{state.step:08d}"
        draft = self._begin(accelerator, final)
        accelerator.save_state(str(draft))
        if accelerator.is_main_process:
            write_state(draft, state, accelerator.num_processes)
        self._commit(accelerator, draft, final)
        if accelerator.is_main_process:
            self._drop_old()

    def save_best(self, accelerator: Accelerator, step: int, weights: dict[str, Any]) -> None:
        """Keep these weights; older best ones stay while a checkpoint names them."""
        from safetensors.torch import save_file

        final = self.folder / f"best_{step:08d}"
        draft = self._begin(accelerator, final)
        if accelerator.is_main_process:
            save_file(without_aliases(weights), draft / BEST_WEIGHTS)
        self._commit(accelerator, draft, final)

    def restore(self, accelerator: Accelerator, checkpoint: Path) -> TrainState:
        """Load a checkpoint into what the accelerator has prepared; every rank calls this."""
        saved = read_state(checkpoint)
        accelerator.load_state(str(checkpoint))
        accelerator.step = 0  # of micro-steps: it was saved, and may be of another gradient_accumulation
        return saved.state

    def forget_after(self, step: int) -> None:
        """Remove what a run wrote after `step`, and what a killed one left half-written; rank 0 only."""
        later = [path for kind in ("step", "best") for number, path in self._numbered(kind).items() if number > step]
        for path in later:
            remove(path)
        self.sweep()

    def sweep(self) -> None:
        """Remove what writes and removals that were cut short have left; rank 0 only, between writes."""
        for path in self.folder.glob(".*.tmp"):
            shutil.rmtree(path, ignore_errors=True)

    def _begin(self, accelerator: Accelerator, final: Path) -> Path:
        """An empty folder, the same one on all ranks."""
        draft = on_main(accelerator.is_main_process, lambda: fresh(final))
        accelerator.wait_for_everyone()
        return draft

    def _commit(self, accelerator: Accelerator, draft: Path, final: Path) -> None:
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            give_name(draft, final)
        accelerator.wait_for_everyone()

    def _drop_old(self) -> None:
        """Remove all but the newest checkpoints, and the best weights that none of these names."""
        self.sweep()
        steps = self._numbered("step")
        for number in sorted(steps)[: -self.keep]:
            remove(steps.pop(number))
        needed = {read_state(path).best_step for path in steps.values()}
        for number, path in self._numbered("best").items():
            if number not in needed:
                remove(path)

    def _numbered(self, kind: str) -> dict[int, Path]:
        found = {path: re.fullmatch(rf"{kind}_(\d+)", path.name) for path in self.folder.glob(f"{kind}_*")}
        return {int(match[1]): path for path, match in found.items() if match}


def save_unwrapped(accelerator: Accelerator) -> None:
    """Have checkpoints name weights as the draft does. DDP puts `module.` before the names, and a single process on a
    GPU is not wrapped, so that neither could load what the other one saved."""

    def save(_models: Any, weights: list[dict[str, Any]], _folder: str) -> None:
        pairs = [[(name.removeprefix(WRAPPED), one) for name, one in each.items()] for each in weights]
        weights[:] = map(OrderedDict, pairs)  # of any other mapping accelerate does not leave out what is tied

    def load(models: list[Any], _folder: str) -> None:
        models[:] = [accelerator.unwrap_model(one) for one in models]

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def without_aliases(weights: dict[str, Any]) -> dict[str, Any]:
    """The state dict with each storage once (tied weights have several names), contiguous, on the CPU."""
    seen: set[tuple[int, Any]] = set()
    kept = {}
    for name, tensor in weights.items():
        storage = (tensor.data_ptr(), tensor.shape)
        if storage not in seen:
            seen.add(storage)
            kept[name] = tensor.detach().cpu().contiguous()
    return kept
