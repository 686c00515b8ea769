"""The target in vLLM servers that run already: one writes the responses, it or another one gives hidden states."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

from decode.common.errors import ConfigError
from decode.common.progress import get_logger
from decode.common.run_folder import free_disk_check
from decode.models.describe import ModelDescription
from distill.config import DistillConfig
from distill.engines.http_client import refusing
from distill.engines.vllm_command import states_command
from distill.engines.vllm_support import check_rope, check_target
from distill.records.record_manifest import RecordedRuntime
from distill.runtimes.engine_runtime import EnginePasses, EngineRuntime, bytes_of_states
from distill.runtimes.probe import check_length, check_tokens, check_weights, probe_ids
from distill.runtimes.states_check import fault_of_p, fault_of_probe
from distill.runtimes.states_file import take_states
from distill.runtimes.vllm_server import ServedEngine, VllmServer

log = get_logger("distill")


class ServedRuntime(EngineRuntime):
    """Everything is checked by `prepare`, before anything of the run is asked."""

    def __init__(self, config: DistillConfig, target: ModelDescription, dtype: str) -> None:
        """Raises InputError for a target that a server gives no states of."""
        check_target(target)
        super().__init__(config, target)
        self.dtype = dtype
        self.probe: list[int] = []
        """The fixed text by which the server's weights are known."""

    @cached_property
    def states_folder(self) -> Path:
        """Where the server's files appear here."""
        return Path(str(self.config.target.states_folder)).absolute()

    @cached_property
    def reader(self) -> VllmServer:
        """The server that gives states."""
        asked = self.config.target
        return self._connect(str(asked.states_url or asked.url))

    @cached_property
    def writer(self) -> VllmServer:
        """The server that writes."""
        asked = self.config.target
        is_one = asked.states_url in (None, asked.url)
        return self.reader if is_one else self._connect(str(asked.url))

    @property
    def servers(self) -> list[VllmServer]:
        """Those that the run needs."""
        writes = self.config.responses == "target" and self.writer is not self.reader
        return [self.writer, self.reader] if writes else [self.reader]

    def prepare(self, longest: int) -> None:
        self.longest = longest
        versions = ", ".join(dict.fromkeys(server.version for server in self.servers))
        self.note = RecordedRuntime(name="vllm", version=versions, dtype=self.dtype)
        tokenizer = self.target.tokenizer
        assert tokenizer is not None
        self.probe = probe_ids(tokenizer, longest)
        check_servers(self)
        log.info("vLLM %s at %s serves %s", versions, " and ".join(one.url for one in self.servers), self.target.path)

    def remember(self) -> None:
        """What the server that reads gives of the fixed text, by which its weights are known from now on."""
        self.note = self.note.model_copy(update={"log_p": self.reader.log_p(self.probe)})

    def engine(self, kind: Literal["write", "read"], layers: Sequence[int] = ()) -> ServedEngine:
        server = self.writer if kind == "write" else self.reader
        return ServedEngine(server, self.config.batch_size, self._check_same)

    def close(self) -> None:
        """Remove what requests that were in flight when a run ended have left."""
        for file in self.states_folder.glob(f"*{self._run}-*"):
            file.unlink(missing_ok=True)

    @property
    def _run(self) -> str:
        return f"draftsmith-{hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()[:16]}"

    def _connect(self, url: str) -> VllmServer:
        return VllmServer.connect(url, self.states_folder, self._run, self.config.target.timeout)

    def _check_same(self, server: VllmServer) -> None:
        """Behind each call and before its answer is used: nothing of other weights gets into the records."""
        check_weights(server.url, server.log_p(self.probe), self.note.log_p or [], self.dtype)


def check_servers(runtime: ServedRuntime) -> None:
    """What a running server has to give before anything of a run is asked of it. Raises ConfigError."""
    tokenizer = runtime.target.tokenizer
    assert tokenizer is not None
    with refusing():
        for server in runtime.servers:
            check_tokens(server.url, server.model, server.tokenize, tokenizer, runtime.target.path)
            # a token is sampled behind each text of the reader, and thrown away
            check_length(server.url, server.max_model_len, runtime.longest + (server is runtime.reader))
            check_rope(runtime.target, server.max_model_len)
        check_states(runtime)
        runtime.remember()
        if runtime.config.responses == "target":
            check_writing(runtime)


def check_states(runtime: ServedRuntime) -> None:
    """Before anything is written: states come, appear here, and are those of this checkpoint, as is p."""
    kept = runtime.config.records.features.layers
    passes = EnginePasses(runtime, kept)
    command = states_command(
        runtime.target.path,
        runtime.dtype,
        runtime.longest,
        runtime.target.max_positions,
        passes.asked,
        str(runtime.states_folder),
    )
    _, file = runtime.reader.complete(runtime.probe, 1, temperature=0.0)
    if file is None:
        raise ConfigError(
            f"the server at {runtime.reader.url} gives no hidden states, of which p is made; start it by\n{command}"
        )
    if not runtime.reader.appears(file):
        raise ConfigError(
            f"the server at {runtime.reader.url} wrote hidden states to {file.name}, and none appeared in "
            f"target.states_folder={runtime.states_folder}: it is not its shared_storage_path, not shared with this "
            "machine, or its disk is full"
        )
    states = take_states(file)["hidden_states"]
    fault = fault_of_probe(passes, states, runtime.probe)
    if fault is not None:
        raise ConfigError(f"the server at {runtime.reader.url} gives {fault}; start it by\n{command}")
    free_disk_check(runtime.states_folder, bytes_of_states(runtime, kept))
    for server in runtime.servers:
        log_p = server.log_p(runtime.probe)
        fault = fault_of_p(passes, states, runtime.probe, log_p, f"the server at {server.url}")
        if fault is not None:
            raise ConfigError(f"{fault}. Start it by\n{command}")


def check_writing(runtime: ServedRuntime) -> None:
    """A response of one token, as the run asks for them."""
    if runtime.writer is not runtime.reader and runtime.writer.complete(runtime.probe[:2], 1)[1] is not None:
        raise ConfigError(
            f"the server at target.url={runtime.writer.url} gives hidden states as well as that at target.states_url: "
            "it writes slowly, and nobody would remove its files. Start it without, or leave target.states_url out"
        )
    call = runtime.asked() | {"prompts": [runtime.probe[:2]], "seeds": [0], "max_new_tokens": 1}
    runtime.engine("write").call(call)
