"""The timed run of a report: which prompts each part of it sees, and at which setting the peer is timed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from decode.autotune.timing import Costs
from decode.drafters.lm import LMDraft
from decode.sampling.warp import Sampling
from eval.arms.assisted import NAME, Setting
from eval.arms.ours import OurArm, TransformersArm
from eval.config import EvalConfig
from eval.measure import component_times as components
from eval.measure import draft_length, speed
from eval.measure.draft_length import ChoicePrompts, with_chosen_length
from eval.measure.speed import AUTOREGRESSIVE, TRANSFORMERS, draft_lengths, mean_context, measure_speed, own_arms
from eval.measure.timed_run import fastest, interleave, warm_up
from eval.prompts.held_out import Prompt, PromptSets
from tests.eval.samples import FakeArm, config, prompts

SETS = PromptSets(prompts(5, "reported"), 2, prompts(3, "other", tokens=6))


class Arms:
    """Stands where an arm is made; knows every one by its name and what it was made of."""

    def __init__(self) -> None:
        self.made: list[tuple[FakeArm, tuple[Any, ...]]] = []

    def __call__(self, name: str, model: object, *rest: Any) -> FakeArm:
        setting = next((one for one in rest if isinstance(one, Setting)), None)
        pace = 0.1 if setting is None else abs(setting.num_assistant_tokens - 5) + 0.01  # the peer is best at 5
        self.made.append((FakeArm(name, pace), rest))
        return self.made[-1][0]

    def asked(self, name: str) -> list[set[tuple[int, ...]]]:
        """By arm of that name, the prompts that it was given."""
        return [arm.asked for arm, _ in self.made if arm.name == name]


def arms_made_up(monkeypatch: pytest.MonkeyPatch) -> Arms:
    """In place of all arms; bare forwards take as many seconds as the context has tokens."""
    made = Arms()
    for name in ("OurArm", "TransformersArm", "AssistedArm"):
        monkeypatch.setattr(speed, name, made)
    monkeypatch.setattr(draft_length, "OurArm", made)
    monkeypatch.setattr(speed, "_uncached", lambda *_: {}, raising=False)

    def measure(_: object, drafter: object, context: int, sizes: list[int], batch_size: int, repeats: int) -> Costs:
        return Costs(context, batch_size, 0.1, {size: float(context) for size in sizes})

    monkeypatch.setattr(components, "measure", measure)
    return made


def timed_config(**changes: Any) -> EvalConfig:
    timing = {"prompts": 2, "rounds": 2, "screening_tokens": 4, "sweep": [1, 3], **changes.pop("timing", {})}
    decode = {"num_draft_tokens": 2, "max_new_tokens": 8, **changes.pop("decode", {})}
    return config(timing=timing, decode=decode, **changes)


def ids(some: list[Prompt]) -> set[tuple[int, ...]]:
    return {prompt.ids for prompt in some}


def timed_run(monkeypatch: pytest.MonkeyPatch) -> tuple[Arms, speed.Timed]:
    """At one temperature; the draft is none that could run."""
    arms, draft = arms_made_up(monkeypatch), object.__new__(LMDraft)
    monkeypatch.setattr(LMDraft, "model", object(), raising=False)
    model: Any = object()
    return arms, measure_speed(timed_config(temperatures=[1.0]), model, {"d": draft}, SETS)[1.0]


def test_the_peer_is_timed_at_the_setting_that_was_fastest_on_other_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    arms, timed = timed_run(monkeypatch)
    assert timed.setting is not None
    assert timed.setting.num_assistant_tokens == 5
    assert timed.screened[Setting(3, 0.0)] == pytest.approx(2.01)  # median seconds per token
    *tried, last = [(arm, rest[-1]) for arm, rest in arms.made if isinstance(rest[-1], Setting)]
    assert last[1] == timed.setting
    assert last[0].asked == ids(SETS.timed)
    assert all(arm.asked <= ids(SETS.screening) for arm, _ in tried)


def test_what_warms_up_is_not_timed_and_what_is_timed_does_not_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    arms, timed = timed_run(monkeypatch)
    assert set(timed.samples) == {AUTOREGRESSIVE, TRANSFORMERS, "d k=1", "d k=2", "d k=3", NAME}
    for arm, _ in arms.made:
        if arm.name in (AUTOREGRESSIVE, "d k=2"):
            warm, *others = [set(call[0]) for call in arm.calls]
            assert warm <= ids(SETS.screening)
            assert set.union(*others) == ids(SETS.timed)
    for groups in timed.samples.values():
        assert [[one.tokens for one in rounds] for rounds in groups] == [[8, 8], [8, 8]]


def test_component_times_are_those_at_the_timed_prompts_mean_context(monkeypatch: pytest.MonkeyPatch) -> None:
    _, timed = timed_run(monkeypatch)
    assert set(timed.costs) == {("d", 1), ("d", 2), ("d", 3)}
    assert timed.costs["d", 2].t_target_1 == 4 + 8 / 2


def test_the_mean_context_lies_half_way_through_the_continuation() -> None:
    assert mean_context([*prompts(1, tokens=10), *prompts(3, tokens=30)], 8) == 25 + 4


def test_draft_lengths_are_swept_for_the_first_draft_at_the_first_temperature() -> None:
    cfg = timed_config(drafts={"d": "d", "e": "e"}, temperatures=[0.5, 1.0])
    assert draft_lengths(cfg, 0.5, "d") == [1, 2, 3]
    assert draft_lengths(cfg, 0.5, "e") == draft_lengths(cfg, 1.0, "d") == [2]


@pytest.mark.parametrize(("temperature", "verifier"), [(0.0, "greedy"), (0.7, "coupled")])
def test_all_arms_are_given_the_temperature_of_their_run(temperature: float, verifier: str) -> None:
    cfg = timed_config(temperatures=[temperature, 1.0], decode={"num_draft_tokens": 2, "top_k": 5, "top_p": 0.9})
    model: Any = object()
    alone, theirs, *ours = own_arms(cfg, model, {"d": object()}, temperature)
    assert isinstance(alone, OurArm)
    assert isinstance(theirs, TransformersArm)
    assert alone.drafter is None
    drafted = [one for one in ours if isinstance(one, OurArm)]
    assert [(one.name, one.settings["num_draft_tokens"]) for one in drafted] == [
        ("d k=1", 1),
        ("d k=2", 2),
        ("d k=3", 3),
    ]
    for one in (alone, *drafted):
        given = [one.settings[key] for key in ("temperature", "verifier", "top_k", "top_p")]
        assert given == [temperature, verifier, 5, 0.9]
    assert theirs.sampling == Sampling(temperature, 5, 0.9)


def test_a_setting_that_never_came_to_a_second_arrival_is_the_slowest() -> None:
    assert speed._median_or_inf(np.array([np.nan, 1.0, 5.0, 3.0, 3.5])) == 3.25
    assert speed._median_or_inf(np.array([np.nan])) == float("inf")


def test_the_fastest_is_the_one_of_most_tokens_per_second() -> None:
    assert fastest({1: 3.0, 2: 5.0, 4: None}) == 2
    assert fastest({1: None, 2: 0.1}) == 2


def test_the_draft_length_is_the_fastest_on_the_prompts_of_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    arms, cfg = Arms(), timed_config(timing={"choose_k": [2, 3, 4]}, temperatures=[0.5])
    paces = {"k=2": 0.4, "k=3": 0.2, "k=4": 0.3}
    monkeypatch.setattr(draft_length, "load", lambda *_: (object(), {"d": object()}))
    monkeypatch.setattr(draft_length, "OurArm", lambda name, *rest: made(arms, name, paces[name], rest))
    chosen, choice = with_chosen_length(cfg, ChoicePrompts(SETS.screening, "somewhere"))
    assert choice is not None
    assert chosen.decode.num_draft_tokens == choice.num_draft_tokens == 3
    assert choice.tried == pytest.approx({2: 2.5, 3: 5.0, 4: 1 / 0.3})
    assert (choice.prompts, choice.temperature) == (3, 0.5)
    for arm, rest in arms.made:
        assert [call[2] for call in arm.calls] == [4] * 4  # once to warm up, once a prompt
        assert rest[-1]["num_draft_tokens"] == int(arm.name[2:])
        assert rest[-1]["temperature"] == 0.5


def made(arms: Arms, name: str, pace: float, rest: tuple[Any, ...]) -> FakeArm:
    arm = arms(name, object(), *rest)
    arm.pace = pace
    return arm


def test_noise_is_new_in_every_round_and_that_of_the_prompt_in_every_arm() -> None:
    both = [FakeArm("a"), FakeArm("b")]
    interleave(both, SETS.reported[:3], 8, 2, 7, 2, "x")
    first = SETS.reported
    expected = [([first[0].ids, first[1].ids], [0, 1], 8, 7), ([first[2].ids], [2], 8, 7)]
    for arm in both:
        assert arm.calls == [*expected, *[(asked, rows, most, 8) for asked, rows, most, _ in expected]]


def test_warming_up_fills_the_batch_with_different_prompts_and_keeps_nothing() -> None:
    arm = FakeArm("a")
    warm_up([arm], SETS.screening, 4, 7)
    first, second, third = (prompt.ids for prompt in SETS.screening)
    assert arm.calls == [([first, second, third, first], [0, 1, 2, 3], 16, 7)]
