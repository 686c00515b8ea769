"""The target in an engine of vLLM's, wherever that runs: all responses first, then passes over the texts.

Raw states come from files that it writes, the final ones from them through the checkpoint's own last norm. The engine
holds most of the card, so states lie in the machine's memory, and go to the head's device a part at a time: parts of
one size, whatever is free there, so that the same records give the same bits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.common.errors import RunError
from decode.models.describe import ModelDescription
from decode.models.hidden_states import FINAL
from decode.models.output_head import head_of
from decode.models.small import load_ends
from decode.models.structure import last_norm_of
from decode.sampling.stopping import own_eos_ids
from distill.config import DistillConfig
from distill.corpora.corpus import unit_hash
from distill.engines.worker_process import WorkerTexts
from distill.records.record_shards import Record
from distill.responses import OnResponse, Response, Sampler, ignored
from distill.runtimes.kept_responses import kept_responses
from distill.runtimes.probe import ROUNDING
from distill.runtimes.runtime import Runtime
from distill.runtimes.states_file import take_states
from distill.target_passes import STATE_ENTRIES, Pass, Passes

_REASONS = {"stop": "eos", "length": "length"}
OFTEN = 10
"""What a single log p may differ by, in root mean squares of many: each text of a run is asked for one."""


class Calls(Protocol):
    """What answers a worker's calls (`vllm_worker`), wherever it runs."""

    def call(self, content: dict[str, Any]) -> dict[str, Any]:
        """Raises RunError."""
        ...


class EngineRuntime(Runtime):
    """Asks an engine for both kinds of passes; which engine that is, is a subclass's."""

    writes_first = True

    def __init__(self, config: DistillConfig, target: ModelDescription) -> None:
        self.config, self.target, self.folder = config, target, Path(config.output_dir)

    @abstractmethod
    def engine(self, kind: Literal["write", "read"], layers: Sequence[int] = ()) -> Calls:
        """The engine that writes, or the one that leaves states of `layers`."""

    @cached_property
    def ends(self) -> PreTrainedModel:
        """The target without its layers: the last norm and the output head are read from the checkpoint, no more."""
        with self.stopwatch.part("starting"):
            return load_ends(self.config.target).head.model

    def asked(self) -> dict[str, Any]:
        """How responses are to be written."""
        eos = own_eos_ids(self.ends.generation_config, self.target.vocab_size)
        asked = self.config.sampling
        warp = {name: getattr(asked, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        return {"max_new_tokens": asked.max_new_tokens, "sampling": warp, "eos": eos}

    def sampler(self) -> Sampler:
        about = self.asked()

        def sample(
            prompts: list[list[int]], rows: list[int], seed: int, on_response: OnResponse = ignored
        ) -> list[Response]:
            seeds = [int(unit_hash("row", seed, row) * 2**31) for row in rows]
            found = WorkerTexts.model_validate(self.engine("write").call({"prompts": prompts, "seeds": seeds, **about}))
            reasons = [_REASONS[reason] for reason in found.finish_reasons]
            passes = found.passes or [None] * len(prompts)
            return [Response(*one) for one in zip(found.new_ids, reasons, passes, strict=True)]

        return kept_responses(sample, self.folder / "responses", self.config.records.shard_size)

    def passes(self, layers: Sequence[int]) -> EnginePasses:
        return EnginePasses(self, layers)


class EnginePasses(Passes):
    """Those of the engine: raw states from it, the final ones through the checkpoint's own last norm."""

    def __init__(self, runtime: EngineRuntime, layers: Sequence[int]) -> None:
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
                f"vLLM {self.runtime.note.version} {did}{fault}, and this text was not recorded. Use another version "
                "of vLLM (target.vllm_python), a wider target.dtype, or target.runtime=transformers, and another "
                "output_dir"
            )


def asked_layers(runtime: EngineRuntime, layers: Sequence[int]) -> list[int]:
    """Those that an engine gives for `layers`, in the order in which it lays them out: the last one's for the final
    states."""
    return sorted({*layers, runtime.target.num_layers} - {FINAL})


def bytes_of_states(runtime: EngineRuntime, layers: Sequence[int]) -> int:
    """What the files of a batch may take on the disk, before they are read and removed."""
    width = torch.finfo(getattr(torch, runtime.note.dtype)).bits // 8
    token = len(asked_layers(runtime, layers)) * runtime.target.hidden_size * width
    return runtime.config.batch_size * runtime.longest * token


def fault_of_text(passes: EnginePasses, states: Tensor, num_tokens: int) -> str | None:
    """Of states (L, layers, d) of any text."""
    shape, dtype = tuple(states.shape), str(states.dtype).removeprefix("torch.")
    wanted = (num_tokens, len(passes.asked), passes.runtime.target.hidden_size)
    if shape != wanted or dtype != passes.runtime.note.dtype:
        return (
            f"states {shape} in {dtype}, and {wanted} in {passes.runtime.note.dtype} (tokens, layers {passes.asked}, "
            "channels) are needed"
        )
    for layer, found in zip(passes.asked, states.unbind(1), strict=True):
        if not found.isfinite().all():
            return f"states of layer {layer} that are not finite"
        zeros = int((~found.any(-1)).sum())
        if zeros and layer:  # an embedding may be: of padding, or of a token that no text has
            return f"states of layer {layer} that are all zero at {zeros} of {num_tokens} tokens"
    return None


def fault_of_next(passes: EnginePasses, final: Tensor, token: int) -> str | None:
    """The likeliest token behind a text, as the engine drew it, has to be that of the text's last final state (d,)."""
    log_p, most = passes.head(final).float().log_softmax(-1), OFTEN * ROUNDING[passes.runtime.note.dtype]
    best, far = int(log_p.argmax()), float(log_p.max() - log_p[token])
    if far <= most:
        return None
    return (
        f"drew token {token} behind a text, and by the states that it gave of it token {best} is likelier by {far:.3g} "
        f"(log p; rounding is below {most:g})"
    )
