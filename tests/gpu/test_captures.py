"""Captures on a device: passes are captured, give what the passes give, and keep memory; rounds wait seldom for it."""

from __future__ import annotations

import inspect
import random
import traceback
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from decode import generate
from decode.drafters.base import Drafter
from decode.drafters.lm import LMDraft
from decode.drafters.untrained.early_exit import EarlyExitDrafter
from decode.forward import runner
from decode.forward.runner import Runner
from decode.loop import Loop
from decode.requests import Request
from decode.sampling.warp import Sampling
from decode.trees.tree_plans import chain
from tests.decode.checks import ragged_prompts, unpadded
from tests.decode.heads import VARIANTS, random_head
from tests.gpu import DEVICE, MODELS, ON_A_DEVICE, deep_target, needs_cuda, tiny_llama

pytestmark = ON_A_DEVICE

ROOT = Path(__file__).resolve().parents[2]
Captures = list[str | None]
"""Of each pass that was to be captured, why it is not; None where it is."""


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    made: Captures = []
    told: list[str] = []
    captured, tell = Runner._captured, Runner._tell

    def noted_reason(self: Runner, why: str) -> None:
        told.append(why)
        tell(self, why)

    def noted(self: Runner, *given: Any) -> Any:
        found = captured(self, *given)
        made.append(None if found is not None else told[-1])
        return found

    monkeypatch.setattr(Runner, "_captured", noted)
    monkeypatch.setattr(Runner, "_tell", noted_reason)
    return made


def check_all_captured(captures: Captures) -> None:
    assert captures, "nothing was captured"
    assert not any(captures), f"{len(captures)} passes were to be captured, and some were not: {Counter(captures)}"


def drafter_of(name: str, model: PreTrainedModel) -> Any:
    if name == "none":
        return None
    if name == "early_exit":
        return EarlyExitDrafter(model, 2)
    if name == "lm":
        return LMDraft(tiny_llama(num_layers=1, seed=3, dtype=model.dtype).to(DEVICE))
    return random_head(name, model).to(DEVICE)


def texts_of(model: PreTrainedModel, drafter: Drafter | None, batch: int = 1, **settings: Any) -> list[list[int]]:
    ids, mask = ragged_prompts(batch)
    given: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": (), "num_draft_tokens": 3, "seed": 1}
    return generate(model, drafter, ids.to(DEVICE), mask.to(DEVICE), **given | settings).sequences.tolist()


def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "CAPTURE_AFTER", 10**9)


FAMILIES = ["none", "lm", "early_exit", "exit_adapter", *VARIANTS]
SETTINGS: dict[str, dict[str, Any]] = {
    "coupled": {},
    "greedy": {"temperature": 0.0},
    "rejection": {"verifier": "rejection"},
    "tree": {"tree": "2x2x1"},
}


@pytest.mark.parametrize("how", SETTINGS)
@pytest.mark.parametrize("name", FAMILIES)
def test_passes_are_captured_and_change_nothing(
    name: str, how: str, captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = deep_target()
    drafter, settings = drafter_of(name, model), SETTINGS[how]
    if how == "tree" and name in ("none", "early_exit", "exit_adapter"):
        pytest.skip("it drafts no trees")
    found = [texts_of(model, drafter, **settings) for _ in range(2)]
    check_all_captured(captures)
    eager(monkeypatch)
    model = deep_target()
    plain = texts_of(model, drafter_of(name, model), **settings)
    assert found[0] == plain, "a first call, which captures"
    assert found[1] == plain, "a second call, which replays"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["none", "lm", "mtp", "eagle3", "peagle", "medusa", "dflash", "dflash2", "lilicorr"])
def test_passes_of_other_precisions_are_captured(name: str, dtype: torch.dtype, captures: Captures) -> None:
    model = deep_target(dtype=dtype)
    texts_of(model, drafter_of(name, model))
    check_all_captured(captures)


@needs_cuda
@pytest.mark.parametrize("architecture", MODELS)
def test_passes_of_other_architectures_are_captured(architecture: str, captures: Captures) -> None:
    """But for experts that are chosen on the host, which say so."""
    model = MODELS[architecture]().requires_grad_(False).to(DEVICE)
    plain = texts_of(model, None)
    if architecture == "exaone_moe":
        assert captures
        assert all(why is None or "reads values" in why for why in captures), captures
    else:
        check_all_captured(captures)
        assert texts_of(model, LMDraft(MODELS[architecture]().to(DEVICE))) == plain


def disturb(draw: random.Random) -> None:
    """Memory of random sizes is taken, filled with what is no number, and given back."""
    held = [torch.empty(draw.randrange(1, 200_000), device=DEVICE) for _ in range(5)]
    for one in held:
        one.fill_(torch.nan)


@pytest.mark.parametrize("name", ["none", "lm", "mtp", "eagle3", "dflash"])
def test_two_hundred_rounds_with_allocations_between_them(
    name: str, captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "check_input_liveness" in inspect.signature(torch.cuda.graph.__init__).parameters:  # from torch 2.13 on
        monkeypatch.setattr(torch.cuda, "graph", partial(torch.cuda.graph, check_input_liveness=True))
    draw, count = random.Random(0), 220 if DEVICE.type == "cuda" else 40
    settings: dict[str, Any] = {"max_new_tokens": count, "temperature": 1.0}
    model = deep_target()
    out = texts_of(model, drafter_of(name, model), observer=lambda event: disturb(draw), **settings)
    check_all_captured(captures)
    eager(monkeypatch)
    model = deep_target()
    assert out == texts_of(model, drafter_of(name, model), **settings)


@pytest.mark.parametrize("name", ["none", "lm", "eagle3"])
def test_calls_of_two_batch_sizes_in_turn(name: str, captures: Captures, monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep_target()
    drafter, draw, found = drafter_of(name, model), random.Random(0), []
    for _ in range(2):
        for batch in (1, 3):
            found.append(texts_of(model, drafter, batch, seed=len(found)))
            disturb(draw)
    check_all_captured(captures)
    eager(monkeypatch)
    model = deep_target()
    drafter = drafter_of(name, model)
    assert found == [texts_of(model, drafter, (1, 3)[n % 2], seed=n) for n in range(4)]


@needs_cuda
def test_memory_stays_bounded_over_calls_of_different_lengths() -> None:
    draw, model, held = random.Random(0), deep_target(dtype=torch.float32), []
    drafter = drafter_of("lm", model)
    for call in range(50):
        ids = torch.randint(0, 64, (1 + call % 2, draw.randrange(2, 60)), device=DEVICE)
        generate(model, drafter, ids, max_new_tokens=draw.randrange(8, 40), eos_token_id=(), seed=call)
        held.append((torch.cuda.memory_allocated(DEVICE), torch.cuda.memory_reserved(DEVICE)))
    assert held[-1][0] < held[24][0] + 2**22, [(a >> 20, b >> 20) for a, b in held[9::10]]
    assert held[-1][1] < 2**32


# rounds and the host


@needs_cuda
@pytest.mark.parametrize("name", ["lm", "mtp", "none"])
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_a_round_waits_seldom(rule: str, name: str) -> None:
    """Ten rounds behind the first twenty, in which passes are captured; an H100 waited in one at most."""
    model = deep_target(dtype=torch.float32)
    drafter, places, steps = drafter_of(name, model), Counter[str](), 0
    sampling = Sampling(0.0 if rule == "greedy" else 1.0)
    ids, mask = ragged_prompts(1)
    shape = chain(3 if drafter is not None else 0)
    loop = Loop(model, drafter, Request(unpadded(ids, mask), 200, sampling, rule, shape, seed=1))
    step = loop.step

    def watched() -> Any:
        nonlocal steps
        steps += 1
        torch.cuda.set_sync_debug_mode("warn" if 20 < steps <= 30 else "default")
        return step()

    def noted(message: Any, *given: Any, **named: Any) -> None:
        if "synchroniz" in str(message):
            own = [
                f for f in traceback.extract_stack() if f.filename.startswith(str(ROOT)) and "/tests/" not in f.filename
            ]
            places[f"{Path(own[-1].filename).relative_to(ROOT)}:{own[-1].lineno} {own[-1].line}" if own else "?"] += 1

    loop.step = watched  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = noted
        try:
            loop.run()
            waited = places.total()
            torch.cuda.set_sync_debug_mode("warn")
            assert torch.ones((), device=DEVICE).item() == 1
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert steps > 30
    assert places.total() == waited + 1, "a wait that nobody sees"
    table = "\n".join(f"{count:5d}  {place}" for place, count in places.most_common())
    assert waited <= 3, table
