"""alpha, losslessness and texts, in reports and in the suite of families."""

from __future__ import annotations

from functools import partial

from decode.sampling.warp import Sampling
from eval.measure.losslessness import Check
from tests.eval import (
    test_comparison,
    test_divergences,
    test_families,
    test_family_figures,
    test_quality,
    test_teacher_forced,
    test_texts,
)
from tests.faults import Fault, noticed_by

PLAIN_ALPHA = partial(
    test_teacher_forced.test_alpha_equals_the_plain_sum, sampling=Sampling(0.5, top_k=7), elements=2**27
)

FAULTS: list[Fault] = [
    *noticed_by(
        test_texts.test_shorter_prompts_are_padded_on_the_left_and_masked_there,
        (
            "eval.measure.continuations:left_padded",
            "[pad] * (width - len(prompt)) + list(prompt)",
            "list(prompt) + [pad] * (width - len(prompt))",
        ),
    ),
    *noticed_by(
        test_texts.test_a_text_ends_with_its_end_token_and_padding_is_no_part_of_it,
        (
            "eval.measure.continuations:continue_batch",
            "min(int(out.lengths[i]) - len(job.prompt), job.max_new)",
            "job.max_new",
        ),
    ),
    *noticed_by(
        test_texts.test_a_job_gets_its_own_noise_and_length_whatever_it_is_batched_with,
        (
            "eval.measure.continuations:continue_batch",
            "min(int(out.lengths[i]) - len(job.prompt), job.max_new)",
            "int(out.lengths[i]) - len(job.prompt)",
        ),
        (
            "eval.measure.continuations:continue_batch",
            "rows=[job.row for job in batch]",
            "rows=list(range(len(batch)))",
        ),
    ),
    *noticed_by(
        PLAIN_ALPHA,
        ("eval.measure.alpha:_alpha", "log_probs(logits_q, sampling))", "logits_q.float())"),
        ("eval.measure.alpha:_alpha", "log_probs(logits_p, sampling)", "logits_p.log_softmax(-1)"),
        ("eval.measure.alpha:_batch", "len(text.prompt) : len(text.ids)", ": len(text.ids)"),
    ),
    *noticed_by(
        test_teacher_forced.test_windows_of_one_document_are_resampled_together,
        ("eval.measure.alpha:Alphas.sums", "zip(rows, units or rows, strict=True)", "zip(rows, rows, strict=True)"),
    ),
    *noticed_by(
        test_teacher_forced.test_expected_tau_uses_runs_of_consecutive_tokens,
        ("eval.measure.alpha:Alphas.promised", "float(len(rounds) + rounds", "float(rounds"),
    ),
    *noticed_by(
        test_quality.test_alpha_is_that_of_text_and_models_at_the_same_temperature,
        (
            "eval.measure.quality:measure_quality",
            "write_alone(cfg, target, temperature,",
            "write_alone(cfg, target, cfg.temperatures[0],",
        ),
        ("eval.measure.quality:measure_quality", "sampling_at(cfg, temperature)", "sampling_at(cfg, 1.0)"),
    ),
    *noticed_by(
        test_quality.test_the_curve_measures_its_own_temperatures_and_takes_over_the_runs,
        (
            "eval.measure.quality:measure_curve",
            "sampling_at(cfg, temperature)",
            "sampling_at(cfg, cfg.temperatures[0])",
        ),
    ),
    *noticed_by(
        test_quality.test_the_first_draft_at_the_first_temperature_is_compared_most,
        ("eval.measure.quality:_check", "settings_at(cfg, temperature)", "settings_at(cfg, cfg.temperatures[0])"),
    ),
    *noticed_by(
        test_quality.test_the_runs_filters_hold_at_every_temperature,
        ("eval.inputs:sampling_at", "cfg.decode.top_k, cfg.decode.top_p", "cfg.decode.top_k, 1.0"),
    ),
    *noticed_by(
        partial(
            test_divergences.test_a_near_tie_lies_within_a_ten_thousandth_of_the_best_score,
            gap=0.00011,
            expected=Check(mismatches=1),
        ),
        ("eval.measure.losslessness:judge", "gap <= MARGIN", "gap <= 10 * MARGIN"),
    ),
    *noticed_by(
        test_divergences.test_a_divergence_at_the_last_token_leaves_nothing_to_go_on_with,
        ("eval.measure.losslessness:divergences", "start + at + 1 < len(text.new)", "start + at < len(text.new)"),
    ),
    *noticed_by(
        test_comparison.test_every_divergence_is_a_near_tie_or_a_mismatch,
        (
            "eval.measure.certificate_parts:_entry",
            "max(((scores.max() - scores[token])",
            "min(((scores.max() - scores[token])",
        ),
        (
            "eval.measure.certificate_parts:Departure.is_near_tie",
            "self.gap is not None and",
            "self.gap is None or",
        ),
    ),
    *noticed_by(
        test_comparison.test_what_a_part_leaves_of_its_time_goes_to_those_after_it,
        ("eval.measure.certificate_parts:State.allowed_s", "60 * minutes", "minutes"),
    ),
    *noticed_by(
        test_comparison.test_the_rate_is_divergences_per_token_compared,
        ("eval.modes.certificate:_row", "len(counts.divergences)", "counts.mismatches"),
    ),
    *noticed_by(
        test_comparison.test_most_tokens_are_greedy_ones_in_the_wide_precision_which_alone_is_judged,
        ("eval.modes.certificate:parts_of", 'dtype in ("float32", "float64")', "dtype != wide"),
    ),
    *noticed_by(
        test_family_figures.test_a_step_reads_all_rows_of_all_micro_steps_filled_as_they_are,
        (
            "eval.modes.families.trainings:tokens_per_step",
            "train.batch_size * train.gradient_accumulation",
            "train.batch_size",
        ),
    ),
    *noticed_by(
        test_family_figures.test_a_pace_is_tokens_over_seconds_and_steps_over_seconds,
        (
            "eval.modes.families.trainings:Pace.steps_for_seconds",
            "self.steps / self.seconds",
            "self.tokens / self.seconds",
        ),
    ),
    *noticed_by(
        test_families.test_budgets_become_steps,
        ("eval.modes.families.trainings:pace_of", 'line["tokens"] - tokens', 'line["tokens"]'),
    ),
    *noticed_by(
        test_family_figures.test_a_divergence_is_judged_and_its_resumed_text_counts_no_rounds_twice,
        ("eval.modes.families.measuring:Speculator.__call__", "self.rounds or dict(kept)", "dict(kept)"),
        ("eval.modes.families.measuring:_counts", "one.emitted", "one.accepted"),
    ),
    *noticed_by(
        test_family_figures.test_rounds_are_kept_by_request_from_the_first_call_alone,
        ("eval.modes.families.measuring:Speculator.__call__", "kept[batch[one.row].row]", "kept[one.row]"),
    ),
    *noticed_by(
        test_family_figures.test_tau_of_a_group_is_pooled_and_its_outcomes_are_counted_as_often_as_they_came,
        ("eval.modes.families.results:quality_row", " for _ in range(n)]", "]"),
    ),
    *noticed_by(
        test_family_figures.test_what_training_took_is_a_mean_over_seeds,
        (
            "eval.modes.families.results:training_row",
            "tokens / seconds",
            "fmean(pace.tokens / pace.seconds for pace in paces)",
        ),
    ),
    *noticed_by(
        test_family_figures.test_a_ratio_of_taus_is_ours_over_the_others,
        ("eval.modes.families.results:tau_ratio", "(counts(ours), counts(other))", "(counts(other), counts(ours))"),
    ),
    *noticed_by(
        test_family_figures.test_a_code_is_held_against_the_first_one_seed_by_seed,
        ("eval.modes.families.results:_codes", "_seeded(groups[group], cfg.families.feature_seeds)", "groups[group]"),
    ),
    *noticed_by(
        test_family_figures.test_a_rival_is_who_reaches_into_the_best_ones_interval,
        ("eval.modes.families.recommend:rivals", "one.ends[1] >= low", "one.value >= low"),
    ),
    *noticed_by(
        test_family_figures.test_a_draft_is_advised_only_where_its_whole_interval_is_above_one,
        ("eval.modes.families.recommend:_speeds", "reached[best].ends[0] > 1", "reached[best].value > 1"),
    ),
]
