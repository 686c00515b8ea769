"""What may go wrong in a step: reading, its numbers, the optimizers, the loop; form as `tests/train/faults.py` says."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.train import test_batches as batches
from tests.train import test_confidence as confidence
from tests.train import test_inputs as inputs
from tests.train import test_live as live
from tests.train import test_loop as loop
from tests.train import test_loss as loss
from tests.train import test_meter as meter
from tests.train import test_optim as optim
from tests.train import test_packing as packing
from tests.train import test_sums as sums

ACCUMULATED = partial(loop.test_accumulated_gradients_are_those_of_one_large_batch, micro_steps=[[0], [1], [2], [3]])
DECAYED, DECAYED_BY_MUON = (
    partial(optim.test_weight_decay_shrinks_matrices_and_nothing_else, optimizer=name, kept_of_matrix=kept)
    for name, kept in (("adamw", 0.95), ("muon", 0.8))
)
DENSE_CHOSEN = partial(
    inputs.test_an_objective_reads_the_store_that_is_enough_for_it,
    objective="reverse_kl",
    stores=["head_tail", "last_hidden"],
    chosen="last_hidden",
)
LAYERS_IN_ORDER = partial(live.test_hidden_states_come_in_the_order_of_the_layers, layers=(0, 1, -1))

LOOP: dict[Any, str] = {
    ACCUMULATED: """
        training_loop:TrainingLoop.take_step: num_processes * self.cfg.gradient_accumulation => num_processes
        training_loop:TrainingLoop.take_step: / max(1, total_learned) => / max(1, int(batches[0].loss_mask.sum()))
        training_loop:TrainingLoop.take_step: sums = sums + values => sums = values
    """,
    loop.test_ranks_together_take_the_step_of_one: """
        training_loop:TrainingLoop.take_step: accelerator.num_processes * => 1 *
        training_loop:TrainingLoop.take_step: int(accelerator.reduce(learned, "sum")) => int(learned)
        training_loop:TrainingLoop._account: Sums.from_tensor(reduced[: len(sums)]) => Sums.from_tensor(sums)
    """,
    loop.test_a_loss_that_is_not_finite_on_one_rank_stops_them_all: """
        training_loop:TrainingLoop._account: float(not torch.isfinite(sums[0])) => 0.0
    """,
    loop.test_a_gradient_is_clipped_to_the_norm_asked_for_and_logged_as_it_was: """
        training_loop:TrainingLoop._move_weights: self.cfg.clip => math.inf
    """,
    loop.test_a_gradient_that_is_not_finite_moves_no_weight: """
        training_loop:TrainingLoop._move_weights: not 0 <= (self.grad_norm or 0.0) < math.inf => False
    """,
    loop.test_a_second_step_starts_from_no_gradient: """
        training_loop:TrainingLoop._move_weights: optimizer.zero_grad() => pass
    """,
    loop.test_a_validation_is_over_all_of_its_rows_and_in_eval_mode: """
        training_loop:TrainingLoop.evaluate: self.machine.module.eval() => pass
        training_loop:TrainingLoop.evaluate: self.machine.module.train() => pass
        training_loop:TrainingLoop.evaluate: sums = sums + self.machine => sums = self.machine
    """,
    loop.test_weights_that_came_in_eval_mode_are_trained_in_training_mode: """
        training_loop:TrainingLoop.run: self.machine.module.train() => pass
    """,
    loop.test_ranks_share_a_validation_and_agree_on_it: """
        training_loop:TrainingLoop.evaluate: self.accelerator.reduce(sums, "sum") => sums
        training_loop:TrainingLoop._validation_rows: -len(rows) % (ranks * size) => -len(rows) % size
    """,
    loop.test_a_validation_reads_as_many_rows_as_asked_for_and_always_the_same: """
        batches:PackedSource.sample: min(len(self.rows), most) => len(self.rows)
    """,
    loop.test_a_log_line_is_the_mean_of_its_own_steps: """
        training_loop:TrainingLoop._log_training: self.state.since_log = Sums() => pass
    """,
    loop.test_a_run_goes_on_at_its_own_step: """
        training_loop:TrainingLoop.run: start=first => start=0
    """,
    loop.test_the_first_of_equally_good_weights_is_kept: """
        training_loop:TrainingLoop._keep_if_best: score > self.state.best_score => score >= self.state.best_score
        training_loop:TrainingLoop._keep_if_best: score, sums => score, self.state.since_log
    """,
    loop.test_a_resumed_run_keeps_weights_that_are_better_than_all_it_finds: """
        training_loop:TrainingLoop._keep_if_best: self.state.best_score is None or => self.state.best.loss_count == 0 or
    """,
    loop.test_validations_and_checkpoints_do_not_slow_the_meter_down: """
        training_loop:TrainingLoop._validate: with self.meter.pause(): => if True:
    """,
}


READING: dict[Any, str] = {
    batches.test_a_batch_token_by_token: """
        batches:PackedSource.batch: torch.arange(len(sequence.ids)) => torch.arange(start, span.stop)
        batches:PackedSource.batch: document[b, span] = place => document[b, span] = 0
        batches:PackedSource.batch: (sequence, b, start) => (sequence, b, 0)
        batches:PackedSource.batch: torch.as_tensor(sequence.loss_mask, dtype=torch.bool) => True
        batches:PackedSource.num_tokens: sum(self.source.lengths) => len(self.rows) * self.length
    """,
    batches.test_packing_is_drawn_from_the_seed: """
        batches:PackedSource.of: length, seed) => length, 0)
    """,
    batches.test_a_rank_reads_its_own_micro_steps: """
        batches:StepReader._read: self.split[0] => 0
        batches:StepReader.steps: self._read, step + 1 => self._read, step
    """,
    batches.test_a_rank_can_name_the_documents_of_another: """
        batches:StepReader.documents_of: self.rows_of(step, rank) => self.rows_of(step, self.split[0])
    """,
    batches.test_waiting_adds_up: """
        batches:StepReader.steps: self.wait_s += => self.wait_s =
    """,
    packing.test_every_epoch_has_an_order_of_its_own: """
        packing:_epoch_order: (seed, 1, epoch) => (seed, 1)
    """,
    packing.test_steps_follow_each_other_through_the_epochs: """
        packing:Order.rows_of_step: step * self.rows_per_step => step
    """,
    packing.test_the_longest_go_first_and_each_where_it_leaves_least: """
        packing:pack: -lengths[index] => lengths[index]
        packing:pack: sizes >> length << length => sizes >> length + 1 << length + 1
    """,
    packing.test_equally_long_texts_are_mixed: """
        packing:pack: shuffled.tolist() => range(len(lengths))
    """,
    packing.test_one_ranks_share_is_a_run_of_rows: """
        packing:share: (micro_step * world_size + rank) => (rank * world_size + micro_step)
    """,
    inputs.test_what_is_validated_on_is_not_trained_on: """
        training_inputs:open_inputs: ("train", "validation") => ("train", "train")
    """,
    inputs.test_a_draft_vocabulary_is_counted_on_the_training_texts: """
        training_inputs:open_inputs: frequent_tokens(sources[0] => frequent_tokens(sources[-1]
    """,
    inputs.test_a_tokenizer_is_trained_on_the_training_texts: """
        training_inputs:_tokenizer: documents("train") => documents("validation")
    """,
    inputs.test_a_step_is_of_the_rows_of_all_ranks_and_micro_steps: """
        training_inputs:check_enough: gradient_accumulation * world_size => gradient_accumulation
    """,
    inputs.test_a_sequence_may_fill_the_context: """
        training_inputs:_check_length: cfg.sequence_length <= limit => cfg.sequence_length < limit
    """,
    DENSE_CHOSEN: """
        training_inputs:_choose_store: dense[0] if needs_dense and dense else => None if False else
    """,
    inputs.test_every_end_of_text_is_always_in_a_draft_vocabulary: """
        training_inputs:special_tokens: (*ends, *tokenizer.all_special_ids) => tokenizer.all_special_ids
    """,
    inputs.test_how_many_tokens_a_round_has: """
        training_inputs:Inputs.num_draft_tokens: self.blueprint.depth or self.window => self.window
    """,
    inputs.test_a_plan_is_worked_out_of_what_a_step_reads: """
        training_plan:TrainingPlan.of: inputs.train.num_tokens / len(inputs.train.rows) => cfg.sequence_length
    """,
    live.test_rows_hold_p_of_the_token_after_them_whatever_lies_before_their_text: """
        live_target:LiveTarget.__call__: torch.arange(len(hidden) => torch.arange(1, len(hidden) + 1
    """,
    LAYERS_IN_ORDER: """
        live_target:LiveTarget.__call__: (self.reader.model, self.layers) => (self.reader.model, sorted(self.layers))
    """,
}


NUMBERS: dict[Any, str] = {
    loss.test_a_row_by_hand: """
        loss:DraftLoss._sums: float((batch.document >= 0).sum()) => float(batch.document.numel())
        loss:DraftLoss.forward: total = learned * => total = 1 *
        loss:DraftLoss._accepted: expected_tau(rounds) * len(rounds) if => expected_tau(rounds) if
    """,
    loss.test_what_a_reduced_vocabulary_hides_counts_in_acceptance_alone: """
        loss:DraftLoss._sums: one.valid.sum() => one.learned.sum()
        loss:DraftLoss._weighted_loss: one.learned.sum() => one.valid.sum()
    """,
    loss.test_chances_that_were_estimated_above_one_are_one: """
        loss:confidence_loss: .clamp(0.0, 1.0) => .clamp(0.0)
    """,
    loss.test_padding_alone_is_no_loss_and_no_gradient: """
        loss:DraftLoss.forward: weighted / weights if weights else 0.0 * weighted => weighted / weights
    """,
    sums.test_counts_travel_exactly_however_large: """
        metric_sums:Sums.tensor: torch.float64 => torch.float32
    """,
    sums.test_each_sum_is_divided_by_its_own_count: """
        metric_sums:Sums.means: (self.tau, self.tau_count) => (self.tau, self.alpha_count)
    """,
    sums.test_what_was_never_counted_has_no_mean: """
        metric_sums:Sums.means: if count else None => if count else 0.0
    """,
    meter.test_rates_are_of_the_time_since_the_last_reading_and_the_eta_of_all: """
        speed_meter:Meter.pause: self.since += => self.started +=
        speed_meter:Meter.read: step - self.first_step => step
        speed_meter:Meter.read: (wait_s - self.wait_s) => wait_s
    """,
    confidence.test_temperatures_are_judged_by_rounds_that_they_were_not_fitted_on: """
        drafts.confidence:calibrated: (logits[half:] / scale, alphas[half:]) => (logits[:half] / scale, alphas[:half])
    """,
    confidence.test_temperatures_are_fitted_on_rounds_that_they_are_not_judged_by: """
        drafts.confidence:calibrated: fitted(logits[:half], alphas[:half]) => fitted(logits, alphas)
    """,
    confidence.test_chances_that_sparse_records_estimate_above_one_are_one: """
        drafts.confidence:predictions: .clamp(0.0, 1.0) => .clamp(0.0)
    """,
    confidence.test_later_slots_make_up_for_earlier_ones: """
        drafts.confidence:fitted: stood = products[best] => pass
        drafts.confidence:NEAR_ONE: 1e-5 => 0.0
    """,
}


OPTIMIZERS: dict[Any, str] = {
    DECAYED: """
        optimizers:build_optimizers: "weight_decay": 0.0 => "weight_decay": cfg.weight_decay
        optimizers:build_optimizers: matrices, "weight_decay": cfg.weight_decay => matrices, "weight_decay": 0.0
    """,
    DECAYED_BY_MUON: """
        optimizers:build_optimizers: lr=cfg.muon_lr => lr=cfg.lr
        optimizers:build_optimizers: muon_lr, weight_decay=cfg.weight_decay => muon_lr
    """,
    optim.test_adamw_averages_as_its_betas_say: """
        optimizers:build_optimizers: lr=cfg.lr, betas=cfg.betas => lr=cfg.lr
    """,
    optim.test_muons_updates_are_of_adamws_size: """
        optimizers:build_optimizers: adjust_lr_fn="match_rms_adamw" => adjust_lr_fn=None
    """,
    partial(optim.test_frozen_weights_are_nobodys, optimizer="adamw"): """
        optimizers:build_optimizers: if weight.requires_grad => if True
    """,
    optim.test_the_rate_of_every_step_by_hand: """
        optimizers:Schedule.factor: (step + 1) / self.warmup_steps => step / self.warmup_steps
        optimizers:Schedule.factor: (step - self.warmup_steps) / => step /
    """,
    optim.test_a_run_without_warmup_begins_at_the_peak: """
        optimizers:Schedule.__init__: cfg.warmup * cfg.steps => cfg.warmup * cfg.steps * cfg.gradient_accumulation
    """,
    optim.test_each_optimizer_follows_its_own_peak: """
        optimizers:Schedule.__init__: group["lr"] for => cfg.lr for
        optimizers:Schedule.apply: peak * factor => group["lr"] * factor
    """,
}
