"""Component times: what is timed, how pieces become medians, and what they predict."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from decode.autotune.timing import Costs
from decode.forward.runner import CAPTURE_AFTER
from decode.sampling.config import SamplingConfig
from eval.measure import timed_run as components
from eval.measure.cells import Cell, CellRun
from eval.measure.timed_run import CostMeter, is_plain_chain, promised_speedup
from eval.render.report_page import page_of
from eval.results.schema import ComponentTimes
from tests.eval.reports import report, row
from tests.eval.samples import config
from tests.eval.samples import prompts as some_prompts


class Named(str):
    """A drafter that only has a name."""

    def drafted_depth(self, shape: Any) -> int:
        return shape.depth


def test_a_report_of_passes_that_are_not_timed_alone_tells_no_component_times() -> None:
    """An adaptive draft, say, has no one length."""
    untimed = row(component_times=None, predicted_speedup=None, realised=None)
    page = page_of(report([untimed]))
    for text in (page.markdown(), page.html()):
        assert "Component times" not in text
        assert "component times predict" not in text
        assert "of the predicted speedup realised" not in text
    assert "Component times" in page_of(report()).markdown()


def metered(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[tuple[str, int], ComponentTimes], list[tuple[Any, ...]]]:
    """Component times of three pieces in which everything takes other seconds, and what was asked for in them."""
    calls: list[tuple[Any, ...]] = []
    pieces = {
        "one": [(0.1, {1: 1.0, 3: 2.0}), (0.3, {1: 3.0, 3: 4.0}), (0.8, {1: 9.0, 3: 9.0})],
        "two": [(0.5, {1: 5.0, 2: 6.0, 3: 8.0}), (0.6, {1: 6.0, 2: 7.0, 3: 3.0}), (0.9, {1: 2.0, 2: 9.5, 3: 5.0})],
    }

    def measure(model: Any, drafter: str, context: int, sizes: list[int], batch_size: int, repeats: int) -> Costs:
        calls.append((model, drafter, context, sizes, batch_size, repeats))
        t_draft, t_target = pieces[drafter].pop(0)
        return Costs(context, batch_size, t_draft, t_target)

    monkeypatch.setattr(components, "measure", measure)
    target: Any = "target"
    lengths = {"one": [2], "two": [1, 2]}
    meter = CostMeter(target, {name: Named(name) for name in lengths}, lengths, context=77, batch_size=4, repeats=9)
    for _ in range(3):
        meter.sample()
    return meter.result(), calls


def test_medians_of_the_drafts_are_their_own_and_of_the_target_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    # Over one token the target took 1, 3, 9, 5, 6 and 2 seconds; over two 6, 7 and 9.5; over three 2, 4, 9, 8, 3 and 5.
    assert metered(monkeypatch)[0] == {
        ("one", 2): ComponentTimes(num_draft_tokens=2, t_target_1_s=4.0, t_target_k1_s=4.5, t_draft_s=0.3),
        ("two", 1): ComponentTimes(num_draft_tokens=1, t_target_1_s=4.0, t_target_k1_s=7.0, t_draft_s=0.6),
        ("two", 2): ComponentTimes(num_draft_tokens=2, t_target_1_s=4.0, t_target_k1_s=4.5, t_draft_s=0.6),
    }


def test_a_step_and_every_verification_are_timed_at_the_runs_context_and_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = ("target", "one", 77, [1, 3], 4, 9), ("target", "two", 77, [1, 2, 3], 4, 9)
    assert metered(monkeypatch)[1] == [one, two] * 3


def test_passes_are_captured_before_any_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def measure(*asked: Any) -> Costs:
        calls.append(asked[-1])
        return Costs(1, 1, 0.1 if len(calls) > 1 else 9.0, {1: 1.0, 3: 2.0})

    monkeypatch.setattr(components, "measure", measure)
    model: Any = None
    meter = CostMeter(model, {"d": Named("d")}, {"d": [2]}, 8, 1, repeats=2)
    meter.warm_up()
    meter.sample()
    assert calls == [CAPTURE_AFTER, 2]
    assert meter.result()["d", 2].t_draft_s == 0.1


@pytest.mark.parametrize(("repeats", "prompts", "rows", "each"), [(12, 10, 1, 2), (12, 12, 4, 4), (1, 5, 1, 1)])
def test_the_forwards_of_a_round_are_spread_over_its_batches(repeats: int, prompts: int, rows: int, each: int) -> None:
    cfg, model = config(timing={"prompts": prompts, "cost_repeats": repeats}), SimpleNamespace(dtype="torch.float32")
    run = CellRun(cfg, model, {})  # type: ignore[arg-type]
    assert run._cost_meter(Cell(rows, 1.0, "text"), [], some_prompts(prompts)).repeats == each


def test_the_promise_is_tau_steps_for_k_draft_tokens_and_one_verification() -> None:
    times = ComponentTimes(num_draft_tokens=4, t_target_1_s=10.0, t_target_k1_s=11.0, t_draft_s=1.0)
    assert promised_speedup(times, 3.0) == 30 / 15


@pytest.mark.parametrize(
    ("settings", "is_predicted"),
    [({}, True), ({"adaptive": True}, False), ({"tree": "2x1"}, False), ({"overlap": True}, False)],
)
def test_only_chains_of_one_length_are_predicted(settings: dict[str, Any], is_predicted: bool) -> None:
    assert is_plain_chain(SamplingConfig(**settings)) == is_predicted
