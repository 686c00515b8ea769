"""Faults put into train, one at a time, are noticed by the tests that are named beside them."""

from functools import partial

import pytest
import torch

from tests.faults import Fault, check_caught, noticed_by
from tests.train import test_batches as batches
from tests.train import test_checkpoint as checkpoint
from tests.train import test_dspark as dspark
from tests.train import test_inputs as inputs
from tests.train import test_loop as loop
from tests.train import test_loss as loss
from tests.train import test_optim as optim
from tests.train import test_result as result
from tests.train import test_shapes as shapes
from tests.train.export import test_draft_folder as export

FAULTS = [
    *noticed_by(
        partial(loop.test_accumulated_gradients_are_those_of_one_large_batch, micro_steps=[[0], [1], [2], [3]]),
        (
            "train.training_loop:TrainingLoop.take_step",
            "/ max(1, total_learned)",
            "/ max(1, int(batches[0].loss_mask.sum()))",
        ),
    ),
    *noticed_by(
        loop.test_ranks_together_take_the_step_of_one,
        ("train.training_loop:TrainingLoop.take_step", 'int(accelerator.reduce(learned, "sum"))', "int(learned)"),
    ),
    *noticed_by(
        loop.test_a_gradient_that_is_not_finite_moves_no_weight,
        ("train.training_loop:TrainingLoop._move_weights", "not 0 <= (self.grad_norm or 0.0) < math.inf", "False"),
    ),
    *noticed_by(
        loop.test_a_validation_is_over_all_of_its_rows_and_in_eval_mode,
        ("train.training_loop:TrainingLoop.evaluate", "self.compute.module.train()", "pass"),
    ),
    *noticed_by(
        loop.test_a_run_goes_on_at_its_own_step, ("train.training_loop:TrainingLoop.run", "start=first", "start=0")
    ),
    *noticed_by(
        batches.test_a_batch_token_by_token,
        ("train.batches:PackedSource.batch", "document[b, span] = place", "document[b, span] = 0"),
    ),
    *noticed_by(
        batches.test_a_rank_reads_its_own_micro_steps, ("train.batches:StepReader._read", "self.split[0]", "0")
    ),
    *noticed_by(
        batches.test_every_epoch_has_an_order_of_its_own,
        ("train.packing:_epoch_order", "(seed, 1, epoch)", "(seed, 1)"),
    ),
    *noticed_by(
        inputs.test_what_is_validated_on_is_not_trained_on,
        ("train.training_inputs:open_inputs", '("train", "validation")', '("train", "train")'),
    ),
    *noticed_by(
        partial(inputs.test_hidden_states_come_in_the_order_of_the_layers, layers=(0, 1, -1)),
        (
            "train.live_target:LiveTarget.__call__",
            "(self.reader.model, self.layers)",
            "(self.reader.model, sorted(self.layers))",
        ),
    ),
    *noticed_by(
        loss.test_what_a_reduced_vocabulary_hides_counts_in_acceptance_alone,
        ("train.loss:DraftLoss._weighted_loss", "one.learned.sum()", "one.valid.sum()"),
    ),
    *noticed_by(
        dspark.test_chances_that_sparse_records_estimate_above_one_are_one,
        ("train.drafts.confidence:predictions", ".clamp(0.0, 1.0)", ".clamp(0.0)"),
    ),
    *noticed_by(
        partial(optim.test_weight_decay_shrinks_matrices_and_nothing_else, optimizer="adamw", kept_of_matrix=0.95),
        ("train.optimizers:build_optimizers", '"weight_decay": 0.0', '"weight_decay": cfg.weight_decay'),
    ),
    *noticed_by(
        optim.test_each_optimizer_follows_its_own_peak,
        ("train.optimizers:Schedule.apply", "peak * factor", 'group["lr"] * factor'),
    ),
    *noticed_by(
        checkpoint.test_state_survives_to_the_last_bit,
        ("train.checkpoints.state:SavedState.state", "Sums(**known[name].model_dump())", "Sums()"),
    ),
    *noticed_by(
        checkpoint.test_old_checkpoints_go_but_never_weights_that_a_kept_one_names,
        ("train.checkpoints.run_checkpoints:Checkpoints._drop_old", ".best_step for", ".step for"),
    ),
    *noticed_by(
        partial(result.test_the_draft_that_is_kept_has_the_best_weights, tied=True),
        ("train.run_result:kept_draft", "best_weights(state.best_step)", "best_weights(state.step)"),
    ),
    *noticed_by(
        partial(shapes.test_a_head_is_made_like_its_target, family="eagle3"),
        ("train.drafts.head_blueprint:_sizes", "rope_of(target, same_head_dim=True)", "rope_of(None)"),
    ),
    *noticed_by(
        partial(shapes.test_it_is_the_targets_as_far_as_it_fits, theirs=shapes.LONG, same_size=True, ours=shapes.LONG),
        ("train.drafts.rope:rope_of", "(same_head_dim and is_whole) or", "False or"),
    ),
    *noticed_by(
        partial(export.test_weights_and_config_are_in_the_precision_asked_for, dtype=torch.bfloat16),
        ("train.export.draft_folder:_save_weights", "one.to(dtype) if", "one if"),
    ),
]


@pytest.mark.slow  # they test the tests
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_is_noticed(fault: Fault, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    check_caught(fault, request, monkeypatch)
