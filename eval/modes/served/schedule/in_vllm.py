"""A schedule as vLLM 0.32 takes it (vllm/v1/spec_decode/dynamic/utils.py; what holds is tested with it, in
tests/engines/test_schedule.py).

    "num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [[1, 4, 4], [5, 16, 1]]

Ranges are inclusive, begin at 1 and do not overlap; k = 0 is allowed, and k above `num_speculative_tokens` is cut to it
without a word. Batch sizes in a gap or behind the last range get the k of the range before them. With data parallelism
the schedule is dropped, with a warning. The first runner gives up full CUDA graphs for it.

k = 0 is not the target alone: the draft still reads what was written, so that it can go on later, which costs one of
its passes (vllm/v1/spec_decode/llm_base_proposer.py). So it is measured with the draft loaded. vLLM's second runner
drafts less of EAGLE-3 and MTP then; of draft models, DFlash and DSpark it always drafts the longest k, and verifies the
first tokens of it (vllm/v1/worker/gpu/spec_decode/*/speculator.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Schedule = Sequence[tuple[int, int, int]]
SCHEDULED = frozenset({"draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark"})
"""Methods that follow one: draft models and EAGLE-3 were run with it, the others are so by source. Medusa's proposer
asserts that k is num_speculative_tokens, and the server dies (vllm/v1/spec_decode/medusa.py); suffix decoding does the
same, and custom classes are not told k."""


def lengths(method: str, schedule: Schedule) -> dict[str, Any]:
    """The keys of `--speculative-config` that say how much is drafted at which batch size, where anything is. One
    length for all needs no schedule."""
    longest = max(k for _, _, k in schedule)
    assert longest, "a server that drafts nothing is one without a draft"
    if len(schedule) == 1:
        return {"num_speculative_tokens": longest}
    assert method in SCHEDULED, method
    entries = [list(entry) for entry in schedule]
    return {"num_speculative_tokens": longest, "num_speculative_tokens_per_batch_size": entries}


def held_at(method: str, k: int, longest: int) -> dict[str, Any]:
    """The same for a server that always drafts k tokens, as one whose schedule goes up to `longest` does at some batch
    size; k = 0 is drafting nothing with the draft loaded, for methods that follow a schedule."""
    if method not in SCHEDULED:
        return lengths(method, [(1, 1, k)])
    # the only range goes on behind its end
    return {"num_speculative_tokens": longest, "num_speculative_tokens_per_batch_size": [[1, 1, k]]}
