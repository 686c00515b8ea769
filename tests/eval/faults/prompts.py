"""Which prompts settings are chosen on and which are reported."""

from __future__ import annotations

from functools import partial

from tests.eval import test_measure, test_prompts, test_splits
from tests.faults import Fault, noticed_by

FAULTS: list[Fault] = [
    *noticed_by(
        test_splits.test_a_reports_prompts_are_held_out_and_those_of_settings_are_others,
        ("eval.prompts.held_out:_from_held_out", '"heldout"', '"train"'),
    ),
    *noticed_by(
        test_splits.test_questions_that_settings_are_chosen_on_are_not_reported,
        ("eval.prompts.held_out:_from_file", "prompts[num_screening:]", "prompts"),
    ),
    *noticed_by(
        partial(test_splits.test_from_eight_questions_up_a_report_uses_what_there_is, there=8, split=(6, 2)),
        ("eval.prompts.held_out:_from_file", "if len(questions) < asked", "if False"),
    ),
    *noticed_by(
        test_splits.test_a_report_on_few_held_out_chats_uses_what_there_is,
        ("eval.prompts.held_out:_from_held_out", "min(cfg.timing.prompts, len(reported))", "cfg.timing.prompts"),
        ("eval.prompts.held_out:_from_held_out", "min(wanted, LEAST_PROMPTS)", "wanted"),
    ),
    *noticed_by(
        test_splits.test_too_few_held_out_prompts_are_refused_with_what_can_be_done,
        ("eval.prompts.held_out:_prompts_of_split", "len(windows) < least", "not windows"),
    ),
    *noticed_by(
        test_splits.test_a_certificates_prompts_are_held_out,
        ("eval.prompts.held_out:as_many_as", '"heldout"', '"train"'),
    ),
    *noticed_by(
        test_splits.test_the_suite_of_families_reports_held_out_text_and_chooses_on_validation_text,
        ("eval.prompts.held_out:split_prompts", "tokenizer, split)", 'tokenizer, "train")'),
        ("eval.modes.families.mode:_prompts", '"heldout", checked', '"train", checked'),
    ),
    *noticed_by(
        test_prompts.test_held_out_windows_do_not_overlap_and_spread_over_documents,
        ("eval.prompts.held_out:_prompts_of", "len(ids) - cfg.tokens + 1, cfg.tokens)", "len(ids) - cfg.tokens + 1)"),
        (
            "eval.prompts.held_out:in_turn",
            "chain.from_iterable(zip_longest(*per_document))",
            "chain.from_iterable(per_document)",
        ),
    ),
    *noticed_by(
        test_prompts.test_screening_prompts_are_never_reported_and_prefixes_mix_categories,
        (
            "eval.prompts.questions:by_turns_of_category",
            "chain.from_iterable(zip_longest(*groups.values()))",
            "chain.from_iterable(groups.values())",
        ),
    ),
    *noticed_by(
        test_prompts.test_a_limit_takes_questions_from_the_whole_file,
        ("eval.prompts.questions:spread", "i * len(questions) // limit", "i"),
    ),
    *noticed_by(
        test_splits.test_a_reports_prompts_are_held_out_and_those_of_settings_are_others,
        ("eval.prompts.held_out:_from_held_out", '"validation"', '"heldout"'),
    ),
    *noticed_by(
        test_splits.test_a_cell_of_decoders_times_its_own_reported_text,
        ("eval.modes.compare.mode:measure", "texts[cell.text].reported", "texts[cell.text].screening"),
    ),
    *noticed_by(
        test_splits.test_settings_of_decoders_are_chosen_on_the_screening_prompts_of_both_texts,
        ("eval.modes.compare.arm_set:Loaded.screening", "].screening", "].reported"),
        ("eval.modes.compare.decoders:LoadedDecoders.choose", "for name in chains", "for name in speeds"),
        ("eval.measure.held_choice:held_choice", "np.where(is_safe, whole, 0).argmax()", "0"),
    ),
    *noticed_by(
        test_splits.test_draft_lengths_of_families_are_chosen_on_screening_prompts,
        ("eval.modes.families.measuring:Timing.choose", "self.screening", "self.reported"),
    ),
    *noticed_by(
        test_splits.test_families_are_timed_on_reported_prompts_at_the_length_that_was_chosen,
        ("eval.modes.families.measuring:Timing.measure", "prompts = self.reported", "prompts = self.screening"),
    ),
    *noticed_by(
        test_measure.test_the_drafts_own_settings_come_back,
        ("eval.arms.transformers_arms:using", '"constant"', '"heuristic"'),
    ),
]
