"""The worker of records with engines that compile nothing, and so start in seconds; run by vLLM's interpreter. It reads
texts under a limit of LARGEST_FILE bytes, where the environment names one."""

import functools
import os
import resource
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "distill/runtimes"))
import vllm_worker  # noqa: E402  # pyright: ignore[reportMissingImports]

compiled = vllm_worker.load


def load(settings: dict[str, Any]) -> Any:
    """The engine as it is."""
    import vllm  # pyright: ignore[reportMissingImports]

    vllm.LLM = functools.partial(vllm.LLM, enforce_eager=True)
    engine = compiled(settings)
    if "LARGEST_FILE" in os.environ and "states" in settings:
        limit = int(os.environ["LARGEST_FILE"])
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return engine


if __name__ == "__main__":
    vllm_worker.load = load
    vllm_worker.main()
