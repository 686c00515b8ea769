"""What warm_up captures is what calls use: none of them captures anything afterwards."""

import random
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch

from decode import generate, warm_up
from decode.autotune.budget import REHEARSED, Budget
from decode.drafters.base import Drafter
from decode.drafters.lm import LMDraft
from decode.drafters.lm_steps import PassByPass
from decode.drafters.untrained.cascade import CascadeDrafter
from decode.drafters.untrained.config import NgramConfig
from decode.drafters.untrained.foreign.drafter import ForeignDrafter
from decode.drafters.untrained.foreign.reader import WIDTHS, Reader
from decode.drafters.untrained.mixture import MixtureDrafter
from decode.drafters.untrained.ngram import NgramDrafter
from decode.forward.runner import Runner, whole
from tests.decode.untrained.models import byte_level, shared, spelled
from tests.tiers import by_default
from tests.tiny import tiny_llama

PROMPT = torch.tensor([[5, 9, 2, 7], [3, 1, 4, 6]])
SETTINGS = {"num_draft_tokens": 2, "eos_token_id": ()}


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What is captured from here on."""
    made: list[object] = []

    def captured(self: Runner, module: Callable[..., object], *_: object) -> Callable[..., object]:
        made.append(module)

        def replay(*inputs: object) -> object:
            with whole():  # a replay captures nothing in its turn
                return module(*inputs)

        return replay

    monkeypatch.setattr(Runner, "_captured", captured)
    return made


@pytest.fixture
def whims(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget draws its depths, where it would choose by the clock."""
    draw, chosen = random.Random(0), Budget._choose
    monkeypatch.setattr(
        Budget,
        "_choose",
        lambda self, deepest: draw.randint(0, deepest) if REHEARSED.get() is None else chosen(self, deepest),
    )


@pytest.mark.usefixtures("whims")
@pytest.mark.parametrize(
    ("prompt_tokens", "new_tokens", "calls"),
    by_default(1, [(4, 60, 6), (60, 20, 6), (4, 60, 24), (60, 20, 24), (4, 70, 24)]),
)
@pytest.mark.parametrize("adaptive", [True, False])
def test_a_call_finds_all_its_rounds_captured(
    adaptive: bool, prompt_tokens: int, new_tokens: int, calls: int, captures: list[object]
) -> None:
    """Across a step in the slots that passes look at, whatever the budget chooses; also where the drafts of the last
    rounds alone reach beyond it, which the rounds without drafts between them then look at as well, and where a call
    has few rounds before it."""
    prompt = PROMPT.repeat(1, prompt_tokens // 4)
    model, draft = tiny_llama(), LMDraft(tiny_llama(num_layers=1, seed=3))
    settings: dict[str, Any] = {**SETTINGS, "adaptive": adaptive}
    cold = generate(model, draft, prompt, max_new_tokens=new_tokens, seed=1, **settings)
    assert warm_up(model, draft, prompt, new_tokens, **settings) > 0
    made = len(captures)
    assert made > 3
    for seed in range(1, 1 + calls):
        warm = generate(model, draft, prompt, max_new_tokens=new_tokens, seed=seed, **settings)
        if seed == 1:
            assert warm.sequences.equal(cold.sequences)
    assert len(captures) == made


@pytest.mark.slow
def test_sizes_that_cost_nothing_are_rehearsed_as_one(captures: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a text from 4 to 130 tokens three sizes are looked at, with and without a draft, or the largest alone."""
    model, draft = tiny_llama(), LMDraft(tiny_llama(num_layers=1, seed=3))
    made = []
    for slots in (64, 192):
        monkeypatch.setattr(Runner, "_cheap_slots", slots)
        before = len(captures)
        warm_up(model, draft, PROMPT, 120, **SETTINGS)
        made.append(len(captures) - before)
        generate(model, draft, PROMPT, max_new_tokens=120, seed=1, **SETTINGS)
        assert len(captures) - before == made[-1]
        vars(model).pop("_draftsmith_runners")
    assert made == [6, 2]


@pytest.mark.usefixtures("whims")
def test_texts_that_end_early_are_rehearsed_often_enough(captures: list[object]) -> None:
    """Half of all tokens end a text, so that most calls are over after a round or two."""
    model, draft = tiny_llama(), LMDraft(tiny_llama(num_layers=1, seed=3))
    settings: dict[str, Any] = {"num_draft_tokens": 2, "adaptive": True, "eos_token_id": list(range(32))}
    warm_up(model, draft, PROMPT, 20, **settings)
    made = len(captures)
    for seed in range(1, 30):
        generate(model, draft, PROMPT, max_new_tokens=20, seed=seed, **settings)
    assert len(captures) == made


def test_passes_over_lookups_are_captured_though_nothing_is_found(captures: list[object]) -> None:
    """The prompt repeats nothing; the texts that are written do."""
    model, drafter = tiny_llama(), NgramDrafter(NgramConfig(least_match=1))
    warm_up(model, drafter, PROMPT, 50, **SETTINGS)
    made = len(captures)
    for seed in range(6):
        out = generate(model, drafter, PROMPT, max_new_tokens=50, seed=seed, **SETTINGS)
        assert {one.drafted for one in out.stats.rounds} == {0, 2}
    assert len(captures) == made


NESTED: dict[str, Callable[[NgramDrafter, LMDraft, LMDraft], Drafter]] = {
    "cascade": lambda lookup, draft, other: CascadeDrafter(draft, lookup),
    "mixture": lambda lookup, draft, other: MixtureDrafter([lookup, draft]),
    "mixture of cascade": lambda lookup, draft, other: MixtureDrafter([other, CascadeDrafter(draft, lookup)]),
    "cascade on cascade": lambda lookup, draft, other: CascadeDrafter(draft, CascadeDrafter(other, lookup)),
}


@pytest.mark.parametrize("kind", by_default(1, NESTED))
def test_passes_of_members_are_captured_whichever_of_them_drafts(kind: str, captures: list[object]) -> None:
    """A warm-up's guesses repeat, so that a cascade would always have one; a mixture would hardly ask its draft."""
    model, draft = tiny_llama(), LMDraft(tiny_llama(num_layers=1, seed=3))
    lookup = NgramDrafter(NgramConfig(least_match=2))
    drafter = NESTED[kind](lookup, draft, LMDraft(tiny_llama(num_layers=1, seed=4)))
    warm_up(model, drafter, PROMPT, 40, **SETTINGS)
    made = len(captures)
    for seed in range(8):
        generate(model, drafter, PROMPT, max_new_tokens=40, seed=seed, **SETTINGS)
    assert [type(one).__name__ for one in captures[made:]] == []


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True])
def test_passes_of_all_widths_are_captured_of_a_draft_with_other_tokens(
    nested: bool, captures: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How much of a text is unread depends on what is written; rounds after the warm-up take every width in turn."""
    target, own = byte_level(300), byte_level(420)
    model, draft = tiny_llama(300), ForeignDrafter(tiny_llama(420, num_layers=1, seed=3), shared(target, own))
    drafter = CascadeDrafter(LMDraft(tiny_llama(300, num_layers=1, seed=5)), draft) if nested else draft
    prompt = torch.tensor([spelled(target)[:4], spelled(target)[4:8]])
    warm_up(model, drafter, prompt, 20, **SETTINGS)
    made, turns, widths = len(captures), count(), set[int]()
    real_begin, real_chain = Reader.begin, PassByPass.chain

    def begin(self: Reader, texts: Any, depth: int, width: int | None = None) -> None:
        real_begin(self, texts, depth, WIDTHS[next(turns) % len(WIDTHS)])

    def passed(self: PassByPass, tokens: torch.Tensor, place: int) -> torch.Tensor:
        widths.add(tokens.shape[1])
        return real_chain(self, tokens, place)

    monkeypatch.setattr(Reader, "begin", begin)
    monkeypatch.setattr(PassByPass, "chain", passed)
    for seed in range(10):
        generate(model, drafter, prompt, max_new_tokens=20, seed=seed, **SETTINGS)
    assert widths >= {1, *WIDTHS}
    assert made > 6
    assert len(captures) == made


def test_plain_decoding_is_warmed_up_as_well(captures: list[object]) -> None:
    model = tiny_llama()
    warm_up(model, None, PROMPT, 20, **{**SETTINGS, "num_draft_tokens": 1})
    made = len(captures)
    assert made
    generate(model, None, PROMPT, max_new_tokens=20, seed=0, eos_token_id=())
    assert len(captures) == made
