"""One vLLM engine behind standard input and output: a JSON object per line in, one out.

Run by the interpreter of another environment, so nothing of ours is imported here. The first line holds the engine's
settings, {"target", "speculation", "dtype", "max_model_len", "max_num_seqs", "seed"}, where `speculation` is vLLM's
speculative_config or null; it is answered by {"ready": version}. Each further line is a call, {"prompts",
"max_new_tokens", "sampling", "eos"}, answered by {"new_ids", "seconds", "arrivals"}: `arrivals` are (seconds since the
call, rows' new tokens) per engine step.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

sys.path.append(str(Path(__file__).parent))  # at the end: statistics.py may not hide the library's

# The engine in this very process: a second one, polled by this, would burn a core while other arms are timed.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def answers_alone() -> TextIO:
    """Standard output for answers only: whatever else is printed, by vLLM or below it, goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def load(settings: dict[str, Any]) -> Any:
    """The engine, which drafts as `speculation` says."""
    from vllm import LLM  # pyright: ignore[reportMissingImports]
    from vllm_temperatures import write_temperatures  # pyright: ignore[reportMissingImports]

    write_temperatures()
    engine = LLM(
        settings["target"],
        dtype=settings["dtype"],
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        seed=settings["seed"],
        speculative_config=settings["speculation"],
        enable_prefix_caching=False,  # prompts come back, and the other arms read each of them anew
    )
    return engine.llm_engine


def answer(engine: Any, call: dict[str, Any], number: int) -> dict[str, Any]:
    """Continue the prompts of one call together, noting when each engine step brought how many tokens."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    # No seed per request: vLLM then draws row by row, which is slower than its own way.
    params = SamplingParams(
        max_tokens=call["max_new_tokens"], stop_token_ids=call["eos"], detokenize=False, **call["sampling"]
    )
    began = time.perf_counter()
    for row, prompt in enumerate(call["prompts"]):
        engine.add_request(f"{number}/{row}", {"prompt_token_ids": prompt}, params)
    new_ids: list[list[int]] = [[] for _ in call["prompts"]]
    arrivals = []
    while engine.has_unfinished_requests():
        counts = [0] * len(new_ids)
        for output in engine.step():
            row, ids = int(output.request_id.split("/")[1]), list(output.outputs[0].token_ids)
            counts[row] = len(ids) - len(new_ids[row])
            new_ids[row] = ids
        if any(counts):
            arrivals.append((time.perf_counter() - began, counts))
    return {"new_ids": new_ids, "seconds": time.perf_counter() - began, "arrivals": arrivals}


def main() -> None:
    """Serve calls until standard input ends."""
    answers = answers_alone()

    def say(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    engine = load(json.loads(sys.stdin.readline()))
    from vllm import __version__  # pyright: ignore[reportMissingImports]

    say({"ready": __version__})
    for number, line in enumerate(sys.stdin):
        say(answer(engine, json.loads(line), number))


if __name__ == "__main__":
    main()
