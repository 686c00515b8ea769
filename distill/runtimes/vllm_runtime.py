"""The target in vLLM: one engine writes all responses, then another one reads the texts and gives their states.

Measured with vLLM 0.32 on two cores (27M Llama, float32, 64 prompts of 64 + 64 tokens): the plain engine writes 1,150
tokens/s, the one that gives states 150, since it verifies a proposed token in every pass, and reads 1,300. Two engines
are never there at once, since a large target has room for one; each start takes half a minute.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal

from decode.common.progress import get_logger
from decode.common.run_folder import free_disk_check
from decode.models.describe import ModelDescription
from distill.config import DistillConfig
from distill.engines.config import STARTED
from distill.engines.vllm_support import (
    OTHERWISE,
    check_alone,
    check_draft,
    check_rope,
    check_sizes,
    check_target,
    devices,
    drafting_with_model,
)
from distill.engines.worker_process import WORKER, Engine, check_python, first_line
from distill.records.record_manifest import RecordedRuntime
from distill.runtimes.engine_runtime import Calls, EnginePasses, EngineRuntime, bytes_of_states
from distill.runtimes.probe import probe_ids
from distill.runtimes.runtime import describe, recorded
from distill.runtimes.states_check import check_engine

log = get_logger("distill")
_KINDS = {"write": "writes the responses", "read": "reads the texts and gives their hidden states"}


class VllmRuntime(EngineRuntime):
    """Starts the engine that is needed when it is needed, and ends the other one."""

    def __init__(self, config: DistillConfig, target: ModelDescription, dtype: str) -> None:
        """Raises ConfigError and InputError for what the engine does not take, and without vLLM's environment."""
        check_alone()
        check_target(target)
        check_sizes(config.target, target)
        version = check_python(config.target.vllm_python, "target.vllm_python", OTHERWISE)
        super().__init__(config, target)
        asked = config.sampling.draft
        self.draft = describe(asked, target)
        if self.draft is not None:
            check_draft(self.draft, target.path, devices(config.target))
        # with a draft vLLM draws by other noise than without, so the texts depend on it
        self.note = RecordedRuntime(name="vllm", version=version, dtype=dtype, draft=recorded(asked, self.draft))
        self._running: tuple[tuple[Any, ...], Engine] | None = None
        self._processes = ExitStack()

    def prepare(self, longest: int) -> None:
        super().prepare(longest)
        check_rope(self.target, longest + 1)
        kept = self.config.records.features.layers
        free_disk_check(self.config.output_dir, bytes_of_states(self, kept))

    def engine(self, kind: Literal["write", "read"], layers: Sequence[int] = ()) -> Calls:
        """The engine that writes, or the one that leaves states of `layers`; it is started, and its states
        are checked, where it does not run."""
        wanted = (kind, *layers)
        if self._running is None or self._running[0] != wanted:
            self.close()
            log.info("starting vLLM %s, which %s; it compiles the model at first", self.note.version, _KINDS[kind])
            settings = self._settings(layers) if kind == "read" else self._settings()
            logs = self.folder / f"vllm-{kind}.log"
            asked = self.config.target
            engine = Engine(asked.vllm_python, WORKER, settings, logs, silence_s=asked.timeout)
            with self.stopwatch.part("starting"):
                self._running = (wanted, self._processes.enter_context(engine))
            if kind == "read":
                assert self.target.tokenizer is not None
                check_engine(EnginePasses(self, layers), probe_ids(self.target.tokenizer, self.longest))
        return self._running[1]

    def close(self) -> None:
        self._processes.close()
        self._running = None

    def _settings(self, layers: Sequence[int] = ()) -> dict[str, Any]:
        """The worker's first line; with layers, of an engine that leaves states."""
        asked = self.config.target
        options = {name: value for name in STARTED if (value := getattr(asked, name)) is not None}
        room, speculation, more = self.longest, None, {}
        if layers:
            room += 1  # a token is sampled behind each text, and thrown away
            more["states"] = {"layers": list(layers), "folder": str((self.folder / "states").resolve())}
            options |= {"tensor_parallel_size": devices(asked), "pipeline_parallel_size": 1}
        else:
            more["seeded"] = True
            if self.draft is not None:
                count = self.config.sampling.draft.num_draft_tokens
                speculation = drafting_with_model(self.draft.path, count, self.draft.family)
                room = min(room + count, self.target.max_positions)
        about = (self.target.path, self.note.dtype, room, self.config.batch_size, self.config.seed)
        return first_line(*about, speculation, revision=asked.revision, options=options, **more)
