"""decode.overlap: threads that are late, fail or are many leave text, errors and memory as they are, and save time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from decode import generate, warm_up
from decode.api import Output
from decode.drafters.base import Context
from decode.drafters.beside.ahead import AheadDrafter
from decode.drafters.lm import LMDraft
from decode.loop import Loop
from decode.requests import Event
from decode.trees.tree import Tree
from tests.decode.checks import check_pathwise_equality
from tests.decode.overlapped import PROMPT, delay, draft, target, threads

call: Callable[..., Output] = partial(generate, seed=1, eos_token_id=(), max_new_tokens=30)
IDS = torch.tensor(PROMPT)


@pytest.mark.parametrize("draft_s", [0.01, 0.0])
@pytest.mark.parametrize("target_s", [0.01, 0.0])
@pytest.mark.parametrize("seed", [None, 3])
def test_delays_change_nothing(
    draft_s: float, target_s: float, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    delay(monkeypatch, draft_s, target_s, seed)
    check_pathwise_equality(target(), draft(0.02), 2, overlap=True, max_new_tokens=20, num_draft_tokens=2)


def test_calls_of_several_threads_do_not_meet() -> None:
    prompts = [torch.tensor([[5 + row, 9, 1]]) for row in range(4)]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda ids: call(target(), draft(0.02), ids, overlap=True).sequences, prompts))
    assert all(
        torch.equal(have, call(target(), None, ids).sequences) for have, ids in zip(together, prompts, strict=True)
    )
    assert threads() == 0


def test_the_threads_error_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    propose = LMDraft.propose

    def failing(self: LMDraft, context: Context) -> Tree:
        if context.is_undecided:
            raise RuntimeError("no power")
        return propose(self, context)

    with monkeypatch.context() as patch:
        patch.setattr(LMDraft, "propose", failing)
        with pytest.raises(RuntimeError, match="no power"):
            call(target(), draft(0.0), IDS, overlap=True)
    assert threads() == 0
    check_pathwise_equality(target(), draft(0.0), 1, overlap=True, max_new_tokens=20)


def test_an_error_of_the_caller_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def observe(event: Event) -> None:
        raise KeyboardInterrupt

    delay(monkeypatch, 0.05, 0.0)
    with pytest.raises(KeyboardInterrupt):
        call(target(), draft(0.0), IDS, overlap=True, observer=observe)
    assert threads() == 0


def test_calls_leave_nothing_behind() -> None:
    for _ in range(50):
        call(target(), draft(0.02), IDS, overlap=True, max_new_tokens=8)
    gc.collect()
    assert threads() == 0
    assert not [one for one in gc.get_objects() if type(one) in (AheadDrafter, Loop)]


def test_drafting_takes_no_time_of_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 ms each: a round takes 120 one after another, and 60 at once."""
    warm_up(target(), draft(0.0), IDS, 30, temperature=0, overlap=True)
    delay(monkeypatch, 0.06, 0.06)
    seconds = {}
    for overlap in (False, True):
        began = time.perf_counter()
        call(target(), draft(0.0), IDS, temperature=0, overlap=overlap)
        seconds[overlap] = time.perf_counter() - began
    assert seconds[True] < 0.8 * seconds[False]
