"""vLLM drafts what our decoder drafts: its counters of accepted tokens, position by position, are ours.

Its text says nothing of that: speculative decoding is lossless, and a damaged draft writes the same text, only slower.
"""

import shutil
from pathlib import Path

import pytest

from eval.arms.vllm_peer import Engine
from tests.engines.counters import Counters, counters_along
from tests.engines.faults import FAULTS, Fault
from tests.engines.serving import GREEDY, SAMPLED, RefusedError, served
from tests.engines.toys import NEW_TOKENS, PROMPTS, K, Toys

pytestmark = pytest.mark.engines
HEADS = [
    ("llama", "eagle3"),
    ("llama", "eagle3-reduced"),
    ("qwen3", "eagle3"),
    ("qwen3", "eagle3-reduced"),
    ("gemma3", "eagle3"),
    ("llama", "medusa"),
    ("llama", "medusa-reduced"),
    ("llama", "dflash"),
]
FAULTY = {"lm": "lm", "eagle3": "eagle3-reduced", "medusa": "medusa-reduced", "dflash": "dflash"}


def says_something(counters: Counters) -> bool:
    """Every position is both accepted and refused where it is reached."""
    reached = [counters.rounds, *counters.accepted]
    return all(0 < taken < tried for tried, taken in zip(reached, reached[1:], strict=False))


def test_a_draft_lm_is_drafted_from_alike(engine: Engine, toys: Toys) -> None:
    greedy, sampled = served(engine, toys.target("llama"), toys.exported("llama", "lm"), GREEDY, SAMPLED)
    assert says_something(greedy)
    assert greedy == toys.ours("llama", "lm")
    assert says_something(sampled)
    target, drafter = toys.loaded("llama"), toys.drafter("llama", "lm")
    assert sampled == counters_along(target, drafter, PROMPTS, sampled.texts, NEW_TOKENS, K)
    assert sampled.texts != greedy.texts


@pytest.mark.parametrize(("kind", "draft"), HEADS)
def test_a_head_is_drafted_from_alike(engine: Engine, toys: Toys, kind: str, draft: str) -> None:
    (greedy,) = served(engine, toys.target(kind), toys.exported(kind, draft), GREEDY)
    assert says_something(greedy)
    assert greedy == toys.ours(kind, draft)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda one: f"{one.family}: {one.name}")
def test_a_fault_moves_the_counters_and_not_the_text(engine: Engine, toys: Toys, damaged: Path, fault: Fault) -> None:
    ours = toys.ours("llama", FAULTY[fault.family])
    fault.damage(damaged)
    if fault.in_vllm == "refuses":
        with pytest.raises(RefusedError):
            served(engine, toys.target("llama"), damaged, GREEDY)
        return
    (found,) = served(engine, toys.target("llama"), damaged, GREEDY)
    assert [text[:NEW_TOKENS] for text in found.texts] == [text[:NEW_TOKENS] for text in ours.texts]
    alike = (found.rounds, found.accepted) == (ours.rounds, ours.accepted)
    assert alike == (fault.in_vllm == "unseen")


@pytest.fixture
def damaged(toys: Toys, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of the folder that the fault is for."""
    family = request.getfixturevalue("fault").family
    return Path(shutil.copytree(toys.exported("llama", FAULTY[family]), tmp_path / "damaged"))
