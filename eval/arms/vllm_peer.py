"""vLLM's CPU engine as an arm: a worker in an environment of its own, loaded once, asked call by call.

vLLM pins its own torch and transformers, so it lives apart (`scripts/vllm_env.sh`). Between calls the worker is stopped
(SIGSTOP): its OpenMP threads would spin for some time into the next arm's call. Times are the worker's own, from the
call to the last token: the pipe to it is not counted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from decode.common.errors import ConfigError, RunError
from decode.sampling.warp import Sampling
from eval.arms.base import Sample, emitted

WORKER = Path(__file__).with_name("vllm_worker.py")
_LAST_LINES = 15


def check_python(python: str, key: str, otherwise: str) -> None:
    """ConfigError where that interpreter, the value of `key`, is not there, or its environment lacks vLLM; `otherwise`
    is how to do without."""
    remedy = f"Make the environment with `bash scripts/vllm_env.sh`, name another with {key}=, or {otherwise}"
    if not Path(python).is_file():
        raise ConfigError(f"{key}={python} does not exist, and vLLM runs in an environment of its own. {remedy}")
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    if subprocess.run([python, "-P", "-c", code], check=False, capture_output=True).returncode:
        raise ConfigError(f"{key}={python} has no package vllm. {remedy}")


def environment_of(python: str) -> dict[str, str]:
    """As many threads as our own arms have, and Intel's OpenMP where it is installed: without it vLLM warns of a
    significant loss in speculative decoding."""
    openmp = Path(python).absolute().parent.parent / "lib/libiomp5.so"
    return {
        **os.environ,
        **({"LD_PRELOAD": str(openmp)} if openmp.is_file() else {}),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "PYTHONSAFEPATH": "1",  # else the worker's folder, which has a statistics.py, hides the library's
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


@dataclass
class Engine:
    """One engine in its worker process: `with Engine(...) as engine: engine.call(...)`."""

    python: str
    worker: Path
    settings: dict[str, Any]
    log: Path
    """What the worker says; its end is shown when it dies."""
    environment: Mapping[str, str] | None = None
    """Of the process; None is vLLM's."""
    who: str = "the vLLM worker"
    """For messages."""
    version: str = ""
    _process: subprocess.Popen[str] | None = field(default=None, repr=False)

    def __enter__(self) -> Engine:
        with self.log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [self.python, str(self.worker)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self.environment or environment_of(self.python),
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
            process.stdin.write(json.dumps(content) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            words = "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:])
            raise RunError(f"{self.who} ended with code {process.wait()}; {self.log} ends with:\n{words}")
        os.killpg(process.pid, signal.SIGSTOP)
        return json.loads(line)


@dataclass(frozen=True)
class VllmArm:
    """vLLM, with or without its draft, whichever its engine has. Its noise is its own: seeds per request slow it."""

    name: str
    engine: Engine
    sampling: Sampling
    eos: Sequence[int]

    def run(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], max_new_tokens: int, seed: int) -> Sample:
        """One call of the worker."""
        answer = self.engine.call(
            {
                "prompts": [list(prompt) for prompt in prompts],
                "max_new_tokens": max_new_tokens,
                "sampling": {
                    "temperature": self.sampling.temperature,
                    "top_k": self.sampling.top_k,
                    "top_p": self.sampling.top_p,
                    "min_p": self.sampling.min_p,
                },
                "eos": list(self.eos),
            }
        )
        return as_sample(answer, self.eos, max_new_tokens)


def as_sample(answer: dict[str, Any], eos: Sequence[int], max_new_tokens: int) -> Sample:
    """The worker's answer; the first arrival is the step after which every row has a token."""
    new = [emitted(ids, eos, max_new_tokens) for ids in answer["new_ids"]]
    so_far = [0] * len(new)
    first_s, first_tokens = answer["seconds"], sum(map(len, new))
    for at, counts in answer["arrivals"]:
        so_far = [before + count for before, count in zip(so_far, counts, strict=True)]
        if all(so_far):
            first_s, first_tokens = at, sum(min(count, len(ids)) for count, ids in zip(so_far, new, strict=True))
            break
    return Sample(new, answer["seconds"], first_s, first_tokens, [at for at, _ in answer["arrivals"]], [])
