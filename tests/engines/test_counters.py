"""vLLM drafts what our decoder drafts: its counters of accepted tokens, position by position, are ours.

Its text says nothing of that: speculative decoding is lossless, and a damaged draft writes the same text, only slower.
"""

import pytest

from decode.drafters.saved_draft import load_drafter
from eval.arms.vllm_peer import Engine
from tests.engines.counters import Counters, counters_along, our_counters
from tests.engines.serving import GREEDY, SAMPLED, served
from tests.engines.toys import NEW_TOKENS, PROMPTS, K, Toys

pytestmark = pytest.mark.engines


def says_something(counters: Counters) -> bool:
    """Every position is both accepted and refused where it is reached."""
    reached = [counters.rounds, *counters.accepted]
    return all(0 < taken < tried for tried, taken in zip(reached, reached[1:], strict=False))


def test_a_draft_lm_is_drafted_from_alike(engine: Engine, toys: Toys) -> None:
    target, run = toys.loaded("llama"), toys.run("llama", "lm")
    drafter = load_drafter(str(run), target)
    ours = our_counters(target, drafter, PROMPTS, NEW_TOKENS, K)
    greedy, sampled = served(engine, toys.target("llama"), run / "model", "draft_model", GREEDY, SAMPLED)
    assert says_something(greedy)
    assert greedy == ours
    assert says_something(sampled)
    assert sampled == counters_along(target, drafter, PROMPTS, sampled.texts, NEW_TOKENS, K)
    assert sampled.texts != greedy.texts
