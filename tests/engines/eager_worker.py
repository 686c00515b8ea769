"""The worker of records with engines that compile nothing, and so start in seconds; run by vLLM's interpreter. It reads
texts under a limit of LARGEST_FILE bytes, and steps take TOKENS_A_STEP at most, where the environment names one."""

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

    asked: dict[str, Any] = {"enforce_eager": True}
    if "TOKENS_A_STEP" in os.environ:
        asked["max_num_batched_tokens"] = int(os.environ["TOKENS_A_STEP"])
    vllm.LLM = functools.partial(vllm.LLM, **asked)
    engine = compiled(settings)
    if "LARGEST_FILE" in os.environ and "states" in settings:
        limit = int(os.environ["LARGEST_FILE"])
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return engine


if __name__ == "__main__":
    vllm_worker.load = load
    vllm_worker.main()
