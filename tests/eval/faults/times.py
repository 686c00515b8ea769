"""What is timed, when, and what of it is counted."""

from __future__ import annotations

from tests.eval import test_components, test_measure, test_padding, test_profile, test_speed, test_texts
from tests.faults import Fault, noticed_by

FAULTS: list[Fault] = [
    *noticed_by(
        test_components.test_medians_of_the_drafts_are_their_own_and_of_the_target_are_shared,
        ("eval.measure.timed_run:CostMeter.result", "target[drafted + 1]", "target[1]"),
        ("eval.measure.timed_run:CostMeter.result", "median(seconds)", "min(seconds)"),
        ("eval.measure.timed_run:CostMeter.result", "median(seconds)", "sum(seconds) / len(seconds)"),
        ("eval.measure.timed_run:CostMeter.result", "median(one.t_draft", "min(one.t_draft"),
    ),
    *noticed_by(
        test_components.test_a_step_and_every_verification_are_timed_at_the_runs_context_and_batch,
        (
            "eval.measure.timed_run:CostMeter._measure",
            "[1, *(self._drafted(name, k) + 1 for k in self.draft_lengths[name])]",
            "[1, *self.draft_lengths[name]]",
        ),
        ("eval.measure.timed_run:CostMeter._measure", "self.batch_size", "1"),
    ),
    *noticed_by(
        test_components.test_the_promise_is_tau_steps_for_k_draft_tokens_and_one_verification,
        (
            "eval.measure.timed_run:promised_speedup",
            "costs.t_target_1_s, costs.t_draft_s, costs.t_target_k1_s",
            "costs.t_target_1_s, costs.t_target_k1_s, costs.t_draft_s",
        ),
    ),
    *noticed_by(
        test_speed.test_noise_is_new_in_every_round_and_that_of_the_prompt_in_every_arm,
        ("eval.measure.timed_run:interleave", "seed + turn", "seed"),
    ),
    *noticed_by(
        test_measure.test_every_round_gives_every_prompt_to_every_arm_before_the_next_prompt,
        ("eval.measure.timed_run:interleave", "for arm in order(arms, seed, turn, number)", "for arm in arms"),
    ),
    *noticed_by(
        test_measure.test_figures_are_totals_over_rounds_and_leave_out_the_first_arrival,
        ("eval.measure.timed_run:seconds_per_token", "sample.decode_s", "sample.seconds"),
        ("eval.measure.timed_run:seconds_per_token", "sample.decode_tokens", "sample.tokens"),
        (
            "eval.measure.timed_run:call_seconds_per_token",
            "sum(s.seconds for s in group) / sum(s.tokens for s in group)",
            "np.mean([s.seconds / s.tokens for s in group])",
        ),
    ),
    *noticed_by(
        test_speed.test_warming_up_fills_the_batch_with_different_prompts_and_keeps_nothing,
        ("eval.measure.timed_run:warm_up", "prompts[i % len(prompts)]", "prompts[0]"),
    ),
    *noticed_by(
        test_speed.test_the_fastest_is_the_one_of_most_tokens_per_second,
        ("eval.measure.timed_run:fastest", "max(speeds", "min(speeds"),
    ),
    *noticed_by(
        test_texts.test_our_arm_counts_what_every_row_was_given_up_to_its_end,
        ("eval.arms.ours:OurArm.run", "int(length) - len(prompt)", "out.sequences.shape[1] - ids.shape[1]"),
        ("eval.arms.ours:OurArm.run", "out.stats.rounds[: len(prompts)]", "out.stats.rounds[:1]"),
    ),
    *noticed_by(
        test_texts.test_transformers_padding_after_the_end_is_no_token,
        ("eval.arms.base:emitted", "return ids[: ends[0] + 1] if ends else ids", "return ids"),
        ("eval.arms.transformers_arms:run_transformers", "arrivals[0], first_tokens", "arrivals[-1], first_tokens"),
    ),
    *noticed_by(
        test_texts.test_transformers_samples_other_text_for_other_rows_and_seeds,
        ("eval.arms.transformers_arms:TransformersArm.run", "seed + rows[0]", "seed"),
    ),
    *noticed_by(
        test_speed.test_the_mean_context_lies_half_way_through_the_continuation,
        ("eval.measure.cells:mean_context", "max_new_tokens / 2", "max_new_tokens"),
    ),
    *noticed_by(
        test_speed.test_settings_are_chosen_on_other_prompts_and_the_fastest_is_the_best,
        ("eval.measure.cells:tried_settings", "fastest(of)", "next(iter(of))"),
    ),
    *noticed_by(
        test_speed.test_the_peer_is_timed_at_the_setting_that_was_chosen,
        ("eval.modes.report:time_cell", "tried[best[ASSISTED]]", "next(iter(tried.values()))"),
    ),
    *noticed_by(
        test_speed.test_what_warms_up_is_not_timed_and_what_is_timed_does_not_warm_up,
        ("eval.modes.report:time_cell", "drafted, prompts.timed", "drafted, prompts.screening"),
        ("eval.modes.report:time_cell", "warm_up(arms, prompts.screening", "warm_up(arms, prompts.timed"),
    ),
    *noticed_by(
        test_speed.test_the_draft_length_is_chosen_at_the_first_temperature_alone,
        ("eval.modes.report:_candidates", "point.temperature == cfg.temperatures[0] and ", ""),
        ("eval.modes.report:_candidates", "drafting(cfg, point.temperature, k)", "drafting(cfg, point.temperature, 2)"),
    ),
    *noticed_by(
        test_speed.test_the_reports_own_length_is_held_against_an_uncached_forward,
        ("eval.modes.report:time_cell", "one.settings.num_draft_tokens == chosen", "True"),
    ),
    *noticed_by(
        test_speed.test_a_rule_with_noise_of_its_own_is_not_held_against_an_uncached_forward,
        ("eval.measure.cells:CellRun._uncached", "not in TOKEN_FOR_TOKEN", 'not in ("rejection",)'),
    ),
    *noticed_by(
        test_speed.test_component_times_are_those_at_the_timed_prompts_mean_context,
        ("eval.measure.cells:CellRun._cost_meter", "self.cfg.decode.max_new_tokens", "0"),
    ),
    *noticed_by(
        test_padding.test_the_speed_is_the_median_of_the_rounds_after_the_first,
        ("eval.measure.certificate_parts:measure_padding", "if turn and speed is not None", "if speed is not None"),
        ("eval.measure.certificate_parts:measure_padding", "median(each)", "max(each)"),
        ("eval.measure.certificate_parts:measure_padding", "median(each)", "sum(each) / len(each)"),
        (
            "eval.measure.certificate_parts:_tokens_per_s",
            "stats.arrival_s[-1] - stats.arrival_s[0]",
            "stats.arrival_s[-1]",
        ),
        ("eval.measure.certificate_parts:_tokens_per_s", "stats.rounds[: len(prompts)]", "stats.rounds[:1]"),
    ),
    *noticed_by(
        test_profile.test_a_round_is_in_milliseconds_and_reading_the_prompt_is_no_part_of_it,
        ("eval.modes.profile.calls:Call.ms_per_round", "1e3 * seconds", "seconds"),
    ),
    *noticed_by(
        test_profile.test_what_is_outside_of_passes_is_the_rounds_own_beyond_the_passes_timed_beside_it,
        ("eval.modes.profile.figures:Turn.round_ms", "if phase not in OUT_OF_ROUND", "if phase != 'other'"),
        ("eval.modes.profile.figures:outside", "one.round_ms - sum(one.floor.values())", "one.round_ms"),
    ),
]
