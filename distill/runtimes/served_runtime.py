"""The target in vLLM servers that run already: one writes the responses, it or another one gives hidden states."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Literal

from decode.common.errors import RunError
from decode.common.progress import get_logger
from decode.models.load import ModelDescription
from distill.config import DistillConfig
from distill.records.record_manifest import RecordedRuntime
from distill.runtimes.served_engine import ServedEngine
from distill.runtimes.server_checks import check_servers
from distill.runtimes.vllm_check import check_alone, check_target
from distill.runtimes.vllm_probe import (
    ROUNDING,
    distance,
    probe_ids,
    served_log_p,
)
from distill.runtimes.vllm_runtime import VllmRuntime
from distill.runtimes.vllm_server import VllmServer

log = get_logger("distill")


class ServedRuntime(VllmRuntime):
    """Everything is checked by `prepare`, before anything of the run is asked."""

    def __init__(self, config: DistillConfig, target: ModelDescription, dtype: str) -> None:
        """Raises ConfigError and InputError for a target that a server gives no states of."""
        check_alone()
        check_target(target)
        self.config, self.target, self.folder, self.dtype = config, target, Path(config.output_dir), dtype
        self._processes, self._running = ExitStack(), None
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
        self.note = self.note.model_copy(update={"log_p": served_log_p(self.reader, self.probe)})

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
        far = distance(served_log_p(server, self.probe), self.note.log_p or [])
        if not far <= ROUNDING[self.dtype]:
            raise RunError(
                f"the server at {server.url} runs other weights than when this run started: log p of a fixed text "
                f"moved by {far:.3g}, and rounding is below {ROUNDING[self.dtype]:g}. Nothing that it gave since its "
                "last good answer was kept. Serve the first weights again and give resume=auto, or use another folder"
            )
