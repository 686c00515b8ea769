"""One vLLM engine behind standard input and output: a JSON object per line in, one out.

Run by the interpreter of another environment, so nothing of ours is imported here. The first line holds the engine's
settings, {"target", "speculation", "dtype", "max_model_len", "max_num_seqs", "seed"}, where `speculation` is vLLM's
speculative_config or null; optionally "revision", "options", more of vLLM's by their names, and "seeded", for an
engine whose calls have seeds, and "states", {"layers", "folder"}, for an engine that reads texts and leaves its hidden
states there. It is answered by {"ready": version}. Each further line is a call, whose answer comes behind lines of
{"alive": true}, one in some seconds in which the engine stepped:

- {"prompts", "max_new_tokens", "sampling", "eos"}, optionally "seeds", one for each prompt, is answered by {"new_ids",
  "finish_reasons", "seconds", "arrivals"}: `arrivals` are (seconds since the call, rows' new tokens) per engine step.
- {"rows"}, token ids of finished texts, optionally "log_p", is answered by {"files", "next_ids", "log_p"}: of each row
  a safetensors file of `token_ids` (L,) and `hidden_states` (L, layers, d), layers in rising order, which is not there,
  or not whole, where the disk is full; the likeliest token behind it; and, if asked for, log p of its tokens but the
  first.
"""

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

sys.path.append(str(Path(__file__).parent))  # for the files beside this one, also in processes that vLLM starts

# The engine in this very process: a second one, polled by this, would burn a core while others are timed.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

_WRITTEN_S = 600
"""A state that is not on the disk by then never will be."""
_ALIVE_S = 5.0

Steps = Callable[[], list[Any]]
"""One step of the engine; its outputs."""


def answers_alone() -> TextIO:
    """Standard output for answers only: whatever else is printed, by vLLM or below it, goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def load(settings: dict[str, Any]) -> Any:
    """The engine, which drafts as `speculation` says, or leaves states as `states` says."""
    # A text may fill the context, and the engine wants room for a token behind it, which nothing will read.
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1" if settings.get("states") else "0"
    from vllm import LLM  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
    from vllm_options import leaving_states  # pyright: ignore[reportMissingImports]
    from vllm_temperatures import write_temperatures  # pyright: ignore[reportMissingImports]

    write_temperatures()
    options: dict[str, Any] = {"speculative_config": settings["speculation"]}
    if settings.get("states"):
        options = leaving_states(**settings["states"], on_cpu=current_platform.is_cpu())
    options |= settings.get("options") or {}
    if settings.get("seeded") and current_platform.is_cpu():
        # vLLM 0.32 dies of a prompt that is cut between two steps ("CPU Generator does not use offset"): it takes back
        # what the first step drew, as CUDA's generators alone can
        options["enable_chunked_prefill"] = False
    engine = LLM(
        settings["target"],
        revision=settings.get("revision"),
        tokenizer_revision=settings.get("revision"),
        dtype=settings["dtype"],
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        seed=settings["seed"],
        enable_prefix_caching=False,  # prompts come back, and the other arms read each of them anew
        **options,
    )
    return engine.llm_engine


def write(engine: Any, step: Steps, call: dict[str, Any], number: int) -> dict[str, Any]:
    """Continue the prompts of one call together, and count the steps that brought each tokens; with `timed` it is noted
    when which step brought how many."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    # Without seeds vLLM draws all rows together, which is faster than row by row.
    seeds = call.get("seeds") or [None] * len(call["prompts"])
    end = {"stop_token_ids": call["eos"], "ignore_eos": True}  # those of the call alone
    began = time.perf_counter()
    for row, (prompt, seed) in enumerate(zip(call["prompts"], seeds, strict=True)):
        params = SamplingParams(
            max_tokens=call["max_new_tokens"], seed=seed, detokenize=False, **end, **call["sampling"]
        )
        engine.add_request(f"{number}/{row}", {"prompt_token_ids": prompt}, params)
    new_ids: list[list[int]] = [[] for _ in call["prompts"]]
    reasons: list[str | None] = [None for _ in call["prompts"]]
    passes, arrivals = [0 for _ in new_ids], []
    while engine.has_unfinished_requests():
        counts = [0] * len(new_ids)
        for output in step():
            row, ids = int(output.request_id.split("/")[1]), list(output.outputs[0].token_ids)
            counts[row] = len(ids) - len(new_ids[row])
            passes[row] += counts[row] > 0
            new_ids[row], reasons[row] = ids, output.outputs[0].finish_reason
        if call.get("timed") and any(counts):
            arrivals.append((time.perf_counter() - began, counts))
    seconds = time.perf_counter() - began
    answer = {"new_ids": new_ids, "finish_reasons": reasons, "passes": passes}
    return {**answer, "seconds": seconds, "arrivals": arrivals}


def read(engine: Any, step: Steps, call: dict[str, Any], number: int) -> dict[str, Any]:
    """Read the rows of one call, which leaves a file of states for each, named after the request."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    told = {"prompt_logprobs": 0} if call.get("log_p") else {}
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, **told)
    for row, ids in enumerate(call["rows"]):
        engine.add_request(f"{number}-{row}", {"prompt_token_ids": ids}, params)
    found: list[Any] = [None] * len(call["rows"])
    while engine.has_unfinished_requests():
        for output in step():
            found[int(output.request_id.split("-")[1])] = output
    files = [output.kv_transfer_params["hidden_states_path"] for output in found]
    for file in files:
        await_lock(step, Path(f"{file}.lock"))
    answer = {"files": files, "next_ids": [output.outputs[0].token_ids[0] for output in found]}
    return answer | ({"log_p": [log_p(output) for output in found]} if told else {})


def log_p(output: Any) -> list[float]:
    """Of each token of a text but the first."""
    rows = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [float(row[token].logprob) for token, row in rows]


def await_lock(step: Steps, lock: Path) -> None:
    """Until the states are written, or writing them failed: the step after a request's last one begins it, and its lock
    is held to the end."""
    began = time.perf_counter()
    with lock.open() as held:
        while True:
            try:
                return fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.perf_counter() - began > _WRITTEN_S:
                    raise TimeoutError(f"{lock} was held for {_WRITTEN_S} s") from None
            step()
            time.sleep(1e-3)


def stepping(engine: Any, say: Callable[[dict[str, Any]], None]) -> Steps:
    """The engine's steps, of which a sign of life is said now and then: an engine that hangs in one says none."""
    said = time.monotonic()

    def step() -> list[Any]:
        nonlocal said
        outputs = engine.step()
        if time.monotonic() - said > _ALIVE_S:
            said = time.monotonic()
            say({"alive": True})
        return outputs

    return step


def main() -> None:
    """Serve calls until standard input ends."""
    answers = answers_alone()

    def say(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    engine = load(json.loads(sys.stdin.readline()))
    from vllm import __version__  # pyright: ignore[reportMissingImports]

    say({"ready": __version__})
    step = stepping(engine, say)
    for number, line in enumerate(sys.stdin):
        call = json.loads(line)
        say((read if "rows" in call else write)(engine, step, call, number))


if __name__ == "__main__":
    main()
