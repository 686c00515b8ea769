"""Passes of vLLM's: raw states from files that it writes, the final ones through the checkpoint's own last norm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decode.common.errors import RunError
from decode.models.hidden_states import FINAL
from decode.models.output_head import head_of
from decode.models.structure import last_norm_of
from distill.records.record_shards import Record
from distill.runtimes.states_file import take_states
from distill.target_passes import Pass, Passes

if TYPE_CHECKING:
    from distill.runtimes.vllm_runtime import VllmRuntime


def asked_layers(runtime: VllmRuntime, layers: Sequence[int]) -> list[int]:
    """Those that an engine gives for `layers`, in the order in which it lays them out: the last one's for the final
    states."""
    return sorted({*layers, runtime.target.num_layers} - {FINAL})


def bytes_of_states(runtime: VllmRuntime, layers: Sequence[int]) -> int:
    """What the files of a batch may take on the disk, before they are read and removed."""
    width = torch.finfo(getattr(torch, runtime.note.dtype)).bits // 8
    token = len(asked_layers(runtime, layers)) * runtime.target.hidden_size * width
    return runtime.config.batch_size * runtime.longest * token


class EnginePasses(Passes):
    """Those of the engine: raw states from it, the final ones through the checkpoint's own last norm."""

    def __init__(self, runtime: VllmRuntime, layers: Sequence[int]) -> None:
        self.runtime, self.layers, self.batch_size = runtime, tuple(layers), runtime.config.batch_size
        self.last = runtime.target.num_layers
        self.asked = asked_layers(runtime, layers)
        self.head = head_of(runtime.ends)  # before the engine, which reads a hub's files from the cache alone

    def of_batch(self, batch: list[Record]) -> Pass:
        rows = [record.ids.tolist() for record in batch]
        files = self.runtime.engine("read", self.asked).call({"rows": rows})["files"]
        states = pad_sequence([self._read(Path(file), ids) for file, ids in zip(files, rows, strict=True)], True)
        of_layer = dict(zip(self.asked, states.unbind(2), strict=True))
        of_layer[FINAL] = self.final(of_layer[self.last])
        read = torch.stack([of_layer[layer] for layer in self.layers], 2) if self.layers else None
        return Pass(batch, of_layer[FINAL], read)

    def final(self, states: Tensor) -> Tensor:
        """(..., d) raw states of the last layer -> the final ones."""
        return last_norm_of(self.runtime.ends)(states.to(self.head.dtype))

    def _read(self, file: Path, ids: list[int]) -> Tensor:  # -> (L, layers, d) on the head's device
        """One text's states, whose file is then removed; RunError where they are those of another text."""
        found = take_states(file, self.device)
        told, shape = found["token_ids"].tolist(), tuple(found["hidden_states"].shape)
        wanted = (len(ids), len(self.asked), self.runtime.target.hidden_size)
        if told != ids or shape != wanted:
            raise RunError(
                f"vLLM {self.runtime.note.version} gave states {shape} of a text of {len(told)} tokens, and {wanted} "
                f"of one of {len(ids)} were asked for: p would be that of another text. Make the environment anew with "
                "`bash scripts/vllm_env.sh`"
            )
        return found["hidden_states"]
