"""The timed run of a report: which prompts each part of it sees, and at which settings its arms are timed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from decode.autotune.timing import Costs
from decode.drafters.lm import LMDraft
from decode.sampling.warp import Sampling
from eval.arms import ours as build_arms
from eval.arms.base import ASSISTED, AUTOREGRESSIVE, TRANSFORMERS
from eval.arms.ours import OurArm, drafting, plain_arms
from eval.arms.transformers_arms import Setting, TransformersArm
from eval.config import EvalConfig
from eval.measure import cells as cell_run
from eval.measure import timed_run as components
from eval.measure.cells import Cell, CellRun, Point, choose, mean_context
from eval.measure.losslessness import Check
from eval.measure.timed_run import fastest, interleave, warm_up
from eval.modes import report
from eval.modes.report import time_cell, with_chosen_length
from eval.prompts.held_out import PromptSets
from eval.prompts.prompt import Prompt
from eval.results.document import LENGTH, draft_lengths
from tests.eval.energy_checks import check_energy
from tests.eval.samples import FakeArm, config, prompts, sample

SETS = PromptSets(prompts(5, "reported"), 2, prompts(3, "other", tokens=6))
CELL = Cell(1, 1.0, "text")


class Arms:
    """Stands where an arm is made; knows every one by its name and what it was made of."""

    def __init__(self) -> None:
        self.made: list[tuple[FakeArm, tuple[Any, ...]]] = []

    def __call__(self, name: str, model: object, *rest: Any, setting: Setting | None = None, **_: Any) -> FakeArm:
        pace = 0.1 if setting is None else abs(setting.num_assistant_tokens - 5) + 0.01  # the peer is best at 5
        self.made.append((FakeArm(name, pace), rest if setting is None else (*rest, setting)))
        return self.made[-1][0]


def arms_made_up(monkeypatch: pytest.MonkeyPatch) -> Arms:
    """In place of all arms; bare forwards take as many seconds as the context has tokens."""
    made = Arms()
    for name in ("OurArm", "TransformersArm"):
        monkeypatch.setattr(build_arms, name, made)
    monkeypatch.setattr(report, "renamed", lambda arm, _: arm)  # a made-up peer keeps the name of its setting

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


def run_of(monkeypatch: pytest.MonkeyPatch, cfg: EvalConfig) -> tuple[Arms, CellRun]:
    """Arms made up, and a draft that transformers would take but that cannot run."""
    arms, draft = arms_made_up(monkeypatch), object.__new__(LMDraft)
    monkeypatch.setattr(LMDraft, "model", object(), raising=False)
    monkeypatch.setattr(LMDraft, "window", None)
    model: Any = SimpleNamespace(dtype="torch.bfloat16", parameters=list)
    return arms, CellRun(cfg, model, {"d": draft})


def timed_run(monkeypatch: pytest.MonkeyPatch) -> tuple[Arms, dict[str, Any]]:
    """At one temperature."""
    arms, run = run_of(monkeypatch, timed_config(temperatures=[1.0]))
    monkeypatch.setattr(cell_run, "check_samples", lambda *_: [Check(1, 0, 8), Check(0, 1, 8)])
    return arms, time_cell(run, CELL, {ASSISTED: "k=5,c=0"}, SETS, {"d": "lm"})


def test_every_cell_has_a_file_of_its_own() -> None:
    """Whatever its label is, and however near its temperature lies to another's."""
    labels = ("code", "code/chat", "code_chat", "../x", "y" * 300, "y" * 301)
    names = [Cell(1, temperature, label).name for temperature in (0.5, 0.5000001, 1.0) for label in labels]
    assert len(set(names)) == len(names)
    assert all(len(name) < 120 and "/" not in name for name in names)
    assert Cell(1, 1.0, "code").name == "batch1-T1-code"


def test_settings_are_chosen_on_other_prompts_and_the_fastest_is_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = timed_config(temperatures=[1.0], timing={"choose_k": [2, 3]})
    arms, run = run_of(monkeypatch, cfg)
    choice = choose(cfg, Point(1, 1.0), report._candidates(run, Point(1, 1.0)), SETS.screening)
    assert choice["best"][ASSISTED] == "k=5,c=0"
    assert choice["tokens_per_s"][ASSISTED]["k=3,c=0"] == pytest.approx(1 / 2.01)
    assert set(choice["tokens_per_s"][LENGTH]) == {"2", "3"}
    assert choice["prompts"] == 3
    assert arms.made
    for arm, _ in arms.made:
        assert arm.asked == ids(SETS.screening)
        assert {call[2] for call in arm.calls} == {4}


def test_the_draft_length_is_chosen_at_the_first_temperature_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = timed_config(temperatures=[1.0, 0.0], timing={"choose_k": [3, 4]})
    arms, run = run_of(monkeypatch, cfg)
    assert set(report._candidates(run, Point(1, 1.0))) == {LENGTH, ASSISTED}
    lengths = [rest[-1] for arm, rest in arms.made if arm.name.startswith("d k=")]
    assert [(one["num_draft_tokens"], one["temperature"]) for one in lengths] == [(3, 1.0), (4, 1.0)]
    assert set(report._candidates(run, Point(1, 0.0))) == {ASSISTED}
    chosen = with_chosen_length(cfg, {LENGTH: "4"})
    assert chosen.decode.num_draft_tokens == 4


def test_the_peer_is_timed_at_the_setting_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    arms, found = timed_run(monkeypatch)
    peers = {arm.name: arm for arm, rest in arms.made if isinstance(rest[-1], Setting)}
    timed = peers.pop(f"{ASSISTED}, k=5,c=0")
    assert ids(SETS.timed) <= timed.asked
    assert not any(arm.asked for arm in peers.values())
    assert timed.name in [one["arm"] for one in found["arms"]]


def test_what_warms_up_is_not_timed_and_what_is_timed_does_not_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    arms, found = timed_run(monkeypatch)
    names = {AUTOREGRESSIVE, TRANSFORMERS, "d k=1", "d k=2", "d k=3", f"{ASSISTED}, k=5,c=0"}
    assert {one["arm"] for one in found["arms"]} == names
    for arm, _ in arms.made:
        if arm.name in (AUTOREGRESSIVE, "d k=2"):
            warm, *others = [set(call[0]) for call in arm.calls]
            assert warm <= ids(SETS.screening)
            assert set.union(*others) == ids(SETS.timed)
    assert all(one["tokens"] == 2 * 2 * 8 for one in found["arms"])
    check_energy(found, names)


def test_component_times_are_those_at_the_timed_prompts_mean_context(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = timed_run(monkeypatch)
    costs = {row["num_draft_tokens"]: row["component_times"] for row in found["rows"]}
    assert set(costs) == {1, 2, 3}
    assert costs[2]["t_target_1_s"] == 4 + 8 / 2


def test_the_reports_own_length_is_held_against_an_uncached_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = timed_run(monkeypatch)
    judged = {row["num_draft_tokens"]: row["uncached_dtype_flips"] for row in found["rows"]}
    assert judged == {1: None, 2: 2, 3: None}
    assert {row["uncached_dtype_tokens"] for row in found["rows"]} == {0, 16}


def test_a_rule_with_noise_of_its_own_is_not_held_against_an_uncached_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    _, run = run_of(monkeypatch, timed_config(temperatures=[1.0], decode={"verifier": "rejection"}))
    monkeypatch.setattr(cell_run, "check_samples", lambda *_: pytest.fail("its tokens follow from no forward"))
    rows = time_cell(run, CELL, {}, SETS, {"d": "lm"})["rows"]
    assert {(row["verifier"], row["uncached_dtype_flips"], row["dtype_flips"]) for row in rows} == {
        ("rejection", None, None)
    }


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
    alone, theirs = plain_arms(cfg, model, temperature)
    assert isinstance(alone, OurArm)
    assert isinstance(theirs, TransformersArm)
    assert alone.drafter is None
    ours = build_arms.our_arm("d k=3", model, object(), drafting(cfg, temperature, 3))
    assert isinstance(ours, OurArm)
    assert (ours.name, ours.settings["num_draft_tokens"]) == ("d k=3", 3)
    for one in (alone, ours):
        given = [one.settings[key] for key in ("temperature", "verifier", "top_k", "top_p")]
        assert given == [temperature, verifier, 5, 0.9]
    assert theirs.sampling == Sampling(temperature, 5, 0.9)


def test_a_setting_that_never_came_to_a_second_arrival_is_the_slowest() -> None:
    class AtOnce(FakeArm):
        def run(self, *_: Any) -> Any:
            return sample([[1]])

    choice = choose(timed_config(), Point(1, 1.0), {"x": {"a": AtOnce("a"), "b": FakeArm("b", 9.0)}}, SETS.screening)
    assert choice["best"] == {"x": "b"}
    assert choice["tokens_per_s"] == {"x": {"a": None, "b": pytest.approx(1 / 9)}}


def test_the_fastest_is_the_one_of_most_tokens_per_second() -> None:
    assert fastest({1: 3.0, 2: 5.0, 4: None}) == 2
    assert fastest({1: None, 2: 0.1}) == 2


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
