"""Schedules of draft lengths in vLLM: its configuration reads what is printed, its scheduler follows it, and Medusa
dies of one."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from distill.engines.worker_process import Engine
from eval.modes.served.schedule.in_vllm import SCHEDULED, held_at, lengths
from tests.engines.counters import our_counters
from tests.engines.environment import vllm_python
from tests.engines.serving import GREEDY, options
from tests.engines.toys import NEW_TOKENS, PROMPTS, K, Toys

pytestmark = pytest.mark.engines


def drafted(
    engine: Engine, toys: Toys, draft: str, speculation: dict[str, Any], prompts: list[list[int]]
) -> dict[str, Any]:
    """What vLLM counts greedily with these lengths, or how it ended."""
    how = options(toys.exported("llama", draft))
    how["speculative_config"] |= speculation
    job = {"target": str(toys.target("llama")), "options": how, "samplings": [GREEDY]}
    answer = engine.call(job | {"prompts": prompts, "new_tokens": NEW_TOKENS})
    return answer["runs"][0] if "runs" in answer else answer


@pytest.mark.parametrize("draft", ["lm", "eagle3"])
@pytest.mark.parametrize(("rows", "k"), [(1, K), (12, 1)], ids=["long alone", "short together"])
def test_vllm_drafts_as_long_as_the_schedule_says(engine: Engine, toys: Toys, draft: str, rows: int, k: int) -> None:
    method = options(toys.exported("llama", draft))["speculative_config"]["method"]
    found = drafted(engine, toys, draft, lengths(method, [(1, 1, K), (2, 12, 1)]), PROMPTS[:rows])
    ours = our_counters(toys.loaded("llama"), toys.drafter("llama", draft), PROMPTS[:rows], NEW_TOKENS, k)
    assert found["rounds"] == ours.rounds
    assert found["accepted"] == [*ours.accepted, *[0] * (K - k)]
    assert sum(found["accepted"]) > 0


@pytest.mark.parametrize("draft", ["lm", "eagle3"])
@pytest.mark.parametrize("k", [0, 1])
def test_a_server_is_held_at_one_length(engine: Engine, toys: Toys, draft: str, k: int) -> None:
    method = options(toys.exported("llama", draft))["speculative_config"]["method"]
    found = drafted(engine, toys, draft, held_at(method, k, K), PROMPTS)
    ours = toys.ours("llama", draft)
    assert [text[:NEW_TOKENS] for text in found["texts"]] == [text[:NEW_TOKENS] for text in ours.texts]
    assert [bool(count) for count in (found["rounds"], *found["accepted"])] == [k > 0, k > 0, False, False]


def test_medusa_dies_of_a_schedule(engine: Engine, toys: Toys) -> None:
    shorter = {"num_speculative_tokens": K, "num_speculative_tokens_per_batch_size": [[1, 12, 1]]}
    assert "AssertionError" in drafted(engine, toys, "medusa", shorter, PROMPTS)["error"]
    assert "medusa" not in SCHEDULED
    assert drafted(engine, toys, "medusa", held_at("medusa", 1, K), PROMPTS)["rounds"] > 0


def test_vllm_s_configuration_reads_what_is_printed(toys: Toys) -> None:
    schedule, most = [(1, 1, 4), (2, 8, 2), (9, 16, 0)], 24
    draft = {"method": "eagle3", "model": str(toys.exported("llama", "eagle3"))} | lengths("eagle3", schedule)
    printed = shlex.join(["--model", str(toys.target("llama")), "--speculative-config", json.dumps(draft)])
    asked = json.dumps({"words": shlex.split(printed), "most": most})
    worker = Path(__file__).with_name("schedule_worker.py")
    environment = os.environ | {"PYTHONSAFEPATH": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [vllm_python(), str(worker)], input=asked, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    k = json.loads(done.stdout.splitlines()[-1])["k"]
    assert k == [4, *[2] * 7, *[0] * 16]
