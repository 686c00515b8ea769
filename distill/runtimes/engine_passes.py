"""Passes of vLLM's: raw states from files that it writes, the final ones through the checkpoint's own last norm.

The engine holds most of the card, so states lie in the machine's memory, and go to the head's device a part at a time:
parts of one size, whatever is free there, so that the same records give the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from decode.common.errors import RunError
from decode.models.hidden_states import FINAL
from decode.models.output_head import head_of
from decode.models.structure import last_norm_of
from distill.records.record_shards import Record
from distill.runtimes.states_check import fault_of_next, fault_of_text
from distill.runtimes.states_file import take_states
from distill.target_passes import STATE_ENTRIES, Pass, Passes

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
        answer = self.runtime.engine("read", self.asked).call({"rows": rows})
        hidden = torch.zeros(len(rows), max(map(len, rows)), self.runtime.target.hidden_size, dtype=self.head.dtype)
        read = hidden[:, :, None].repeat(1, 1, len(self.layers), 1) if self.layers else None
        for row, (file, ids) in enumerate(zip(answer["files"], rows, strict=True)):
            states = self.states_in(file, ids)
            self._check(fault_of_text(self, states, len(ids)), "gave ")
            of_layer = dict(zip(self.asked, states.unbind(1), strict=True))
            of_layer[FINAL] = self.final(of_layer[self.last])
            if "next_ids" in answer:
                self._check(fault_of_next(self, of_layer[FINAL][-1], answer["next_ids"][row]))
            hidden[row, : len(ids)] = of_layer[FINAL]
            if read is not None:
                read[row, : len(ids)] = torch.stack([of_layer[layer] for layer in self.layers], 1)
        return Pass(batch, hidden, read)

    def final(self, states: Tensor) -> Tensor:
        """(L, d) raw states of the last layer, on the CPU -> the final ones, there too."""
        norm = last_norm_of(self.runtime.ends)
        parts = states.split(max(1, STATE_ENTRIES // states.shape[-1]))
        return torch.cat([norm(part.to(self.device, self.head.dtype)).cpu() for part in parts])

    def states_in(self, file: str, ids: list[int]) -> Tensor:  # -> (L, layers, d)
        """One text's states, whose file is then removed; RunError where they are those of another text."""
        found = take_states(Path(file))
        told = found["token_ids"].tolist()
        if told != ids:
            raise RunError(
                f"vLLM {self.runtime.note.version} gave states of a text of {len(told)} tokens, and those of one of "
                f"{len(ids)} were asked for: p would be that of another text. Make the environment anew with "
                "`bash scripts/vllm_env.sh`"
            )
        return found["hidden_states"]

    def _check(self, fault: str | None, did: str = "") -> None:
        if fault is not None:
            raise RunError(
                f"vLLM {self.runtime.note.version} {did}{fault}. It gave sound states of a fixed text before, and "
                "nothing of this one was recorded. Use another version of vLLM (target.vllm_python), a wider "
                "target.dtype, or target.runtime=transformers, and another output_dir"
            )
