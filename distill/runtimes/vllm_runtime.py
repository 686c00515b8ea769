"""The target in vLLM: one engine writes all responses, then another one reads the texts and gives their states.

Measured with vLLM 0.32 on two cores (27M Llama, float32, 64 prompts of 64 + 64 tokens): the plain engine writes 1,150
tokens/s, the one that gives states 150, since it verifies a proposed token in every pass, and reads 1,300. Two engines
are never there at once, since a large target has room for one; each start takes half a minute.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from decode.common.errors import RunError
from decode.common.progress import get_logger
from decode.models.hidden_states import FINAL
from decode.models.load import ModelDescription
from decode.models.output_head import head_of, load_ends
from decode.sampling.stopping import own_eos_ids
from distill.config import DistillConfig
from distill.corpora.corpus import unit_hash
from distill.records.record_manifest import RecordedRuntime
from distill.records.record_shards import Record
from distill.responses import Response, Sampler
from distill.runtimes.engine_process import WORKER, Engine, check_python, local
from distill.runtimes.kept_responses import kept_responses
from distill.runtimes.runtime import Runtime
from distill.runtimes.vllm_check import OTHERWISE, check_alone, check_target
from distill.target_passes import Pass, Passes

log = get_logger("distill")
_REASONS = {"stop": "eos", "length": "length"}
_KINDS = {"write": "writes the responses", "read": "reads the texts and gives their hidden states"}


class VllmRuntime(Runtime):
    """Starts the engine that is needed when it is needed, and ends the other one."""

    writes_first = True

    def __init__(self, config: DistillConfig, target: ModelDescription, dtype: str) -> None:
        """Raises ConfigError and InputError for what the engine does not take, and without vLLM's environment."""
        check_alone()
        check_target(target)
        version = check_python(config.target.vllm_python, "target.vllm_python", OTHERWISE)
        self.config, self.target, self.folder = config, target, Path(config.output_dir)
        self.note = RecordedRuntime(name="vllm", version=version, dtype=dtype)
        self._running: tuple[tuple[Any, ...], Engine] | None = None
        self._processes = ExitStack()

    @cached_property
    def ends(self) -> PreTrainedModel:
        """The target without its layers: the last norm and the output head are read from the checkpoint, no more."""
        with self.stopwatch.part("starting"):
            return load_ends(self.config.target).head.model

    def sampler(self) -> Sampler:
        eos = own_eos_ids(self.ends.generation_config, self.target.vocab_size)
        asked = self.config.sampling
        warp = {name: getattr(asked, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        about = {"max_new_tokens": asked.max_new_tokens, "sampling": warp, "eos": eos}

        def sample(prompts: list[list[int]], rows: list[int], seed: int) -> list[Response]:
            seeds = [int(unit_hash("row", seed, row) * 2**31) for row in rows]
            answer = self.engine("write").call({"prompts": prompts, "seeds": seeds, **about})
            reasons = [_REASONS[reason] for reason in answer["finish_reasons"]]
            return [Response(ids, reason) for ids, reason in zip(answer["new_ids"], reasons, strict=True)]

        return kept_responses(sample, self.folder / "responses")

    def passes(self, layers: Sequence[int]) -> EnginePasses:
        return EnginePasses(self, layers)

    def weights(self) -> None:
        """They are in another process."""

    def engine(self, kind: Literal["write", "read"], layers: Sequence[int] = ()) -> Engine:
        """The engine that writes, or the one that leaves states of `layers`; it is started where it does not run."""
        wanted = (kind, *layers)
        if self._running is None or self._running[0] != wanted:
            self.close()
            log.info("starting vLLM %s, which %s; it compiles the model at first", self.note.version, _KINDS[kind])
            settings = self._settings(layers) if kind == "read" else self._settings()
            logs = self.folder / f"vllm-{kind}.log"
            engine = Engine(self.config.target.vllm_python, WORKER, settings, logs)
            with self.stopwatch.part("starting"):
                self._running = (wanted, self._processes.enter_context(engine))
        return self._running[1]

    def close(self) -> None:
        self._processes.close()
        self._running = None

    def _settings(self, layers: Sequence[int] = ()) -> dict[str, Any]:
        """The worker's first line; with layers, of an engine that leaves states."""
        settings = {
            "target": local(self.target.path),
            "revision": self.config.target.revision,
            "speculation": None,
            "dtype": self.note.dtype,
            "max_model_len": self.longest,
            "max_num_seqs": self.config.batch_size,
            "seed": self.config.seed,
        }
        if not layers:
            return settings
        # A token is sampled behind each text, and thrown away.
        states = {"layers": list(layers), "folder": str((self.folder / "states").resolve())}
        return settings | {"max_model_len": self.longest + 1, "states": states}


class EnginePasses(Passes):
    """Those of the engine: raw states from it, the final ones through the checkpoint's own last norm."""

    def __init__(self, runtime: VllmRuntime, layers: Sequence[int]) -> None:
        self.runtime, self.layers, self.batch_size = runtime, tuple(layers), runtime.config.batch_size
        self.last = runtime.target.num_layers
        self.asked = sorted({*layers, self.last} - {FINAL})
        """Layers in the order in which the engine lays them out."""
        self.head = head_of(runtime.ends)  # before the engine, which reads a hub's files from the cache alone

    def of_batch(self, batch: list[Record]) -> Pass:
        rows = [record.ids.tolist() for record in batch]
        files = self.runtime.engine("read", self.asked).call({"rows": rows})["files"]
        states = pad_sequence([self._read(Path(file), ids) for file, ids in zip(files, rows, strict=True)], True)
        of_layer = dict(zip(self.asked, states.unbind(2), strict=True))
        of_layer[FINAL] = self._norm(of_layer[self.last])
        read = torch.stack([of_layer[layer] for layer in self.layers], 2) if self.layers else None
        return Pass(batch, of_layer[FINAL], read)

    def _norm(self, states: Tensor) -> Tensor:
        norm = self.runtime.ends.base_model.get_submodule("norm")
        assert isinstance(norm, nn.Module)
        return norm(states.to(self.head.dtype))

    def _read(self, file: Path, ids: list[int]) -> Tensor:  # -> (L, layers, d) on the head's device
        """One text's states, whose file is then removed; RunError where they are those of another text."""
        found = load_file(file, device=str(self.device))
        file.unlink()
        told, shape = found["token_ids"].tolist(), tuple(found["hidden_states"].shape)
        wanted = (len(ids), len(self.asked), self.runtime.target.hidden_size)
        if told != ids or shape != wanted:
            raise RunError(
                f"vLLM {self.runtime.note.version} gave states {shape} of a text of {len(told)} tokens, and {wanted} "
                f"of one of {len(ids)} were asked for: p would be that of another text. Make the environment anew with "
                "`bash scripts/vllm_env.sh`"
            )
        return found["hidden_states"]
