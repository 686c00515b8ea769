"""A vLLM server of a target on loopback, started as the page on records says."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from decode.common.errors import RunError
from distill.runtimes.engine_process import environment_of
from distill.runtimes.http_client import HttpClient
from tests.engines.environment import ROOT, vllm_python

KEY = "a-key"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@dataclass
class Server:
    """One that leaves states of `layers` in `folder`, none where there are none; started and killed at will."""

    target: Path
    folder: Path
    layers: list[int]
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def command(self) -> list[str]:
        speculation = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": self.layers}},
        }
        transfer = {
            "kv_connector": "StatesOnCpu",
            "kv_connector_module_path": "vllm_states",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(self.folder)},
        }
        words = [vllm_python(), "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.target)]
        words += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--api-key", KEY]
        words += ["--max-model-len", "64", "--max-num-seqs", "4", "--enforce-eager", "--no-enable-prefix-caching"]
        words += ["--generation-config", "vllm"]
        states = ["--speculative-config", json.dumps(speculation), "--kv-transfer-config", json.dumps(transfer)]
        return [*words, *states] if self.layers else words

    def start(self, log: Path) -> None:
        """Until it answers."""
        own = {"PYTHONPATH": str(ROOT / "distill/runtimes"), "VLLM_CPU_KVCACHE_SPACE": "1"}
        own |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
        environment = environment_of(vllm_python()) | own
        with log.open("ab") as words:
            self.process = subprocess.Popen(
                self.command(), env=environment, stdout=words, stderr=words, start_new_session=True
            )
        client, ends = HttpClient(self.url.removesuffix("/v1"), None, 5.0), time.monotonic() + 240
        while True:
            try:
                client.once("/health", timeout=2.0)
            except RunError:
                assert self.process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < ends
                time.sleep(0.2)
            else:
                return

    def kill(self) -> None:
        """With all of its processes, in the middle of what they do."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
