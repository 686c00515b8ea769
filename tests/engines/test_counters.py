"""vLLM drafts what our decoder drafts: its counters of accepted tokens, position by position, are ours.

Its text says nothing of that: speculative decoding is lossless, and a damaged draft writes the same text, only slower.
"""

import shutil
from pathlib import Path

import pytest

from decode.models.describe import describe_loaded
from distill.engines.worker_process import Engine
from eval.modes.served.counting import Pair
from eval.modes.served.engine import metrics
from eval.modes.served.faults import faults
from eval.modes.served.faults.counting import along, count
from eval.modes.served.faults.reading import open_reading
from tests.engines.counters import Counters, counters_along
from tests.engines.faults import FAULTS, Fault
from tests.engines.serving import GREEDY, SAMPLED, RefusedError, served
from tests.engines.toys import NEW_TOKENS, PROMPTS, K, Toys
from tests.eval.served.named import NAMED, UNEXPLAINED

pytestmark = pytest.mark.engines
HEADS = [
    ("llama", "eagle3"),
    ("llama", "eagle3-reduced"),
    ("qwen3", "eagle3"),
    ("qwen3", "eagle3-reduced"),
    ("qwen3_moe", "eagle3"),
    ("gemma3", "eagle3"),
    ("llama", "pard"),
    ("llama", "peagle"),
    ("qwen3", "peagle"),
    ("llama", "medusa"),
    ("llama", "medusa-reduced"),
    ("llama", "dflash"),
    ("llama", "jetspec"),
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
    named = named_faults(toys, FAULTY[fault.family], found, ours)
    assert alike == (not named) or (fault.family, fault.name) in UNEXPLAINED
    assert alike or NAMED.get((fault.family, fault.name)) in named or (fault.family, fault.name) in UNEXPLAINED


def named_faults(toys: Toys, draft: str, found: Counters, ours: Counters) -> set[str]:
    """Those that `mode=served` would name, from counters over all prompts."""
    target = toys.loaded("llama")
    reading = open_reading(str(toys.exported("llama", draft)), describe_loaded(target, check=False))
    written = Pair(target, len(PROMPTS)).write(PROMPTS, NEW_TOKENS + K, 0.0, 0)
    texts = along(target, PROMPTS, written, NEW_TOKENS, K)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "count", lambda reading, texts: [faults.total(count(reading, texts))])
        engine, own = ([metrics.Counters(one.rounds, one.rounds * K, tuple(one.accepted))] for one in (found, ours))
        return {one.name for one in faults.likely_faults(reading, texts, engine, own)}


@pytest.fixture
def damaged(toys: Toys, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of the folder that the fault is for."""
    family = request.getfixturevalue("fault").family
    return Path(shutil.copytree(toys.exported("llama", FAULTY[family]), tmp_path / "damaged"))
