"""vLLM behind standard input and output, a JSON object per line in and one out; run by the interpreter of .venv-vllm.

The first line is answered by {"ready": version}. Each further one is a job, {"target", "options", "prompts",
"new_tokens", "samplings"}, answered by {"runs"}, for each sampling the texts and the counters of what was drafted, or
by {"error"}. vLLM is imported once, and every job has a fork of that process: an engine then starts in
seconds, and one that dies takes nothing with it.
"""

import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

sys.path.append(str(Path(__file__).resolve().parents[2] / "distill/engines/inside_vllm"))
from vllm_temperatures import write_temperatures  # noqa: E402  # pyright: ignore[reportMissingImports]

# The engine in this very process, so that it goes on round by round, when it is asked to.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}


def load(job: dict[str, Any]) -> Any:
    """An engine with its draft."""
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    write_temperatures()
    return LLM(
        job["target"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=len(job["prompts"]),
        enable_prefix_caching=False,  # what is not read anew is not drafted from
        async_scheduling=False,  # else the round after one that is asked for has been counted as well
        disable_log_stats=False,
        skip_tokenizer_init=True,
        num_gpu_blocks_override=32,  # of 128 tokens, in place of a gigabyte
        **job["options"],
    )


def write(engine: Any, job: dict[str, Any], sampling: dict[str, Any]) -> list[list[int]]:
    """Texts to the end of the round in which they reach `new_tokens`: where vLLM cuts a text itself, it counts what it
    accepted behind the cut, and does not say what that was."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    params = SamplingParams(max_tokens=100, ignore_eos=True, detokenize=False, **sampling)
    for row, prompt in enumerate(job["prompts"]):
        engine.add_request(str(row), {"prompt_token_ids": prompt}, params)
    texts: list[list[int]] = [[] for _ in job["prompts"]]
    while engine.has_unfinished_requests():
        for output in engine.step():
            row = int(output.request_id)
            texts[row] = list(output.outputs[0].token_ids)
            if len(texts[row]) >= job["new_tokens"]:
                engine.abort_request([output.request_id])
    return texts


def counted(llm: Any) -> list[int]:
    """Rounds, then how often each position was accepted, of all runs so far."""
    found = {metric.name: metric for metric in llm.get_metrics()}
    rounds = found["vllm:spec_decode_num_drafts"].value
    return [rounds, *found["vllm:spec_decode_num_accepted_tokens_per_pos"].values]


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """The runs of a job."""
    llm = load(job)
    runs, before = [], [0] * (1 + job["options"]["speculative_config"]["num_speculative_tokens"])
    for sampling in job["samplings"]:
        texts, now = write(llm.llm_engine, job, sampling), counted(llm)
        rounds, *accepted = (late - early for late, early in zip(now, before, strict=True))
        runs.append({"texts": texts, "rounds": rounds, "accepted": accepted})
        before = now
    return {"runs": runs}


def answer_or_error(job: dict[str, Any]) -> dict[str, Any]:
    """What a job came to."""
    try:
        return answer(job)
    except Exception as error:  # noqa: BLE001 - whatever vLLM raises is the answer
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def fork(answers: TextIO, line: str) -> None:
    """Let a process of its own answer a job."""
    child = os.fork()
    if child == 0:
        say(answers, answer_or_error(json.loads(line)))
        os._exit(0)  # nothing has to be taken down
    _, status = os.waitpid(child, 0)
    if status:
        say(answers, {"error": f"the process of the engine ended with status {status}"})


def say(answers: TextIO, content: dict[str, Any]) -> None:
    """One line."""
    answers.write(json.dumps(content) + "\n")
    answers.flush()


def main() -> None:
    """Serve jobs until standard input ends."""
    # Standard output is for answers alone: whatever else is printed goes to standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdin.readline()
    import vllm.entrypoints.llm  # pyright: ignore[reportMissingImports]
    import vllm.v1.worker.cpu_worker  # pyright: ignore[reportMissingImports]

    gc.freeze()  # else every engine looks through all of these modules seven times, for 2 s
    say(answers, {"ready": vllm.__version__})
    for line in sys.stdin:
        fork(answers, line)


if __name__ == "__main__":
    main()
