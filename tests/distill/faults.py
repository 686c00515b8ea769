"""One-line faults in what the target's record, the losses and the data are made by; each stands under its test."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.distill import (
    test_chat,
    test_corpora,
    test_credits,
    test_distribution,
    test_features,
    test_held_out_count,
    test_large_targets,
    test_objectives,
    test_openai_refusals,
    test_openai_runtime,
    test_prompt_texts,
    test_prompts,
    test_responses,
    test_score,
    test_sequences,
    test_served_refusals,
    test_served_runtime,
    test_shards,
    test_sparse,
    test_stores,
    test_tasks,
    test_texts,
    test_vllm_bad_days,
    test_vllm_runtime,
    test_vocabulary,
)
from tests.faults import Fault

Change = tuple[str, str, str]
"""Where, what stands there, and the fault."""

LOSSES: dict[Callable[..., object], list[Change]] = {
    test_objectives.test_sparse_losses_are_those_of_each_row: [
        (
            "distill.objectives.row_losses:forward_kl",
            "log_q.gather(-1, target.ids))).sum(-1)",
            "log_q.gather(-1, target.ids))).sum()",
        ),
        (
            "distill.objectives.row_losses:forward_kl",
            "(target.weight * (",
            "(target.weight / target.weight.sum(-1, True) * (",
        ),
        ("distill.objectives.row_losses:acceptance", ".clamp_max(0.0)", ""),
    ],
    test_objectives.test_losses_are_made_in_float32_from_what_a_head_in_bfloat16_gives: [
        ("distill.objectives.scoring:_Teacher.evaluator", "(hidden.device).float()", "(hidden.device)"),
    ],
    partial(test_objectives.test_chunked_equals_plain, "tv", 100): [
        (
            "distill.objectives.objective:Objective.loss",
            "acceptance(log_q.detach(), lesson.p)",
            "acceptance(log_q, lesson.p)",
        ),
    ],
    test_objectives.test_text_alone_gives_cross_entropy_and_no_acceptance: [
        ("distill.objectives.scoring:_Teacher.lesson", "batch.ids.flatten()[rows + 1]", "batch.ids.flatten()[rows]"),
    ],
    test_objectives.test_logits_of_the_last_chunk_stay_and_those_of_the_others_are_made_again: [
        (
            "distill.objectives.scoring:_recomputed",
            "len(losses) == len(rows) - 1",
            "len(losses) == len(rows)",
        ),
    ],
    partial(test_vocabulary.test_dense_losses_equal_their_definitions, "tv"): [
        (
            "distill.objectives.objective:Term.loss",
            "lesson.normalised if self.is_divergence else lesson.p",
            "lesson.normalised",
        ),
    ],
    test_credits.test_e2e_tv_ends_a_round_at_a_slot_that_is_missing: [
        ("distill.objectives.credits:credited", "reached(rounds.valid)", "rounds.valid"),
    ],
    test_credits.test_tokens_behind_a_missing_slot_earn_nothing_for_those_before_it: [
        ("distill.objectives.credits:dpace", "chances * rounds.valid", "chances"),
    ],
    test_credits.test_weights_carry_no_gradient: [
        ("distill.objectives.credits:DPACE_FLOOR", "0.5", "0.25"),
    ],
    test_credits.test_the_mean_is_over_weights_of_learned_slots: [
        ("distill.objectives.credits:credited", "* rounds.learned", "* rounds.valid"),
    ],
    test_distribution.test_full_rows_sum_to_1_again_after_half_precision: [
        ("distill.objectives.target_distribution:FullRows._read", ".float().log_softmax(-1)", ".float()"),
    ],
    test_distribution.test_the_target_s_distribution_is_not_rounded_to_what_the_draft_is_trained_in: [
        ("distill.objectives.target_distribution:HiddenRows._read", "enabled=False", "enabled=True"),
    ],
    test_distribution.test_the_target_s_head_is_not_trained_through_its_distribution: [
        ("distill.objectives.target_distribution:HiddenRows._read", "torch.no_grad()", "torch.enable_grad()"),
    ],
    test_distribution.test_logits_in_bfloat16_give_a_distribution_in_float32: [
        ("distill.objectives.target_distribution:HiddenRows._read", ".to(device).float()", ".to(device)"),
        (
            "distill.objectives.target_distribution:HiddenRows._read",
            "logits / self.temperature",
            "logits * self.temperature",
        ),
    ],
}

RECORDS: dict[Callable[..., object], list[Change]] = {
    test_sparse.test_the_codes_of_log_p_are_those_of_every_folder_written_so_far: [
        ("distill.records.sparse_estimate:CODES_PER_NAT", "102", "103"),
        ("distill.records.sparse_estimate:code", ".round()", ""),
        (
            "distill.records.sparse_estimate:pack_codes",
            "(first & 15) << 4 | second >> 8, second & 255",
            "first & 15 | second >> 4, second",
        ),
    ],
    partial(test_stores.test_sparse_rows_have_the_shapes_that_are_planned, "head_tail", [(4,), (9,)]): [
        ("distill.records.sparse_estimate:decode", "mass.unsqueeze(-1) / tail", "mass.unsqueeze(-1)"),
    ],
    test_sparse.test_the_largest_uniform_and_zero_probabilities_are_never_a_forbidden_token: [
        ("distill.records.sparse_estimate:draw_tail", "right=True", "right=False"),
    ],
    test_stores.test_each_row_is_drawn_from_with_its_own_uniforms: [
        ("distill.records.sparse_estimate:draw_tail", ".scatter_(-1, head_ids, 0.0)", ""),
    ],
    test_stores.test_probabilities_too_small_for_a_half_are_kept_finite: [
        ("distill.records.distribution_stores:FullStore.encode", ".clamp_min(-65504.0)", ""),
    ],
    partial(test_stores.test_hidden_states_come_back_to_the_bit, "float16"): [
        ("distill.records.distribution_stores:HiddenStore.encode", "hidden.to(self.dtype)", "hidden.bfloat16()"),
    ],
    test_score.test_each_text_has_tail_draws_of_its_own: [
        ("distill.scorer:Scorer._uniforms", ', record.meta["prompt"]', ""),
        ("distill.scorer:Scorer._uniforms", ', record.meta["turn"]', ""),
        ("distill.scorer:Scorer._uniforms", ", self.seed", ""),
    ],
    test_score.test_tail_draws_do_not_depend_on_what_a_text_is_scored_with: [
        ("distill.scorer:Scorer._chunks", "uniforms[part]", "uniforms[: len(rows[part])]"),
    ],
    partial(test_score.test_p_of_a_token_is_that_of_the_text_before_it, 2): [
        (
            "distill.scorer:Scorer._keep_distributions",
            "np.flatnonzero(record.loss_mask)) - 1",
            "np.flatnonzero(record.loss_mask))",
        ),
    ],
    test_score.test_a_target_in_bfloat16_gives_p_in_float32: [
        ("distill.scorer:Scorer._chunks", "self.passes.head(rows[part]).float()", "self.passes.head(rows[part])"),
    ],
    test_score.test_hidden_states_are_those_of_every_token_and_of_no_padding: [
        ("distill.target_passes:Pass.states", "self.read[row, : len(record.ids)]", "self.read[row]"),
    ],
    test_features.test_an_error_is_weighed_against_the_deviation_from_the_mean: [
        ("distill.records.feature_codes:FeatureCode.squared_errors", "error / (states - mean)", "error / states"),
    ],
    test_features.test_a_row_within_the_grid_is_rounded_and_one_beyond_it_stretched: [
        ("distill.records.feature_codes:LEVELS", "127", "128"),
        ("distill.records.feature_codes:on_grid", ".clamp(1.0, MOST_STRETCH)", ".clamp(0.0, MOST_STRETCH)"),
    ],
    test_features.test_a_grid_reaches_from_the_least_to_the_most_and_is_never_too_fine: [
        ("distill.records.feature_codes:grid_of", "(high - low) / (2 * LEVELS)", "(high - low) / LEVELS"),
    ],
    partial(test_features.test_a_channel_reaches_as_far_as_ordinary_tokens_do, 22.5, 4.0): [
        ("distill.records.feature_fitting:_fit_int8", "ordinary = ordinary[norms <= LONG * norms.median()]", "pass"),
        ("distill.records.feature_fitting:LONG", "4.0", "5.0"),
    ],
    test_features.test_layers_count_alike_however_long_their_states_are: [
        ("distill.records.feature_fitting:_means", "(square / (ordinary.sum() * layer.shape[1])).sqrt()", "square"),
        ("distill.records.feature_fitting:_means", ".sum(0) / ordinary.sum()", ".sum(0) / len(layer)"),
    ],
    test_features.test_too_few_tokens_for_the_components_are_refused: [
        ("distill.records.feature_fitting:code_bytes", "tokens <= layout.components", "tokens < layout.components"),
    ],
    test_shards.test_the_numbers_of_a_shard: [
        (
            "distill.records.record_shards:FINISH_REASONS",
            "('length', 'eos', 'stop', 'corpus')",
            "('eos', 'length', 'stop', 'corpus')",
        ),
        ("distill.records.record_shards:SPLITS", "('train', 'validation')", "('validation', 'train')"),
    ],
    test_shards.test_the_summary_of_a_shard: [
        ("distill.records.record_shards:summary", "sum(len(record.ids) for", "sum(record.loss_mask.sum() for"),
    ],
    test_shards.test_records_are_found_across_shards_of_which_some_are_empty: [
        ("distill.records.record_folder:RecordFolder.read", 'side="right"', 'side="left"'),
        ("distill.records.record_shards:Shard._slice", "part.start == part.stop", "part.stop == 0"),
    ],
    test_shards.test_a_manifest_adds_its_shards_up: [
        ("distill.records.record_folder:RecordWriter._feature_errors", "np.sqrt(total / tokens)", "(total / tokens)"),
        ("distill.records.record_folder:RecordWriter._feature_errors", "shard.tokens for", "shard.records for"),
    ],
    test_shards.test_a_shard_of_an_earlier_run_is_kept_if_its_bytes_are_those_of_its_note: [
        ("distill.records.record_shards:Shard.check_content", "check_sum(self.path, self.known)", "pass"),
    ],
    test_texts.test_recorded_texts_are_found_by_the_numbers_of_their_prompts: [
        ("distill.prompts.text_sources:RecordedTexts.__init__", "int(self.folder.prompts[-1]) + 1", "len(self.folder)"),
        ("distill.prompts.text_sources:RecordedTexts.write", "(first, last))", '(first, last), side="right")'),
        ("distill.prompts.text_sources:RecordedTexts._text", "layers=()", "layers=None"),
    ],
}

TEXTS: dict[Callable[..., object], list[Change]] = {
    partial(test_held_out_count.test_it_counts_the_prompts_that_a_report_makes, row=test_held_out_count.chat): [
        ("distill.prompts.held_out_count:count_held_out", '!= "heldout"', '!= "validation"'),
    ],
    partial(test_chat.test_a_token_on_the_edge_of_a_turn_is_learned, ""): [
        ("distill.prompts.chat:encode_chat", "a < end and b > begin", "b > begin and b <= end"),
        ("distill.prompts.chat:encode_chat", "a < end and b > begin", "a >= begin and a < end"),
        ("distill.prompts.chat:_turn_span", "end + len(closing) if", "end if"),
    ],
    test_chat.test_the_first_token_is_not_learned_for_nothing_predicts_it: [
        ("distill.prompts.chat:encode_chat", "mask[0] = False", "pass"),
    ],
    test_chat.test_a_template_s_own_start_token_stands_once: [
        ("distill.prompts.chat:encode_chat", "add_special_tokens=False", "add_special_tokens=True"),
        ("distill.prompts.chat:encode_prompt", "add_special_tokens=False", "add_special_tokens=True"),
    ],
    test_sequences.test_the_distribution_of_a_learned_token_is_found_at_the_one_before_it: [
        ("distill.sequences:RecordSequences.collate", "start + learned - 1", "start + learned"),
        ("distill.sequences:RecordSequences.collate", "stored, stored + len(learned)", "len(learned)"),
    ],
    test_sequences.test_a_cut_record_keeps_the_distributions_of_what_is_left: [
        ("distill.sequences:RecordSequences.__getitem__", "rows[: mask.sum()]", "rows[: self.max_length]"),
    ],
    test_sequences.test_every_window_of_text_starts_as_the_tokenizer_starts_a_text: [
        ("distill.sequences:_text_windows", "length - len(start)", "length"),
        (
            "distill.sequences:text_sequences",
            "tokenizer.eos_token_id if eos is None else eos",
            "tokenizer.eos_token_id",
        ),
    ],
    test_sequences.test_a_chat_is_cut_with_its_mask: [
        ("distill.sequences:_chat_window", "mask[:length]", "mask[-length:]"),
    ],
    test_vocabulary.test_what_lies_behind_the_length_that_is_trained_on_is_not_counted: [
        (
            "distill.objectives.draft_vocabulary:_learned_ids",
            "sequence.ids[:length][sequence.loss_mask[:length]]",
            "sequence.ids[:length]",
        ),
        ("distill.objectives.draft_vocabulary:_learned_ids", "length = source.lengths[index]", "length = None"),
    ],
    test_vocabulary.test_every_end_of_text_is_among_the_special_tokens: [
        (
            "train.training_inputs:special_tokens",
            "isinstance(ends, int) else ends",
            "isinstance(ends, int) else ends[:1]",
        ),
    ],
    test_vocabulary.test_a_top_k_record_keeps_its_missing_mass: [
        ("distill.objectives.draft_vocabulary:renormalised", "within.log_p - share.log()", "within.log_p"),
        ("distill.objectives.draft_vocabulary:restricted", "p.weight * inside", "p.weight"),
    ],
    test_prompts.test_windows_come_from_their_split_and_are_numbered_through: [
        ("distill.prompts.drawn_prompts:_prompts", "corpus.documents(split)", 'corpus.documents("train")'),
    ],
    test_prompts.test_a_window_may_start_wherever_it_fits: [
        ("distill.prompts.drawn_prompts:_cut", "len(ids) - length + 1", "len(ids) - length"),
        ("distill.prompts.drawn_prompts:_cut", ", document, part)", ", part)"),
    ],
    test_prompts.test_windows_of_a_document_and_of_two_runs_are_drawn_apart: [
        ("distill.prompts.drawn_prompts:_cut", ", document, part)", ", document)"),
        ("distill.prompts.drawn_prompts:_cut", "config.seed, ", ""),
    ],
    test_prompts.test_text_of_which_nothing_would_be_learned_is_no_prompt: [
        ("distill.prompts.drawn_prompts:_cut", "len(window) > unlearned", "len(window) >= unlearned"),
    ],
    test_prompts.test_a_prompt_begins_as_the_tokenizer_begins_every_text: [
        ("distill.prompts.drawn_prompts:_prompts", "start_ids(tokenizer) + ids", "ids"),
    ],
    test_prompt_texts.test_prompts_come_back_as_they_were_written: [
        (
            "distill.prompts.prompt_texts:PromptFile.__getitem__",
            "index.indices(len(self))",
            "index.indices(len(self) - 1)",
        ),
    ],
    test_prompt_texts.test_a_stamp_tells_of_sizes_times_and_names: [
        ("distill.prompts.prompt_texts:_stamp", "found.st_mtime_ns", "0"),
        ("distill.prompts.prompt_texts:_stamp", "found.st_size", "0"),
        ("distill.prompts.prompt_texts:_stamp", "str(file.relative_to(root)), ", ""),
    ],
    test_responses.test_a_draft_changes_no_token_and_saves_passes: [
        ("distill.responses:target_sampler", 'verifier="coupled"', 'verifier="rejection"'),
        ("distill.responses:target_sampler", "=sampling.draft.num_draft_tokens", "=1"),
        ("distill.responses:target_sampler", "one.reason, one.passes)", "one.reason, 1)"),
    ],
    test_responses.test_a_response_does_not_depend_on_the_others_of_its_batch: [
        ("distill.responses:target_sampler", "rows=[rows[place] for place in part],", ""),
        ("distill.responses:_left_padded", "[0] * (width - len(prompt)) + [1]", "[1] * (width - len(prompt)) + [1]"),
    ],
    test_responses.test_a_response_ends_with_its_end_token_and_holds_no_padding: [
        ("distill.responses:target_sampler", "one.tokens[one.prompt_length :]", "one.tokens[one.prompt_length - 1 :]"),
    ],
    partial(test_responses.test_every_sampling_setting_reaches_the_decoder, {"min_p": 1.0}): [
        ("distill.responses:target_sampler", "min_p=sampling.min_p,", ""),
    ],
    test_responses.test_later_turns_and_other_runs_are_sampled_with_seeds_of_their_own: [
        ("distill.responses:Writer._sample", "self.config.seed, turn", "self.config.seed"),
        ("distill.responses:Writer._sample", "self.config.seed, turn", "turn"),
    ],
    test_responses.test_a_turn_is_written_if_its_response_just_fits: [
        ("distill.responses:Writer._turn", "> self.max_positions", ">= self.max_positions"),
        ("distill.responses:Writer._turn", "prompt.num_turns - turn", "1"),
    ],
    test_responses.test_a_later_turn_is_asked_with_the_words_of_the_target: [
        ("distill.responses:Writer._record", "prompt.messages is None and ", ""),
        ("distill.responses:_Conversation.said", "skip_special_tokens=True", "skip_special_tokens=False"),
    ],
    test_corpora.test_kinds_of_bad_rows_are_counted_and_too_many_refused: [
        ("distill.corpora.bad_rows:BadRows.check", "bad <= self.share", "bad < self.share"),
        ("distill.corpora.bad_rows:BadRows.count", "rows=found[reason]", "rows=1"),
    ],
    test_corpora.test_a_corpus_of_nothing_else_is_not_read_to_its_end: [
        ("distill.corpora.bad_rows:BadRows.add", "len(self._places) >= MANY", "False"),
    ],
    test_corpora.test_max_documents_stops_before_the_split: [
        ("distill.corpora.corpus:Corpus.everything", "self.config.max_documents", "None"),
    ],
    test_corpora.test_the_line_between_splits_is_where_it_always_was: [
        ("distill.corpora.corpus:split_place", '"split", text.strip()', '"splits", text.strip()'),
        ("distill.corpora.corpus:split_place", "text.strip()", "text"),
        ("distill.corpora.corpus:split_of", "place < config.heldout_share:", "place < config.validation_share / 2:"),
    ],
    test_tasks.test_a_renamed_text_is_the_given_one_word_by_word_but_for_the_name: [
        ("distill.corpora.tasks:rename", "renamed(piece, before, after)", "piece.replace(before, after)"),
        ("distill.corpora.tasks:rename", "if name not in here", ""),
    ],
    test_tasks.test_an_inserted_line_stands_behind_the_line_that_was_named: [
        (
            "distill.corpora.tasks:insertion",
            "[*lines[: place + 1], line, *lines[place + 1 :]]",
            "[*lines[:place], line, *lines[place:]]",
        ),
        ("distill.corpora.tasks:insertion", "if lines.count(line) == 1", ""),
    ],
    test_tasks.test_a_quotation_is_the_lines_of_its_document_that_the_question_names: [
        ("distill.corpora.tasks:quotation", "first : first + count", "first : first + 1"),
        ("distill.corpora.tasks:_start", ") == 1:", ") >= 1:"),
    ],
    test_tasks.test_a_log_goes_on_as_it_began: [
        ("distill.corpora.tasks:log", "number % len(templates)", "(number // 2) % len(templates)"),
        ("distill.corpora.tasks:log", "count=first + number", "count=first"),
    ],
    test_tasks.test_a_file_decides_the_split_of_its_tasks: [
        ("distill.corpora.tasks:task_documents", "place=place", "place=None"),
    ],
}

RUNTIMES: dict[Callable[..., object], list[Change]] = {
    test_vllm_runtime.test_p_and_final_states_are_made_of_the_engine_s_by_the_target_s_norm_and_head: [
        (
            "distill.runtimes.engine_runtime:EnginePasses.of_batch",
            "of_layer[FINAL] = self.final(of_layer[self.last])",
            "of_layer[FINAL] = of_layer[self.last]",
        ),
        (
            "distill.runtimes.engine_runtime:EnginePasses.of_batch",
            "of_layer[layer] for layer in self.layers",
            "of_layer[layer] for layer in sorted(self.layers)",
        ),
        ("distill.runtimes.engine_runtime:asked_layers", " - {FINAL}", ""),
    ],
    test_vllm_runtime.test_one_engine_writes_everything_then_another_reads: [
        ("distill.runtimes.vllm_runtime:VllmRuntime._settings", "self.longest + 1", "self.longest"),
        ("distill.runtimes.engine_runtime:EngineRuntime.sampler", '"row", seed, row', '"row", seed'),
        ("distill.stage:_write_shards", "runtime.writes_first and ", "False and "),
        ("distill.stage:_finish", '"responses", "states")', '"responses")'),
    ],
    test_vllm_runtime.test_a_draft_is_handed_to_the_engine_that_writes: [
        ("distill.runtimes.vllm_runtime:VllmRuntime._drafting", "self.longest + count", "self.longest"),
        ("distill.runtimes.engine_runtime:EngineRuntime.sampler", "counts[row] > 0", "counts[row]"),
        ("distill.records.record_shards:drafting_of", ' - one.meta["prompt_end"]', ""),
    ],
    test_vllm_runtime.test_a_text_that_fills_the_context_leaves_no_room_for_drafts: [
        (
            "distill.runtimes.vllm_runtime:VllmRuntime._drafting",
            "min(self.longest + count, self.target.max_positions)",
            "self.longest + count",
        ),
    ],
    partial(test_vllm_runtime.test_a_run_that_vllm_drafts_for_goes_on_with_that_draft_alone, then="longer"): [
        ("distill.runtimes.vllm_runtime:VllmRuntime.__init__", "draft=recorded(asked, self.draft)", "draft=None"),
        ("distill.runtimes.runtime:recorded", "asked.num_draft_tokens", "5"),
    ],
    test_vllm_runtime.test_what_was_written_before_a_run_ended_is_not_asked_for_again: [
        ("distill.runtimes.kept_responses:kept_responses", "if answer is None:", "if True:"),
        ("distill.runtimes.engine_runtime:EnginePasses.states_in", "told != ids", "False"),
    ],
    test_vllm_runtime.test_kept_responses_are_those_of_their_call: [
        ("distill.runtimes.kept_responses:KeptResponses._file", "json.dumps(call)", "json.dumps(call[:2])"),
        ("distill.runtimes.kept_responses:KeptResponses._file", "json.dumps(call)", "json.dumps(call[1:])"),
    ],
    test_vllm_runtime.test_records_of_two_engines_are_not_mixed: [
        ("distill.run_notes:check_same_target", "_lasting(was) != _lasting(runtime)", "False"),
    ],
    test_vllm_runtime.test_texts_of_other_records_are_read_and_none_is_written: [
        ("distill.recording_plan:plan_of_records", "folder.lengths.max()", "folder.lengths.min()"),
    ],
    test_vllm_bad_days.test_an_engine_that_takes_its_time_and_lives_is_waited_for: [
        ("distill.engines.worker_process:Engine.call", 'while "alive" in answer', 'while "dead" in answer'),
    ],
    test_vllm_bad_days.test_a_full_disk_is_told_with_its_folder: [
        ("distill.runtimes.states_file:_is_whole", "== 8 + size", "<= 8 + size"),
    ],
    test_vllm_bad_days.test_a_disk_without_room_for_states_is_refused: [
        ("distill.runtimes.engine_runtime:bytes_of_states", "runtime.config.batch_size * ", ""),
    ],
    test_large_targets.test_what_a_large_target_needs_reaches_both_engines: [
        ("distill.runtimes.vllm_runtime:VllmRuntime._settings", '"pipeline_parallel_size": 1', "**{}"),
        ("distill.engines.vllm_support:devices", " * asked.pipeline_parallel_size", ""),
    ],
    test_large_targets.test_quantised_layers_are_the_engine_s_own_matter: [
        ("decode.models.small:with_layers", 'delattr(config, "quantization_config")', "pass"),
    ],
}

SERVERS: dict[Callable[..., object], list[Change]] = {
    test_served_runtime.test_records_are_those_of_what_the_server_gives: [
        ("distill.runtimes.vllm_server:VllmServer.written", "remove_states(file)", "pass"),
        (
            "distill.runtimes.served_runtime:ServedRuntime.remember",
            '{"log_p": self.reader.log_p(self.probe)}',
            "{}",
        ),
    ],
    test_served_runtime.test_each_response_has_its_seed_and_the_run_s_sampling_alone: [
        ("distill.runtimes.vllm_server:ServedEngine._write", "seed=seed", "seed=0"),
        ("distill.runtimes.vllm_server:VllmServer.complete", "**plain, ", ""),
    ],
    test_served_runtime.test_files_of_requests_that_were_in_flight_are_removed_in_the_end: [
        ("distill.runtimes.served_runtime:ServedRuntime.close", "file.unlink(missing_ok=True)", "pass"),
    ],
    test_served_runtime.test_one_server_may_write_and_another_read: [
        ("distill.runtimes.served_runtime:ServedRuntime.engine", 'self.writer if kind == "write" else ', ""),
    ],
    test_served_runtime.test_a_server_that_goes_away_and_comes_back_loses_nothing_and_doubles_nothing: [
        ("distill.engines.http_client:HttpClient.ask", "time.monotonic() + pause > ends", "True"),
    ],
    test_served_runtime.test_one_that_stays_away_ends_the_run_which_goes_on_later: [
        ("decode.common.run_folder:check_same_run", ', *getattr(config, "NOT_COMPARED", ())', ","),
    ],
    test_served_runtime.test_weights_that_change_in_mid_run_end_it_and_are_not_mixed_in: [
        ("distill.runtimes.vllm_server:ServedEngine.call", "self.check(self.server)", "pass"),
        ("distill.run_notes:check_same_target", "not far <= ROUNDING[runtime.dtype]", "False"),
    ],
    test_served_runtime.test_an_end_that_is_not_the_target_s_is_refused: [
        ("distill.runtimes.vllm_server:ServedEngine._write", '== "stop" and', '== "ended" and'),
    ],
    partial(test_served_refusals.test_servers_that_do_not_fit_are_refused, name="half"): [
        ("distill.runtimes.engine_runtime:fault_of_text", " or dtype != passes.runtime.note.dtype", ""),
    ],
    partial(
        test_served_refusals.test_servers_that_do_not_fit_are_refused,
        name="other states",
    ): [
        ("distill.runtimes.states_check:fault_of_p", "far <= rounding", "True"),
    ],
    partial(test_served_refusals.test_servers_that_do_not_fit_are_refused, name="short"): [
        ("distill.runtimes.served_runtime:check_room", " + (server is runtime.reader)", ""),
    ],
    test_served_refusals.test_another_tokenizer_is_refused: [
        ("distill.runtimes.probe:check_tokens", "ours != theirs", "len(ours) != len(theirs)"),
    ],
}
_OPENAI = "distill.runtimes.openai"
OPENAI: dict[Callable[..., object], list[Change]] = {
    partial(
        test_openai_runtime.test_records_hold_the_ids_and_the_likeliest_tokens_that_the_server_tells,
        manner="llamacpp",
        source="of logprobs",
        tells_end=False,
    ): [
        (f"{_OPENAI}_answers:ended", "[*ids, eos[0]]", "ids"),
        (f"{_OPENAI}_answers:_falling", "-pair[1]", "pair[1]"),
        (f"{_OPENAI}_answers:Answer.lacks_positions", "not has_end", "False"),
    ],
    test_openai_runtime.test_a_text_with_tokens_that_are_not_told_has_the_ids_of_its_text_and_no_p: [
        (f"{_OPENAI}_answers:Answer.lacks_positions", "is not None and", "is None and"),
    ],
    test_openai_runtime.test_each_response_has_its_seed_and_the_run_s_sampling_alone: [
        (f"{_OPENAI}_server:OpenAiServer.complete", "PLAIN | ", ""),
        (f"{_OPENAI}_runtime:OpenAiRuntime.sampler", "rows[place]) * 2**31", "0) * 2**31"),
    ],
    test_openai_runtime.test_overload_and_faults_are_asked_again_after_the_time_that_the_server_names: [
        ("distill.engines.http_client:HttpClient.ask", 'max(wait, getattr(error, "wait", 0.0))', "wait"),
    ],
    test_openai_runtime.test_a_refusal_in_mid_run_ends_it_and_it_goes_on_later: [
        (f"{_OPENAI}_runtime:OpenAiRuntime.sampler", "if one is None", "if True"),
    ],
    test_openai_runtime.test_weights_that_change_in_mid_run_end_it_and_are_not_mixed_in: [
        (f"{_OPENAI}_server:OpenAiServer.check_same", "not far <=", "False and far <="),
    ],
    test_openai_runtime.test_another_model_in_mid_run_ends_it: [
        (f"{_OPENAI}_server:OpenAiServer.check_same", "self.check_listed()", "pass"),
    ],
    test_openai_runtime.test_a_context_that_is_too_short_is_no_end_of_a_text: [
        (f"{_OPENAI}_answers:ended", "count < most", "False"),
    ],
    partial(test_openai_refusals.test_servers_that_do_not_fit_are_refused, name="warped"): [
        (f"{_OPENAI}_checks:check_unwarped", "({}, warp)", "({}, {})"),
    ],
    test_openai_refusals.test_the_key_comes_from_the_environment_and_is_written_nowhere: [
        ("distill.engines.http_client:HttpClient._without_key", 'words.replace(self.key, "***")', "words"),
    ],
}

FAULTS = [
    Fault(where, old, new, test)
    for tests in (LOSSES, RECORDS, TEXTS, RUNTIMES, SERVERS, OPENAI)
    for test, changes in tests.items()
    for where, old, new in changes
]
