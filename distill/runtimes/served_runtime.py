"""The target in vLLM servers that run already: one writes the responses, it or another one gives hidden states."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch

from decode.common.errors import ConfigError, RunError
from decode.common.progress import get_logger
from decode.common.run_folder import free_disk_check
from decode.models.load import ModelDescription
from distill.config import DistillConfig
from distill.records.record_manifest import RecordedRuntime
from distill.runtimes.engine_passes import EnginePasses, bytes_of_states
from distill.runtimes.serve_command import serve_command
from distill.runtimes.states_file import take_states
from distill.runtimes.vllm_check import check_alone, check_target
from distill.runtimes.vllm_probe import (
    ROUNDING,
    check_tokens,
    distance,
    log_p_of_states,
    probe_ids,
    served_log_p,
)
from distill.runtimes.vllm_runtime import VllmRuntime
from distill.runtimes.vllm_server import ServedEngine, VllmServer

log = get_logger("distill")


class ServedRuntime(VllmRuntime):
    """Everything is checked by `prepare`, before anything of the run is asked."""

    def __init__(self, config: DistillConfig, target: ModelDescription, dtype: str) -> None:
        """Raises ConfigError and InputError for a target that a server gives no states of."""
        check_alone()
        check_target(target)
        self.config, self.target, self.folder, self.dtype = config, target, Path(config.output_dir), dtype
        self._processes, self._running = ExitStack(), None
        self._probe: list[float] = []

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
        self._ids = probe_ids(tokenizer, longest)
        with _refusing():
            for server in self.servers:
                check_tokens(server, tokenizer, self.target.path)
                self._check_room(server)
            self._check_states()
            if self.config.responses == "target":
                self._check_writing()
        log.info("vLLM %s at %s serves %s", versions, " and ".join(one.url for one in self.servers), self.target.path)

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

    def _check_room(self, server: VllmServer) -> None:
        needed = self.longest + (server is self.reader)  # a token is sampled behind each text, and thrown away
        if server.max_model_len < needed:
            raise ConfigError(
                f"the server at {server.url} takes texts of {server.max_model_len} tokens, and the run's longest one "
                f"may have {needed}; start it with --max-model-len {needed}, or use fewer sampling.max_new_tokens"
            )

    def _check_states(self) -> None:
        """Before anything is written: states come, appear here, and are those of this checkpoint's norm and head."""
        kept = self.config.records.features.layers
        passes = EnginePasses(self, kept)
        command = serve_command(self, passes.asked)
        _, file = self.reader.complete(self._ids, 1, temperature=0.0)
        if file is None:
            raise ConfigError(
                f"the server at {self.reader.url} gives no hidden states, of which p is made; start it by\n{command}"
            )
        if not self.reader.appears(file):
            raise ConfigError(
                f"the server at {self.reader.url} wrote hidden states to a file {file.name}, and in "
                f"target.states_folder={self.states_folder} none appeared: it is not the folder of "
                "its shared_storage_path, or not shared with this machine, or its disk is full (see the server's log)"
            )
        found = take_states(file, torch.device("cpu"))["hidden_states"]
        shape, dtype = tuple(found.shape), str(found.dtype).removeprefix("torch.")
        wanted = (len(self._ids), len(passes.asked), self.target.hidden_size)
        if shape != wanted or dtype != self.dtype:
            raise ConfigError(
                f"the server at {self.reader.url} gives states {shape} in {dtype}, and {wanted} in {self.dtype} "
                f"(tokens, layers {passes.asked}, channels) are needed; start it by\n{command}"
            )
        free_disk_check(self.states_folder, bytes_of_states(self, kept))
        self._check_weights(passes, found, command)

    def _check_weights(self, passes: EnginePasses, found: torch.Tensor, command: str) -> None:
        """What the server says of p has to be what the checkpoint's norm and head make of its states."""
        by_layer = dict(zip(passes.asked, found.unbind(1), strict=True))
        ours = log_p_of_states(passes.final(by_layer[passes.last].to(passes.device)), passes.head, self._ids)
        apart = {server.url: distance(served_log_p(server, self._ids), ours) for server in self.servers}
        if 0 in by_layer:
            embedded = self.ends.get_input_embeddings()(torch.tensor(self._ids, device=passes.device)).cpu()
            if not torch.allclose(embedded.float(), by_layer[0].float(), atol=1e-2, rtol=1e-2):
                raise ConfigError(
                    f"the first layer that the server at {self.reader.url} gives is not the embeddings of "
                    f"target.path={self.target.path}; start it by\n{command}"
                )
        for url, far in apart.items():
            if not far <= ROUNDING[self.dtype]:
                raise ConfigError(
                    f"log p of a token by the server at {url} and by the norm and head of target.path="
                    f"{self.target.path} differ by {far:.3g} (root mean square over {len(self._ids) - 1} tokens; "
                    f"rounding is below {ROUNDING[self.dtype]:g}): it serves other weights, or gives other layers than "
                    f"{passes.asked}. Start it by\n{command}"
                )
        self._probe = served_log_p(self.reader, self._ids)
        self.note = self.note.model_copy(update={"log_p": self._probe})

    def _check_writing(self) -> None:
        """A response of one token, as the run asks for them."""
        if self.writer is not self.reader and self.writer.complete(self._ids[:2], 1)[1] is not None:
            raise ConfigError(
                f"the server at target.url={self.writer.url} gives hidden states as well as that at target.states_url: "
                "it writes slowly, and nobody would remove its files. Start it without, or leave target.states_url out"
            )
        call = self.asked() | {"prompts": [self._ids[:2]], "seeds": [0], "max_new_tokens": 1}
        self.engine("write").call(call)

    def _check_same(self, server: VllmServer) -> None:
        """Behind each call and before its answer is used: nothing of other weights gets into the records."""
        far = distance(served_log_p(server, self._ids), self._probe)
        if not far <= ROUNDING[self.dtype]:
            raise RunError(
                f"the server at {server.url} runs other weights than when this run started: log p of a fixed text "
                f"moved by {far:.3g}, and rounding is below {ROUNDING[self.dtype]:g}. Nothing that it gave since its "
                "last good answer was kept. Serve the first weights again and give resume=auto, or use another folder"
            )


@contextmanager
def _refusing() -> Iterator[None]:
    """What a server refuses or fails at here is the configuration's fault; nothing of the run was asked yet."""
    try:
        yield
    except RunError as error:
        raise ConfigError(str(error)) from error
