"""Rows of reports, and ratios of what results.json keeps."""

from __future__ import annotations

from functools import partial

from tests.eval import test_pairs, test_rows
from tests.faults import Fault, noticed_by

A_ROW = test_rows.test_every_figure_of_a_row_is_that_worked_out_by_hand
A_TIMED_ROW = test_rows.test_a_timed_row_leaves_open_what_a_timed_run_does_not_tell

FAULTS: list[Fault] = [
    *noticed_by(
        test_rows.test_a_speedup_is_the_others_time_over_ours,
        (
            "eval.results.figures:_pairs",
            "seconds_per_token(samples[other]), seconds_per_token(samples[ours])",
            "seconds_per_token(samples[ours]), seconds_per_token(samples[other])",
        ),
    ),
    *noticed_by(
        test_rows.test_a_whole_calls_speedup_counts_the_reading_of_the_prompt,
        (
            "eval.results.figures:_call_pairs",
            "call_seconds_per_token(samples[ours])",
            "seconds_per_token(samples[ours])",
        ),
    ),
    *noticed_by(
        test_rows.test_a_category_is_judged_by_its_own_prompts_alone,
        ("eval.results.figures:_pairs", "[list(groups)]", ""),
        ("eval.results.figures:speed", "baseline(samples, groups)", "AUTOREGRESSIVE"),
    ),
    *noticed_by(
        test_rows.test_a_ratio_is_of_the_prompts_that_both_have_times_for,
        ("eval.results.figures:_ratio", "np.isfinite(pairs).all(1)", "np.isfinite(pairs).any(1)"),
    ),
    *noticed_by(
        test_rows.test_the_speed_of_an_arm_is_the_median_prompts,
        ("eval.results.figures:tokens_per_s", "nanmedian", "nanmean"),
        ("eval.results.figures:tokens_per_s", "1 / seconds_per_token(samples)", "seconds_per_token(samples)"),
    ),
    *noticed_by(
        partial(test_rows.test_the_baseline_is_the_faster_way_without_a_draft, alone=0.2, theirs=0.3),
        ("eval.results.figures:baseline", "max(", "min("),
        ("eval.results.figures:baseline", "max((AUTOREGRESSIVE, TRANSFORMERS)", "max((TRANSFORMERS,)"),
    ),
    *noticed_by(
        test_rows.test_tau_counts_the_bonus_token_and_is_pooled_over_rounds,
        ("eval.results.figures:acceptance", "r.emitted", "r.accepted"),
    ),
    *noticed_by(
        test_rows.test_a_decoder_that_loses_nothing_realises_what_is_predicted_however_prompts_differ,
        ("eval.results.figures:speed", "typical_tau([samples[one.arm][group] for group in groups])", "39 / 23"),
        ("eval.results.figures:typical_tau", "np.median(each)", "np.mean(each)"),
        ("eval.results.figures:_realised", "np.median(drawn[..., 2], axis=-1)", "2.0"),
    ),
    *noticed_by(
        test_rows.test_a_prompts_tau_is_that_after_its_first_arrival_over_all_its_rounds,
        ("eval.results.figures:taus", "sample.rounds[len(sample.new_ids) :]", "sample.rounds[1:]"),
    ),
    *noticed_by(
        test_rows.test_the_interval_of_tau_resamples_prompts_not_rounds,
        (
            "eval.results.figures:acceptance",
            "[[one for sample in group for one in sample.rounds] for group in samples]",
            "[[one] for group in samples for sample in group for one in sample.rounds]",
        ),
    ),
    *noticed_by(
        A_ROW,
        ("eval.results.figures:_alpha", "scope.texts, scope.units", "scope.texts"),
        ("eval.results.figures:speed", "speedup.value / predicted", "predicted / speedup.value"),
        ("eval.results.figures:latency", "sample.first_s", "sample.seconds"),
        ("eval.results.figures:latency", "float(np.median(", "1e3 * float(np.median("),
        ("eval.results.figures:latency", "np.median(", "np.mean("),
        ("eval.results.figures:_checked", "for text in texts if text in checks", "for text in checks"),
        ("eval.results.figures:make_row", "max(sample.peak", "sum(sample.peak"),
    ),
    *noticed_by(
        test_rows.test_latency_is_in_seconds_and_gaps_lie_within_a_call,
        (
            "eval.results.figures:latency",
            "[gap for sample in each for gap in inter_arrivals(sample.arrivals)]",
            "inter_arrivals([at for sample in each for at in sample.arrivals])",
        ),
    ),
    *noticed_by(
        test_rows.test_flips_are_counted_against_our_own_loop,
        ("eval.results.figures:dtype_flips", "samples[AUTOREGRESSIVE]", "samples[TRANSFORMERS]"),
    ),
    *noticed_by(
        A_TIMED_ROW,
        (
            "eval.results.figures:speed",
            "speed_ratio(samples, one.arm, base, groups, seed)",
            "speed_ratio(samples, base, one.arm, groups, seed)",
        ),
        ("eval.results.figures:speed", "speedup.value / predicted", "speedup.value * predicted"),
    ),
    *noticed_by(
        test_rows.test_flips_against_an_uncached_forward_are_those_of_the_groups_of_the_row,
        ("eval.results.figures:uncached_flips", "for group in groups", "for group in range(len(checks))"),
    ),
    *noticed_by(
        test_pairs.test_a_ratio_is_the_others_time_over_ours_by_the_median_of_all_pairs,
        ("eval.results.statistics:arm_pairs", "np.stack([theirs, mine], axis=1)", "np.stack([mine, theirs], axis=1)"),
    ),
    *noticed_by(
        test_pairs.test_a_speed_is_the_median_over_all_batches,
        ("eval.results.statistics:arm_seconds", "np.nan if value is None", "0.0 if value is None"),
        ("eval.results.statistics:arm_speed", "nanmedian(each)", "nanmean(each)"),
    ),
    *noticed_by(
        test_pairs.test_the_faster_of_several_has_most_tokens_per_second,
        ("eval.results.statistics:fastest_arm", "max(speeds", "min(speeds"),
    ),
    *noticed_by(
        test_pairs.test_kept_times_are_seconds_per_token_with_and_without_the_prompt,
        ("eval.measure.cells:arm_times", "_numbers(call_seconds_per_token", "_numbers(seconds_per_token"),
    ),
    *noticed_by(
        test_pairs.test_every_arm_of_a_cell_is_held_against_the_three_that_are_asked_about,
        (
            "eval.results.comparisons:cell_with_ratios",
            'arm_ratio([cell], one["arm"], other, seed)',
            'arm_ratio([cell], other, one["arm"], seed)',
        ),
    ),
    *noticed_by(
        test_pairs.test_peers_are_held_against_our_best_setting,
        (
            "eval.modes.compare.peers:_peer",
            "ratio_over(runs, ours, peer, seed)",
            "ratio_over(runs, peer, ours, seed)",
        ),
    ),
    *noticed_by(
        test_pairs.test_families_are_held_against_the_faster_way_without_a_draft,
        ("eval.modes.families.results:_cell", "PLAIN_ARMS", "PLAIN_ARMS[1:]"),
    ),
    *noticed_by(
        test_pairs.test_a_curve_is_of_one_kind_of_line,
        ("eval.render.plots:series", 'line.get("kind") == kind', "kind"),
    ),
    *noticed_by(
        test_pairs.test_metrics_are_looked_for_in_the_drafts_folder_and_then_in_its_runs,
        (
            "eval.render.plots:training_curves",
            "(Path(path), Path(path).parent)",
            "(Path(path).parent, Path(path))",
        ),
    ),
]
