"""Faults of the comparison of ways to draft: other prompts, other arms, ratios the wrong way round."""

from __future__ import annotations

from functools import partial

from tests.eval.compare import test_held_out, test_page, test_texts, test_warm_up, test_which_when
from tests.faults import Fault, noticed_by

_IN = "eval.modes.compare"
_LOADED = f"{_IN}.drafters:LoadedDrafters"
FAULTS: list[Fault] = [
    *noticed_by(
        partial(test_texts.test_held_out_text_is_reported_and_validation_text_settles_settings, text="edit"),
        (f"{_IN}.texts:load_texts", '"heldout", reported', '"validation", reported'),
        (f"{_IN}.texts:load_texts", '"validation", screening', '"heldout", screening'),
    ),
    *noticed_by(
        test_texts.test_a_cell_chooses_on_screening_prompts_and_times_reported_ones,
        (f"{_IN}.mode:measure", "].reported", "].screening"),
        (f"{_IN}.arm_set:Loaded.screening", "].screening", "].reported"),
    ),
    *noticed_by(
        test_which_when.test_the_best_is_the_fastest_and_without_training_the_fastest_of_those,
        (f"{_IN}.which_when:which_when", "if not arms[name].has_weights", "if arms[name].has_weights"),
        (f"{_IN}.which_when:_best", "ratio_over(runs, best, plain, seed)", "ratio_over(runs, plain, best, seed)"),
        (f"{_IN}.which_when:_is_no_slower", "<= 1", ">= 1"),
    ),
    *noticed_by(
        test_warm_up.test_captures_are_made_from_the_shortest_batch_to_the_end_of_the_room,
        ("eval.measure.timed_run:first_to_capture", "return min(", "return max("),
        ("eval.arms.ours:OurArm.capture_ahead", "max(max_new_tokens, ", "min(max_new_tokens, "),
    ),
    *noticed_by(
        test_warm_up.test_what_shares_captures_is_rehearsed_once,
        (f"{_LOADED}._shape", ' or settings["adaptive"]', ""),
    ),
    *noticed_by(
        test_held_out.test_all_that_a_way_drafts_with_is_found_at_any_depth,
        (f"{_IN}.way:_parts", 'settings.get("helper_settings") or {}', "{}"),
        (f"{_IN}.way:_parts", '(settings.get("settings") or {}).get(member) or {}', "{}"),
        (f"{_IN}.way:_parts", 'settings.get("draft"), {}', "None, {}"),
        (f"{_IN}.way:_parts", "yield from _parts(part, given)", "yield part, given"),
    ),
    *noticed_by(
        test_which_when.test_plain_decoding_is_the_best_where_nothing_beats_it,
        (f"{_IN}.which_when:_best", "[] if plain is None else [plain]", "[]"),
    ),
    *noticed_by(
        test_which_when.test_one_batch_tells_nothing_of_others,
        (f"{_IN}.which_when:_best", "as_good if is_told else None", "as_good"),
    ),
    *noticed_by(
        test_which_when.test_a_mixture_is_held_against_the_fastest_of_what_its_members_do_alone,
        (f"{_IN}.which_when:mixtures", "in arms[name].members]", "not in arms[name].members]"),
        (f"{_IN}.which_when:mixtures", "our_name(name), best, seed", "best, our_name(name), seed"),
    ),
    *noticed_by(
        test_page.test_every_arm_stands_with_its_setting_over_plain_the_fastest_first,
        (f"{_IN}.drafter_tables:arms_of", "-(arm.tokens_per_s or 0.0)", "(arm.tokens_per_s or 0.0)"),
        (f"{_IN}.which_when:over_plain", "PLAIN_ARMS", "('transformers prompt lookup',)"),
    ),
    *noticed_by(
        test_page.test_pooled_runs_say_what_each_found,
        (
            "eval.results.comparisons:_arm",
            "for cell in cells]  # over one arm",
            "for cell in cells[:1]]  # over one arm",
        ),
    ),
]
