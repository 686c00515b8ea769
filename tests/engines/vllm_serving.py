"""A vLLM server of a target on loopback, started as the page on records says."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

from distill.engines.server import HOST, PORT, StartedServer, reserved_port
from distill.engines.vllm_command import ALWAYS, states_options
from distill.engines.worker_process import WORKER, environment_of
from tests.engines.environment import vllm_python

KEY = "a-key"


def free_port() -> int:
    with reserved_port() as port:
        return port


@dataclass
class Server:
    """One that leaves states of `layers` in `folder`, none where there are none; started and killed at will."""

    target: Path
    folder: Path
    layers: list[int]
    port: int = field(default_factory=free_port)
    started: StartedServer | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/v1"

    def command(self) -> list[str]:
        words = [vllm_python(), "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.target)]
        words += ["--host", HOST, "--port", PORT, "--dtype", "float32", "--api-key", KEY, *ALWAYS]
        words += ["--max-model-len", "64", "--max-num-seqs", "4", "--enforce-eager", "--generation-config", "vllm"]
        return [*words, *states_options(self.layers, str(self.folder), on_cpu=True)] if self.layers else words

    def start(self, log: Path) -> None:
        """Until it answers."""
        environment = environment_of(vllm_python()) | {"PYTHONPATH": str(WORKER.parent)}
        self.started = StartedServer.start(self.command(), environment, log, self.port)
        self.started.wait(240)

    def kill(self) -> None:
        """With all of its processes, in the middle of what they do."""
        if self.started is not None and self.started.process.poll() is None:
            os.killpg(self.started.process.pid, signal.SIGKILL)
            self.started.process.wait()
