"""The worker of records with engines that compile nothing, and so start in seconds; run by vLLM's interpreter. It reads
texts under a limit of LARGEST_FILE bytes, and steps take TOKENS_A_STEP at most, where the environment names one."""

import functools
import os
import resource
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "distill/engines/inside_vllm"))
import vllm_worker  # noqa: E402  # pyright: ignore[reportMissingImports]

compiled = vllm_worker.load


def load(settings: dict[str, Any]) -> Any:
    """The engine as it is."""
    import vllm  # pyright: ignore[reportMissingImports]

    asked: dict[str, Any] = {"enforce_eager": True}
    if "TOKENS_A_STEP" in os.environ:
        asked["max_num_batched_tokens"] = int(os.environ["TOKENS_A_STEP"])
    vllm.LLM = functools.partial(vllm.LLM, **asked)
    return compiled(settings)


read = vllm_worker.read


def limited(engine: Any, step: Any, call: dict[str, Any], number: int) -> dict[str, Any]:
    """Reads under the limit what comes after the probe, for whose log p vLLM compiles, which writes files, too."""
    if "LARGEST_FILE" in os.environ and not call.get("log_p"):
        limit = int(os.environ["LARGEST_FILE"])
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return read(engine, step, call, number)


if __name__ == "__main__":
    vllm_worker.load, vllm_worker.read = load, limited
    vllm_worker.main()
