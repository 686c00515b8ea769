"""An engine in a worker process and an environment of its own, loaded once, asked call by call: a JSON object per line.

vLLM pins its own torch and transformers, so it lives apart (`scripts/vllm_env.sh`). Between calls the worker is stopped
(SIGSTOP): its OpenMP threads would spin for some time into whatever runs next.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Timer
from typing import IO, Any

import torch
from pydantic import BaseModel

from decode.common.errors import ConfigError, RunError
from distill.engines.server import last_words

WORKER = Path(__file__).parent / "inside_vllm/vllm_worker.py"
_LAST_LINES = 15
_VERSION = """
import importlib.util, pathlib, runpy, sys
found = importlib.util.find_spec("vllm")
if found is None: sys.exit(1)
print(runpy.run_path(str(pathlib.Path(found.origin).with_name("_version.py")))["__version__"])
"""


def check_python(python: str, key: str, otherwise: str) -> str:
    """vLLM's version there. ConfigError where that interpreter, the value of `key`, is not there, or its environment
    lacks vLLM; `otherwise` is how to do without."""
    remedy = f"Make the environment with `bash scripts/vllm_env.sh`, name another with {key}=, or {otherwise}"
    if not Path(python).is_file():
        raise ConfigError(f"{key}={python} does not exist, and vLLM runs in an environment of its own. {remedy}")
    done = subprocess.run([python, "-P", "-c", _VERSION], check=False, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"{key}={python} has no package vllm. {remedy}")
    return done.stdout.strip()


def local(path: str) -> str:
    """A folder's absolute path, since a relative one may be taken for a hub id; a hub id as it is."""
    return str(Path(path).resolve()) if Path(path).exists() else path


def environment_of(python: str) -> dict[str, str]:
    """Of a worker or a server: as many threads as our own arms have, and on a CPU a cache of a gigabyte, unless the
    user's own says otherwise, and Intel's OpenMP where it is installed: without it vLLM warns of a significant loss in
    speculative decoding."""
    openmp = Path(python).absolute().parent.parent / "lib/libiomp5.so"
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        **os.environ,
        **({"LD_PRELOAD": str(openmp)} if openmp.is_file() else {}),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "PYTHONSAFEPATH": "1",  # else the worker's folder, which has a statistics.py, hides the library's
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


def first_line(
    target: str,
    dtype: str,
    max_model_len: int,
    max_num_seqs: int,
    seed: int,
    speculation: Mapping[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """What a worker is told first; a text and the tokens drafted behind it have `max_model_len` tokens at most."""
    return {
        "target": local(target),
        "speculation": speculation,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "seed": seed,
        **more,
    }


class WorkerTexts(BaseModel, frozen=True):
    """A worker's answer where texts were asked for, by prompt."""

    new_ids: list[list[int]]
    finish_reasons: list[str] = []
    passes: list[int] = []
    """Steps that brought tokens of each; [] where that is not known."""
    arrivals: list[tuple[float, list[int]]] = []
    """After how many seconds how many tokens came of each, where it was asked for."""
    seconds: float = 0.0


@dataclass
class Engine:
    """One engine in its worker process: `with Engine(...) as engine: engine.call(...)`."""

    python: str
    worker: Path
    settings: dict[str, Any]
    log: Path
    """What the worker says; its end is shown when it dies."""
    silence_s: float | None = None
    """Seconds without a line from it after which it is ended: it hangs. None waits for ever."""
    version: str = ""
    _is_silent: bool = False
    _process: subprocess.Popen[str] | None = field(default=None, repr=False)

    def __enter__(self) -> Engine:
        with self.log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [self.python, str(self.worker)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment_of(self.python),
                process_group=0,  # a group of its own, which the kernel ends with us, stopped or not
            )
        self.version = self.call(self.settings)["ready"]
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        assert process is not None
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # it holds nothing that would have to be saved
        process.communicate()

    def call(self, content: dict[str, Any]) -> dict[str, Any]:
        """Send one line and wait for the answer; RunError with the worker's last words where it died."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        os.killpg(process.pid, signal.SIGCONT)
        try:
            with self._patience():
                process.stdin.write(json.dumps(content) + "\n")
                process.stdin.flush()
            answer = self._line(process.stdout)
            while "alive" in answer:
                answer = self._line(process.stdout)
        except BrokenPipeError:
            answer = {}
        if not answer:
            raise RunError(self._ended())
        os.killpg(process.pid, signal.SIGSTOP)
        return answer

    def _line(self, stdout: IO[str]) -> dict[str, Any]:
        """What it says next; {} where it ended."""
        with self._patience():
            line = stdout.readline()
        return json.loads(line) if line else {}

    @contextmanager
    def _patience(self) -> Iterator[None]:
        """The block may take `silence_s`; then the process is ended, and with it whatever the block waits for."""
        timer = Timer(self.silence_s or 0.0, self._give_up)
        if self.silence_s is not None:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _give_up(self) -> None:
        process = self._process
        assert process is not None
        self._is_silent = True
        with suppress(ProcessLookupError):  # it ended by itself
            os.killpg(process.pid, signal.SIGKILL)

    def _ended(self) -> str:
        process = self._process
        assert process is not None
        code = process.wait()
        if not self._is_silent:
            return f"the vLLM worker ended with code {code}; {last_words(self.log, _LAST_LINES)}"
        return (
            f"the vLLM worker gave no sign of life for {self.silence_s:g} s (target.timeout), and was ended. Start "
            "again with resume=auto, or with more seconds where it reads or compiles a model for longer; "
            f"{last_words(self.log, _LAST_LINES)}"
        )
