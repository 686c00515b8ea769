"""Draft lengths by batch size: the wrong bar, the wrong neighbour."""

from __future__ import annotations

from functools import partial

from tests.eval.served import test_conclusion, test_schedule
from tests.faults import Fault, noticed_by

_IN = "eval.modes.served.schedule"
FAULTS: list[Fault] = [
    *noticed_by(
        test_schedule.test_a_longer_draft_has_to_be_faster_beyond_the_error_bar,
        (f"{_IN}.schedule:Ratio.is_faster", "self.ci95[0]", "self.value"),
        (f"{_IN}.schedule:Ratio.is_faster", "> 1.0", "> 0.0"),
    ),
    *noticed_by(
        test_schedule.test_the_interval_is_student_s_over_rounds,
        (f"{_IN}.schedule:_half_width", "0.975", "0.95"),
        (f"{_IN}.schedule:_half_width", "len(logs) - 1", "len(logs)"),
        (f"{_IN}.schedule:_half_width", " / math.sqrt(len(logs))", ""),
    ),
    *noticed_by(
        test_schedule.test_a_longer_draft_is_held_against_the_best_so_far_and_not_against_none,
        (f"{_IN}.schedule:_choice", "ratio(lengths[k], lengths[best])", "ratio(lengths[k], lengths[shortest])"),
    ),
    *noticed_by(
        test_schedule.test_over_plain_is_of_the_one_chosen_over_the_target_alone,
        (f"{_IN}.schedule:_choice", "ratio(speeds, plain)", "ratio(speeds, lengths[shortest])"),
    ),
    *noticed_by(
        partial(
            test_schedule.test_ranges_are_inclusive_without_gaps_and_neighbours_are_one,
            lengths={1: 2, 4: 4},
            expected=[(1, 3, 2), (4, 4, 4)],
        ),
        (f"{_IN}.schedule:per_batch_size", "min(k_before, one.k)", "max(k_before, one.k)"),
        (f"{_IN}.schedule:per_batch_size", "one.batch_size - 1, min", "one.batch_size, min"),
    ),
    *noticed_by(
        test_schedule.test_one_length_for_all_batch_sizes_weighs_them_alike,
        (f"{_IN}.schedule:_pooled", "math.exp(fmean(map(math.log, of_round)))", "fmean(of_round)"),
    ),
    *noticed_by(
        test_schedule.test_a_server_is_held_at_a_length_as_its_schedule_would_hold_it,
        (f"{_IN}.in_vllm:held_at", '"num_speculative_tokens": longest', '"num_speculative_tokens": k'),
    ),
    *noticed_by(
        test_conclusion.test_a_draft_that_is_nowhere_faster_than_the_target_alone_is_left_out,
        (f"{_IN}.conclusion:MeasuredDraft.schedule", "one.k and one.over_plain.is_faster", "one.k"),
    ),
]
