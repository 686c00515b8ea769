"""Faults put into distill, one at a time, are noticed by the tests that are named beside them."""

from functools import partial

import pytest

from tests.distill import (
    test_chat,
    test_corpora,
    test_distributions,
    test_features,
    test_objectives,
    test_openai_runtime,
    test_prompts,
    test_records,
    test_responses,
    test_sequences,
    test_served_runtime,
    test_vllm_runtime,
    test_vocabulary,
)
from tests.faults import Fault, check_caught, noticed_by

FAULTS = [
    *noticed_by(
        test_objectives.test_sparse_losses_are_those_of_each_row,
        ("distill.objectives.row_losses:acceptance", ".clamp_max(0.0)", ""),
    ),
    *noticed_by(
        partial(test_objectives.test_chunked_equals_plain, "tv", 100),
        (
            "distill.objectives.objective:Objective.loss",
            "by = log_q.detach() if",
            "by = log_q if",
        ),
    ),
    *noticed_by(
        test_objectives.test_text_alone_gives_cross_entropy_and_no_acceptance,
        ("distill.objectives.scoring:_Teacher.lesson", "batch.ids.flatten()[rows + 1]", "batch.ids.flatten()[rows]"),
    ),
    *noticed_by(
        test_objectives.test_e2e_tv_ends_a_round_at_a_slot_that_is_missing,
        ("distill.objectives.credits:credited", "reached(rounds.valid)", "rounds.valid"),
    ),
    *noticed_by(
        test_distributions.test_logits_in_bfloat16_give_a_distribution_in_float32,
        (
            "distill.objectives.target_distribution:HiddenRows._read",
            "log_softmax(-1, torch.float32)",
            "log_softmax(-1)",
        ),
    ),
    *noticed_by(
        test_distributions.test_the_codes_of_log_p_are_those_of_every_folder_written_so_far,
        ("distill.records.head_tail:CODES_PER_NAT", "102", "103"),
    ),
    *noticed_by(
        test_distributions.test_each_row_is_drawn_from_with_its_own_uniforms,
        ("distill.records.head_tail:draw_tail", ".scatter_(-1, head_ids, 0.0)", ""),
    ),
    *noticed_by(
        test_sequences.test_tail_draws_do_not_depend_on_what_a_text_is_scored_with,
        ("distill.scorer:Scorer._chunks", "uniforms[part]", "uniforms[: len(rows[part])]"),
    ),
    *noticed_by(
        test_features.test_too_few_tokens_for_the_components_are_refused,
        ("distill.records.feature_fitting:code_bytes", "tokens <= layout.components", "tokens < layout.components"),
    ),
    *noticed_by(
        test_records.test_records_are_found_across_shards_of_which_some_are_empty,
        ("distill.records.record_folder:RecordFolder.read", 'side="right"', 'side="left"'),
    ),
    *noticed_by(
        partial(test_prompts.test_it_counts_the_prompts_that_a_report_makes, row=test_prompts.chat),
        ("distill.prompts.held_out_count:count_held_out", '!= "heldout"', '!= "validation"'),
    ),
    *noticed_by(
        partial(test_chat.test_a_token_on_the_edge_of_a_turn_is_learned, ""),
        ("distill.prompts.chat:encode_chat", "a < end and b > begin", "b > begin and b <= end"),
    ),
    *noticed_by(
        test_sequences.test_the_distribution_of_a_learned_token_is_found_at_the_one_before_it,
        ("distill.sequences:RecordSequences.collate", "start + learned - 1", "start + learned"),
    ),
    *noticed_by(
        test_vocabulary.test_a_top_k_record_keeps_its_missing_mass,
        ("distill.objectives.draft_vocabulary:renormalised", "within.log_p - share.log()", "within.log_p"),
    ),
    *noticed_by(
        test_prompts.test_windows_of_a_document_and_of_two_runs_are_drawn_apart,
        ("distill.prompts.drawn_prompts:_cut", "config.seed, ", ""),
    ),
    *noticed_by(
        test_responses.test_a_draft_changes_no_token_and_saves_passes,
        ("distill.responses:target_sampler", 'verifier="coupled"', 'verifier="rejection"'),
    ),
    *noticed_by(
        test_responses.test_a_response_does_not_depend_on_the_others_of_its_batch,
        ("distill.responses:target_sampler", "rows=[rows[place] for place in part],", ""),
    ),
    *noticed_by(
        test_corpora.test_the_line_between_splits_is_where_it_always_was,
        ("distill.corpora.corpus:split_place", "text.strip()", "text"),
    ),
    *noticed_by(
        test_vllm_runtime.test_p_and_final_states_are_made_of_the_engine_s_by_the_target_s_norm_and_head,
        (
            "distill.runtimes.engine_runtime:EnginePasses.of_batch",
            "of_layer[FINAL] = self.final(of_layer[self.last])",
            "of_layer[FINAL] = of_layer[self.last]",
        ),
    ),
    *noticed_by(
        test_vllm_runtime.test_what_was_written_before_a_run_ended_is_not_asked_for_again,
        ("distill.runtimes.engine_runtime:EnginePasses.states_in", "told != ids", "False"),
    ),
    *noticed_by(
        test_served_runtime.test_weights_that_change_in_mid_run_end_it_and_are_not_mixed_in,
        ("distill.runtimes.vllm_server:ServedEngine.call", "self.check(self.server)", "pass"),
    ),
    *noticed_by(
        partial(test_served_runtime.test_servers_that_do_not_fit_are_refused, name="other states"),
        ("distill.runtimes.states_check:fault_of_p", "far <= rounding", "True"),
    ),
    *noticed_by(
        test_openai_runtime.test_a_context_that_is_too_short_is_no_end_of_a_text,
        ("distill.runtimes.openai_answers:ended", "count < most", "False"),
    ),
    *noticed_by(
        test_openai_runtime.test_the_key_comes_from_the_environment_and_is_written_nowhere,
        ("distill.engines.http_client:HttpClient._without_key", 'words.replace(self.key, "***")', "words"),
    ),
]


@pytest.mark.slow  # they test the tests
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_is_noticed(fault: Fault, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    check_caught(fault, request, monkeypatch)
