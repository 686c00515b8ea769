"""Several runs as one, and what a report says of its figures."""

from __future__ import annotations

from tests.eval import test_pooling, test_remarks
from tests.faults import Fault, noticed_by

FAULTS: list[Fault] = [
    *noticed_by(
        test_pooling.test_a_speedup_is_the_median_over_runs_and_prompts_with_an_interval_over_both,
        ("eval.results.pooling:pooled_row", "[row.speedup for row in each]", "[each[0].speedup] * len(each)"),
    ),
    *noticed_by(
        test_pooling.test_runs_that_agree_are_no_more_prompts_than_one_run,
        (
            "eval.results.pooling:_estimate",
            "bootstrap_crossed(known, statistic, seed)",
            "bootstrap_crossed(known.reshape(1, -1, 2), statistic, seed)",
        ),
    ),
    *noticed_by(
        test_pooling.test_counts_are_added_and_the_rest_are_medians_over_runs,
        ("eval.results.pooling:_median", "median(known)", "sum(known) / len(known)"),
        ("eval.results.pooling:_sum", "None if None in values else ", ""),
    ),
    *noticed_by(
        test_pooling.test_a_prompt_that_one_run_could_not_time_is_left_out_of_all,
        ("eval.results.pooling:_estimate", ".all((0, 2))", ".any((0, 2))"),
    ),
    *noticed_by(
        test_pooling.test_the_best_head_is_the_one_of_most_tokens_per_pass,
        ("eval.render.pooled:sides", "-one.tau", "one.tau"),
        ("eval.render.pooled:sides", "one.temperature == row.temperature", "True"),
    ),
    *noticed_by(
        test_remarks.test_every_length_is_predicted_from_acceptance_and_component_times,
        ("eval.render.remarks:verification", "1 + slope * k", "1 + slope * (k + 1)"),
        ("eval.render.remarks:dearest_draft", "max(", "min("),
        ("eval.render.remarks:draft_cost", "t_draft_s /", "t_draft_s * 2 /"),
    ),
    *noticed_by(
        test_remarks.test_a_length_that_was_timed_and_pays_comes_before_any_prediction,
        (
            "eval.render.remarks:_other_length",
            "(sweep.draft, sweep.temperature)",
            "(row.draft, row.temperature)",
        ),
    ),
    *noticed_by(
        test_remarks.test_a_prediction_that_was_exceeded_is_explained,
        ("eval.render.remarks:_faster_than_predicted", "row.realised > MOST", "row.realised >= MOST"),
    ),
]
