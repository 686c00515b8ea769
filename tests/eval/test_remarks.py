"""What a report says of its own figures, against figures worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from eval.render.remarks import ONE_PROCESS, dearest_draft, predicted_by_length, remarks, taus, why_it_does_not_pay
from eval.render.report_page import page_of, render_block
from eval.results.reported import LengthSweep, Report
from eval.results.schema import Row
from tests.eval.reports import report, row

NO_SWEEP = LengthSweep(draft="mine", temperature=1.0, points=[])


def times(k: int, checking: float, draft: float) -> dict[str, Any]:
    """A target pass over one token takes a second."""
    return {"num_draft_tokens": k, "t_target_1_s": 1.0, "t_target_k1_s": checking, "t_draft_s": draft}


def slow(accepted: list[float | None], costs: dict[str, Any] | None, **changes: Any) -> Row:
    k = len(accepted)
    found = {"speedup": 0.8, "speedup_ci95": [0.7, 0.9], "num_draft_tokens": k, "alpha": 0.41}
    return Row(**row(acceptance_by_position=accepted, component_times=costs, **{**found, **changes}))


def told(results: dict[str, Any]) -> list[str]:
    return remarks(Report.model_validate(results))


DEAR = slow([0.41, 0.3], times(2, 1.24, 0.62))
LONG = slow([0.6, 0.6, 0.1, 0.1, 0.1], times(5, 1.5, 0.2))


def test_every_length_is_predicted_from_acceptance_and_component_times() -> None:
    assert taus(DEAR) == pytest.approx({1: 1.41, 2: 1.41 + 0.41 * 0.3})
    assert predicted_by_length(DEAR) == pytest.approx({1: 1.41 / (0.62 + 1.12), 2: 1.533 / (2 * 0.62 + 1.24)})
    assert dearest_draft(DEAR) == pytest.approx(1.41 - 1.12)  # of two: (1.533 - 1.24) / 2, which is less
    assert taus(slow([0.5, None, 0.5], None)) == {1: 1.5}  # no round came to the second position


def test_a_draft_that_pays_needs_no_reason() -> None:
    assert why_it_does_not_pay(Row(**row(speedup=1.0)), NO_SWEEP) is None
    assert why_it_does_not_pay(Row(**row(speedup=None)), NO_SWEEP) is None


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (
            DEAR,
            "No k up to 2 pays: drafting one token costs 0.62 of a target pass; at alpha 0.41 that would have to be "
            "below 0.29.",
        ),
        (LONG, "k=1 would pay: predicted 1.23."),  # 1.6 / (0.2 + 1.1), and two 1.96 / (0.4 + 1.2) = 1.225
        (
            LONG.model_copy(update={"realised": 0.8}),  # of 1.23
            "By its passes alone k=1 would give 1.23, and the decoder's own work takes more than that gains.",
        ),
        (
            slow([0.1], times(1, 1.3, 0.2)),
            "No k up to 1 pays: checking 2 tokens takes 1.30 target passes, which at alpha 0.41 even a free draft "
            "would not win back.",
        ),
        (
            slow([0.1], None, realised=None),
            "Its passes were not timed alone, so what it costs is not known; a plain chain (decode.tree=chain) is.",
        ),
    ],
)
def test_why_a_draft_does_not_pay_and_which_length_would(found: Row, reason: str) -> None:
    k = found.num_draft_tokens
    lead = f"At T=1 mine does not pay with k={k}: 0.80 [0.70, 0.90] times the speed without a draft. "
    assert why_it_does_not_pay(found, NO_SWEEP) == lead + reason


def test_a_length_that_was_timed_and_pays_comes_before_any_prediction() -> None:
    def sweep(ci95: list[float], **about: Any) -> LengthSweep:
        speeds = [(1, 1.1, [0.9, 1.3]), (2, 1.2, ci95), (3, None, None)]
        rows = [Row(**row(num_draft_tokens=k, speedup=speed, speedup_ci95=ends)) for k, speed, ends in speeds]
        return NO_SWEEP.model_copy(update={"points": rows, **about})

    assert str(why_it_does_not_pay(LONG, sweep([0.9, 1.3]))).endswith(" k=2 may pay: 1.20 [0.90, 1.30].")
    sure = [1.1, 1.3]
    assert str(why_it_does_not_pay(LONG, sweep(sure))).endswith(" k=2 pays: 1.20 [1.10, 1.30].")
    unsure = LONG.model_copy(update={"speedup_ci95": [0.6, 1.1]})
    assert "At T=1 mine is not shown to pay with k=" in str(why_it_does_not_pay(unsure, sweep(sure)))
    assert str(why_it_does_not_pay(LONG, sweep(sure, draft="other"))).endswith("predicted 1.23.")
    assert str(why_it_does_not_pay(LONG, sweep(sure, temperature=0.0))).endswith("predicted 1.23.")


def test_a_prediction_that_was_exceeded_is_explained() -> None:
    loop = report([row(realised=1.06, baseline_tokens_per_s=2.0)])  # 0.5 s a token, and its pass takes 0.4
    (first, *_) = told(loop)
    assert first == (
        "Faster than the passes alone predict: mine at T=1 (106% of that speedup). Without a draft a token takes up to "
        "1.25 times its pass, and a draft saves part of what the decoder adds to each pass, too. The speedup itself is "
        "measured."
    )
    alone = report([row(realised=1.5, baseline_tokens_per_s=2.5)])
    assert "Passes took longer when timed alone than within the run." in told(alone)[0]
    assert told(report([row(realised=1.05)])) == [ONE_PROCESS]


def test_an_interval_that_holds_one_is_told() -> None:
    known = row(speedup=1.2, speedup_ci95=[0.7, 1.4])
    said = "Not shown to be faster than no draft, since the interval of the speedup holds 1: mine at T=1."
    assert told(report([known])) == [said, ONE_PROCESS]
    assert told(report([row(speedup=1.2, speedup_ci95=[1.01, 1.4])])) == [ONE_PROCESS]


def test_fewer_prompts_than_were_wanted_are_told() -> None:
    prompts = report()["prompts"] | {"reported": 11, "timed": 9}
    few = report(prompts=prompts | {"wanted": {"reported": 96, "timed": 12, "screening": 8}})
    said = "There were 11 of the 96 prompts that were wanted, 9 of 12 timed: intervals are wider for it."
    assert told(few) == [said, ONE_PROCESS]
    assert told(report(prompts=prompts | {"wanted": {"reported": 11, "timed": 9, "screening": 8}})) == [ONE_PROCESS]


def test_page_and_summary_say_all_of_it_and_readme_that_it_is_one_process() -> None:
    found = report([DEAR.model_dump()])
    for text in (page_of(found).html(), page_of(found).markdown()):
        assert "would have to be below 0.29." in text
        assert ONE_PROCESS in text
    assert ONE_PROCESS in render_block(found)
    assert "below 0.29" not in render_block(found)
