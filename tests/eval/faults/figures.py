"""The quantities and estimates that every claim is made of."""

from __future__ import annotations

from functools import partial

from tests.decode import test_generate, test_stats
from tests.eval import test_statistics
from tests.faults import Fault, noticed_by

FAULTS: list[Fault] = [
    *noticed_by(
        test_stats.test_a_position_counts_only_where_those_before_it_were_accepted_and_it_was_drafted,
        ("decode.acceptance:acceptance_by_position", "min(one.drafted, one.accepted + 1, k)", "min(one.drafted, k)"),
        (
            "decode.acceptance:acceptance_by_position",
            "min(one.drafted, one.accepted + 1, k)",
            "min(one.accepted + 1, k)",
        ),
    ),
    *noticed_by(
        test_stats.test_overlap_is_of_two_distributions_and_agreement_of_two_argmaxes,
        ("decode.acceptance:overlap", "torch.minimum", "torch.maximum"),
    ),
    *noticed_by(
        test_stats.test_windows_are_whole_runs_of_valid_positions,
        ("decode.acceptance:windows", ".all(-1)", ".any(-1)"),
        ("decode.acceptance:expected_tau", "cumprod", "cumsum"),
    ),
    *noticed_by(
        test_generate.test_acceptance_formulas_against_hand_computed_values,
        ("decode.acceptance:predicted_speedup", "k * t_draft + t_target_k1", "t_draft + t_target_k1"),
    ),
    *noticed_by(
        test_stats.test_counts_and_rates_of_a_call,
        ("decode.stats:Stats.num_tokens", "one.emitted", "one.accepted"),
        ("decode.stats:Stats.tokens_per_s", "self.num_tokens / self.total_s", "self.num_target_passes / self.total_s"),
        ("decode.stats:Stats.ttft_s", "arrival_s[0]", "arrival_s[-1]"),
    ),
    *noticed_by(
        test_stats.test_a_phase_adds_up_over_its_blocks,
        ("decode.stats:Stats.phase", "self.seconds[name] +=", "self.seconds[name] ="),
    ),
    *noticed_by(
        partial(test_stats.test_peak_memory_is_in_bytes, platform="linux", size=3072),
        ("decode.stats:peak_memory", "else 1024", "else 1000"),
    ),
    *noticed_by(
        test_statistics.test_ratio_of_sums_weighs_prompts_by_their_tokens,
        (
            "eval.results.statistics:ratio_of_sums",
            "sums[..., 0] / sums[..., 1]",
            "(columns[..., 0] / columns[..., 1]).mean(-1)",
        ),
    ),
    *noticed_by(
        test_statistics.test_median_of_ratios_ignores_one_disturbed_prompt,
        ("eval.results.statistics:median_of_ratios", "np.median(", "np.mean("),
    ),
    *noticed_by(
        test_statistics.test_a_ratio_of_ratios_is_of_the_first_two_sums_over_the_other_two,
        ("eval.results.statistics:ratio_of_ratios", "columns[..., :2]", "columns[..., 2:]"),
    ),
    *noticed_by(
        test_statistics.test_the_interval_leaves_two_and_a_half_per_cent_on_either_side,
        ("eval.results.statistics:bootstrap", "confidence_level=0.95", "confidence_level=0.9"),
        ("eval.results.statistics:bootstrap", "confidence_level=0.95", "confidence_level=0.98"),
        ("eval.results.statistics:bootstrap", "float(found.high)", "float(found.low)"),
    ),
    *noticed_by(
        test_statistics.test_pairing_removes_what_prompts_share,
        ("eval.results.statistics:bootstrap", "paired=True", "paired=False"),
    ),
    *noticed_by(
        test_statistics.test_every_resample_draws_as_many_prompts_as_there_are_and_each_draw_is_new,
        ("eval.results.statistics:bootstrap", "columns.size", "len(columns)"),
    ),
    *noticed_by(
        test_statistics.test_there_are_as_many_resamples_as_the_reports_say,
        ("eval.results.statistics:bootstrap", "n_resamples=resamples", "n_resamples=resamples // 2"),
    ),
    *noticed_by(
        test_statistics.test_trainings_and_prompts_are_each_resampled_and_prompts_are_shared_by_the_trainings,
        (
            "eval.results.statistics:bootstrap_crossed",
            "rows, places = (one[start : start + step] for one in drawn)",
            "rows, places = np.tile(np.arange(trainings), (step, 1)), drawn[1][start : start + step]",
        ),
        (
            "eval.results.statistics:bootstrap_crossed",
            "columns[rows[:, :, None], places[:, None]]",
            "columns[rows[:, :, None], rng.integers(0, prompts, (len(rows), trainings, prompts))]",
        ),
        ("eval.results.statistics:bootstrap_crossed", "[0.025, 0.975]", "[0.05, 0.95]"),
    ),
    *noticed_by(
        test_statistics.test_quantiles_are_interpolated_between_what_was_observed,
        ("eval.results.statistics:quantiles", "np.quantile(values, 0.95)", "np.quantile(values, 0.9)"),
    ),
    *noticed_by(
        test_statistics.test_a_burst_is_one_arrival,
        ("eval.results.statistics:inter_arrivals", "later - earlier", "later - arrivals[0]"),
    ),
    *noticed_by(
        test_statistics.test_repeated_4grams_are_counted_from_their_second_occurrence,
        ("eval.results.statistics:repeated_4grams", "tokens[i : i + 4]", "tokens[i : i + 3]"),
    ),
]
