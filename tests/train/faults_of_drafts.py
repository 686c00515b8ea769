"""What may go wrong with a draft's shape, and with what is kept of it; form as `tests/train/faults.py` says."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.train import test_checkpoint as checkpoint
from tests.train import test_config as config
from tests.train import test_heads as heads
from tests.train import test_result as result
from tests.train import test_rope as rope
from tests.train import test_selection as selection
from tests.train import test_shapes as shapes
from tests.train.export import test_draft_folder as export

IN_HALF = partial(export.test_weights_and_config_are_in_the_precision_asked_for, dtype=torch.bfloat16)
OTHER_DEPTH = partial(
    shapes.test_a_saved_head_of_another_shape_than_asked_for, asked={"head": {"depth": 2}}, message="draft.head.depth=2"
)
DFLASH, LAYOUT_ASKED = (
    partial(
        shapes.test_a_new_block_is_laid_out_as_engines_run_it_unless_asked_otherwise,
        asked={"markov_rank": 0} | asked,
        layout=layout,
    )
    for asked, layout in (({}, "fill_in"), ({"layout": "anchor"}, "anchor"))
)
ROPE_PARTIAL = partial(
    rope.test_it_is_the_targets_as_far_as_it_fits,
    theirs={"rope_theta": 5e5, "partial_rotary_factor": 0.5},
    same_size=True,
    ours={"rope_theta": 5e5},
)
ROPE_SAME_SIZE = partial(
    rope.test_it_is_the_targets_as_far_as_it_fits, theirs=rope.LONG, same_size=True, ours=rope.LONG
)
ROPE_OTHER_SIZE = partial(
    rope.test_it_is_the_targets_as_far_as_it_fits, theirs=rope.LONG, same_size=False, ours={"rope_theta": 1e6}
)
ODD_HEADS = partial(
    config.test_contradictions_are_named,
    target=Path("there"),
    changes={"records": "r", "draft": {"width": 20, "heads": 4}},
    message="does not divide",
)
NO_TAPS = partial(heads.test_settings_of_other_families, draft={"head": {"taps": []}}, message="must name different")

KEEPING: dict[Any, str] = {
    checkpoint.test_state_survives_to_the_last_bit: """
        checkpoint:SavedState.state: TrainState(**known) => TrainState(**known | {"best_score": None})
        checkpoint:SavedState.state: Sums(**known[name].model_dump()) => Sums()
    """,
    checkpoint.test_weights_moments_and_random_numbers_come_back: """
        checkpoint:Checkpoints.restore: (str(checkpoint)) => (str(checkpoint)), __import__('torch').manual_seed(0)
    """,
    checkpoint.test_another_number_of_processes_is_refused_before_anything_is_loaded: """
        checkpoint:Checkpoints.restore: != accelerator.num_processes => == 0
    """,
    checkpoint.test_a_checkpoint_of_another_version_is_refused: """
        checkpoint:read_state: content.get("schema") != SCHEMA => content.get("schema") is None
    """,
    checkpoint.test_what_was_written_after_a_step_is_forgotten: """
        checkpoint:Checkpoints.forget_after: ("step", "best") => ("step",)
        checkpoint:Checkpoints.forget_after: number > step => number >= step
    """,
    partial(checkpoint.test_a_checkpoint_is_adopted_with_its_best_weights_and_its_part_of_the_log, best=1): """
        checkpoint:adopt: log[: saved.log_position] => log
    """,
    checkpoint.test_old_checkpoints_go_but_never_weights_that_a_kept_one_names: """
        checkpoint:Checkpoints._drop_old: .best_step for => .step for
    """,
    checkpoint.test_a_checkpoint_gets_its_name_once_all_of_it_is_on_disk: """
        checkpoint:_give_name: _sync(path) => pass
    """,
    checkpoint.test_tied_weights_are_stored_once: """
        checkpoint:without_aliases: (tensor.data_ptr(), tensor.shape) => (name, tensor.shape)
    """,
    checkpoint.test_weights_are_kept_as_they_are: """
        checkpoint:without_aliases: .cpu().contiguous() => .cpu()
    """,
    selection.test_the_lower_loss_decides_where_none_is: """
        best_checkpoint:score: -means["loss"] => means["loss"]
    """,
    selection.test_tau_decides_where_p_is_known: """
        best_checkpoint:score: value = means["tau"] => value = means["alpha"]
        best_checkpoint:score: value = means["tau"] => value = validation.tau or None
    """,
    partial(result.test_the_draft_that_is_kept_has_the_best_weights, tied=True): """
        run_result:kept_draft: best_weights(state.best_step) => best_weights(state.step)
    """,
    result.test_what_is_said_is_of_the_best_validation: """
        run_result:facts: int(state.best.tokens) => state.tokens
        run_result:facts: state.best.means() => state.since_log.means()
    """,
    result.test_a_draft_takes_the_temperatures_that_were_fitted: """
        drafts.head_blueprint:TrainableHead.calibrate: head.config, measured => _, measured
    """,
    partial(result.test_an_export_is_in_the_precision_asked_for_and_says_what_was_measured, dtype="float32"): """
        run_result:_export: getattr(torch, cfg.export_dtype) => torch.bfloat16
        run_result:_export: cfg.target.revision => None
    """,
    IN_HALF: """
        export.draft_folder:_save_weights: one.to(dtype) if => one if
        export.draft_folder:_save_weights: without_aliases(module.state_dict()) => module.state_dict()
        decode.formats.lm:engine_config: precision(dtype) => precision(model.dtype)
    """,
    export.test_whole_numbers_stay_whole_and_every_file_is_summed: """
        export.draft_folder:_save_weights: one.to(dtype) if one.is_floating_point() else one => one.to(dtype)
    """,
    export.test_transformers_is_told_how_many_tokens_to_draft_and_to_draft_them_all: """
        decode.formats.lm:generation_config: assistant_confidence_threshold=0.0 => assistant_confidence_threshold=0.4
        decode.formats.lm:generation_config: num_assistant_tokens=num_draft_tokens => num_assistant_tokens=5
    """,
}


SHAPES: dict[Any, str] = {
    shapes.test_a_draft_model_speaks_every_row_of_the_targets_head: """
        drafts.lm_blueprint:lm_blueprint: (target) if target => (target) | {"vocab_size": len(tokenizer)} if target
        drafts.lm_blueprint:lm_blueprint: rope_of(target) => rope_of(None)
    """,
    shapes.test_a_draft_model_has_the_sizes_asked_for: """
        drafts.lm_blueprint:lm_blueprint: draft.tie_embeddings => True
        drafts.lm_blueprint:lm_blueprint: draft.kv_heads or heads => heads
    """,
    partial(shapes.test_sizes_that_are_left_out_follow_the_target, target_width=512, draft={}, sizes=(256, 4)): """
        drafts.draft_config:DraftConfig.lm_sizes: target_width // 2 => target_width
    """,
    shapes.test_a_token_costs_layers_and_head_but_no_table: """
        drafts.head_blueprint:HeadBlueprint.weights_per_token: config.draft_vocab_size or config => config
    """,
    shapes.test_adapters_are_counted_by_themselves: """
        drafts.lm_blueprint:LMBlueprint.num_trained: rank == 0 => rank >= 0
    """,
    shapes.test_a_pretrained_draft_is_trained_in_full_precision: """
        drafts.lm_blueprint:LMBlueprint.build: "float32" => "auto"
    """,
    partial(shapes.test_a_head_is_made_like_its_target, family="eagle3"): """
        drafts.head_blueprint:_sizes: rope_of(target, same_head_dim=True) => rope_of(None)
        drafts.head_blueprint:_sizes: getattr(text, "head_dim", None) or => None or
    """,
    partial(shapes.test_a_head_is_made_like_its_target, family="mtp"): """
        drafts.head_blueprint:_sizes: getattr(text, "rms_norm_eps", 1e-6) => 1e-6
    """,
    partial(shapes.test_a_head_norms_queries_where_its_target_does, model_type="qwen3", has_norms=True): """
        drafts.head_blueprint:_like_target: any(name => any(False and name
    """,
    DFLASH: """
        drafts.head_blueprint:head_blueprint: "anchor" if draft.head.markov_rank else => "anchor" if True else
    """,
    LAYOUT_ASKED: """
        drafts.head_blueprint:head_blueprint: draft.head.layout or => None or
    """,
    shapes.test_confidence_that_is_not_trained_is_not_there: """
        drafts.head_blueprint:head_blueprint: given["confidence"] = False => pass
    """,
    shapes.test_weights_of_a_head_are_counted_without_the_targets_ends_and_without_ids: """
        drafts.head_blueprint:HeadBlueprint.num_parameters: if name != "vocab" => if True
    """,
    shapes.test_a_saved_head_goes_on_in_full_precision_with_the_tokens_it_has: """
        drafts.head_blueprint:HeadBlueprint.build: self.target).float() => self.target)
    """,
    OTHER_DEPTH: """
        drafts.head_blueprint:_saved: (saved[name], default[name]) => (asked[name],)
    """,
    ROPE_PARTIAL: """
        drafts.rope:rope_of: rope.pop("partial_rotary_factor", None) => pass
    """,
    ROPE_SAME_SIZE: """
        drafts.rope:rope_of: (same_head_dim and is_whole) or => False or
    """,
    ROPE_OTHER_SIZE: """
        drafts.rope:rope_of: rope.get("rope_theta", 10000.0)} => 10000.0}
    """,
    ODD_HEADS: """
        drafts.draft_config:DraftConfig._check_lm: width % (2 * heads) => width % heads
    """,
    NO_TAPS: """
        drafts.draft_config:HeadSettings.__post_init__: 0 < len(taps) == => len(taps) ==
    """,
}
