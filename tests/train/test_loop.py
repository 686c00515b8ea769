"""What one step does to the weights, however it is split; what is logged, timed, validated and kept."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from decode.common.errors import RunError
from decode.drafters.base import Batch
from tests.train.small_loop import (
    LENGTHS,
    Clock,
    one_text_a_row,
    small_config,
    small_draft,
    small_loop,
    small_ranks,
    small_target,
    together,
    weights_of,
)
from train.checkpoints.run_checkpoints import Checkpoints
from train.checkpoints.state import TrainState, read_state
from train.loss import DraftLoss
from train.metric_sums import Sums
from train.speed_meter import Meter
from train.training_loop import TrainingLoop

UNEVEN = [0, 1, 2, 3]
"""Rows of 12, 2, 7 and 3 tokens, of which 11, 1, 6 and 2 are learned."""


def stepped(loop: TrainingLoop, micro_steps: list[list[int]]) -> TrainingLoop:
    """After one step over these rows."""
    loop.take_step(0, [one_text_a_row().batch(rows) for rows in micro_steps])
    return loop


def whole_gradient(rows: list[int]) -> Tensor:
    """Of the mean over all learned tokens of these rows, from one batch and without a loop."""
    module = small_draft()
    batch = small_target()(one_text_a_row().batch(rows))
    loss, values = module(batch)
    (loss / Sums.from_tensor(values).loss_count).backward()
    return torch.cat([weight.grad.flatten() for weight in module.parameters() if weight.grad is not None])


@pytest.mark.parametrize("micro_steps", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]])
def test_accumulated_gradients_are_those_of_one_large_batch(tmp_path: Path, micro_steps: list[list[int]]) -> None:
    """Tokens count alike, wherever they lie: a mean of the micro-steps' means would weigh the short ones more."""
    size = {"gradient_accumulation": len(micro_steps), "batch_size": 4 // len(micro_steps)}
    loop = small_loop(small_config(tmp_path / "out", **size))
    before = weights_of(loop)
    stepped(loop, micro_steps)
    gradient = whole_gradient(UNEVEN)
    torch.testing.assert_close(before - weights_of(loop), gradient, rtol=1e-9, atol=1e-12)
    assert loop.grad_norm == pytest.approx(float(gradient.norm()), rel=1e-9)
    assert loop.state.since_log.loss_count == 11 + 1 + 6 + 2
    assert loop.state.tokens == loop.meter.tokens == 12 + 2 + 7 + 3


def test_a_second_step_starts_from_no_gradient(tmp_path: Path) -> None:
    loop = small_loop(small_config(tmp_path / "out", lr=1e-12))
    norms = []
    for _ in range(2):
        norms.append(stepped(loop, [[0]]).grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_ranks_together_take_the_step_of_one(tmp_path: Path) -> None:
    """Two ranks with 11 + 6 and 1 + 2 learned tokens."""
    loops = small_ranks(tmp_path, batch_size=2)
    before = weights_of(loops[0])
    together(loops, lambda loop: stepped(loop, [[[0, 2], [1, 3]][loop.accelerator.process_index]]))
    gradient = whole_gradient(UNEVEN)
    for loop in loops:
        torch.testing.assert_close(before - weights_of(loop), gradient, rtol=1e-9, atol=1e-12)
        assert loop.state.since_log.loss_count == 20
        assert loop.state.tokens == loop.meter.tokens == 24


def test_a_gradient_is_clipped_to_the_norm_asked_for_and_logged_as_it_was(tmp_path: Path) -> None:
    loop = small_loop(small_config(tmp_path / "out", clip=0.01))
    before = weights_of(loop)
    stepped(loop, [UNEVEN])
    assert float((weights_of(loop) - before).norm()) == pytest.approx(0.01, rel=1e-4)
    assert loop.grad_norm == pytest.approx(float(whole_gradient(UNEVEN).norm()))


def test_a_gradient_that_is_not_finite_moves_no_weight(tmp_path: Path) -> None:
    module = small_draft()
    loop = small_loop(small_config(tmp_path / "out"), module)
    next(iter(module.parameters())).register_hook(lambda gradient: gradient * float("nan"))
    before = weights_of(loop)
    with pytest.raises(RunError, match="gradient is not finite at step 1, in the batch of these documents: doc"):
        stepped(loop, [[0]])
    assert torch.equal(weights_of(loop), before)


class Zero:
    """What a loop asks of an accelerator under ZeRO, whose backward pass takes the step and skips some."""

    device, num_processes, process_index, is_main_process = torch.device("cpu"), 1, 0, True
    sync_gradients = True

    def __init__(self, norm: float | None, is_applied: bool) -> None:
        self.norm, self.is_applied = norm, is_applied

    def reduce(self, tensor: torch.Tensor, how: str) -> torch.Tensor:
        return tensor

    def autocast(self) -> nullcontext:
        return nullcontext()

    def accumulate(self, module: nn.Module) -> nullcontext:
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def clip_grad_norm_(self, weights: Any, clip: float) -> float | None:
        return self.norm

    def unwrap_model(self, module: nn.Module) -> nn.Module:
        return module


@pytest.mark.parametrize(
    ("norm", "is_applied", "told"),
    [
        (float("inf"), False, "It did not change the weights; the last good"),
        (3.0, False, "It did not change the weights; the last good"),  # of the step before
        (None, False, "It did not change the weights; the last good"),
        (-1.0, True, "DeepSpeed, .* has changed the weights by it, .*; the last good checkpoint is none yet"),
        (float("nan"), True, "DeepSpeed, .* has changed the weights by it"),
        (3.0, True, None),
        (None, True, None),
    ],
)
def test_what_zero_did_with_a_gradient_that_is_not_finite_is_said(
    tmp_path: Path, norm: float | None, is_applied: bool, told: str | None
) -> None:
    """It skips the step and tells a norm of inf or none; or it steps, and tells a norm of -1."""
    module = small_draft()
    module.was_step_applied = lambda: is_applied  # type: ignore[assignment]
    loop = small_loop(small_config(tmp_path / "out"), module, Zero(norm, is_applied))
    if told is None:
        stepped(loop, [[0]])
        assert loop.grad_norm == norm
    else:
        with pytest.raises(RunError, match=f"gradient is not finite at step 1, .*{told}"):
            stepped(loop, [[0]])


def test_a_loss_that_is_not_finite_on_one_rank_stops_them_all(tmp_path: Path) -> None:
    """And the documents are named that this rank has read."""
    loops = small_ranks(tmp_path)
    for weight in loops[1].compute.module.parameters():
        weight.data.fill_(float("nan"))
    before = weights_of(loops[0])

    def run(loop: TrainingLoop) -> str:
        rows = loop.reader.rows_of(3, loop.accelerator.process_index)
        with pytest.raises(RunError) as error:
            loop.take_step(3, [one_text_a_row().batch(rows[0])])
        return str(error.value)

    row = loops[0].reader.order.rows_of_step(3)[1]
    for message in together(loops, run):
        assert f"loss is not finite at step 4, in the batch of these documents: doc{row}. " in message
    assert torch.equal(weights_of(loops[0]), before)


class Watched(DraftLoss):
    """Notes in which mode each batch was seen, and of how many tokens it was."""

    seen: list[tuple[bool, int]]

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(loss, sums) of a batch, as a draft gives them."""
        self.seen.append((self.training, int((batch.document >= 0).sum())))
        return super().forward(batch)


def watched() -> Watched:
    module = small_draft(Watched)
    module.seen = []
    return module


def test_a_validation_is_over_all_of_its_rows_and_in_eval_mode(tmp_path: Path) -> None:
    """Three rows at a time of 8, the last two of 9 being empty; as one batch of all of them would be."""
    module = watched()
    loop = small_loop(small_config(tmp_path / "out", batch_size=3, validation_rows=64), module)
    sums = loop.evaluate()
    assert [training for training, _ in module.seen] == [False] * 3
    assert module.training
    assert sums.tokens == sum(LENGTHS)
    with torch.no_grad():
        whole = DraftLoss.forward(module, small_target()(one_text_a_row().batch(range(8))))[1]
    torch.testing.assert_close(sums.tensor(), whole, rtol=1e-6, atol=1e-6)
    assert len(list(loop.validation_batches())) == 3
    assert all(batch.target is not None for batch in loop.validation_batches())


def test_weights_that_came_in_eval_mode_are_trained_in_training_mode(tmp_path: Path, quiet: None) -> None:
    """As pretrained ones do. Without their dropout up to the first validation and with it afterwards, a resumed run
    would be another one."""
    module = watched()
    module.eval()
    small_loop(small_config(tmp_path / "out", steps=2, validate_every=2, validation_rows=1, lr=1e-12), module).run()
    assert [training for training, _ in module.seen] == [True, True, False]


def test_a_validation_reads_as_many_rows_as_asked_for_and_always_the_same(tmp_path: Path) -> None:
    module = watched()
    for seed, step in ((0, 0), (1, 5)):
        cfg = small_config(tmp_path / "out", validation_rows=3, seed=seed)
        small_loop(cfg, module, state=TrainState(step=step)).evaluate()
    tokens = [count for _, count in module.seen]
    assert len(tokens) == 6
    assert tokens[:3] == tokens[3:]


def test_ranks_share_a_validation_and_agree_on_it(tmp_path: Path) -> None:
    """Eight rows over two ranks with three rows at a time: four are empty."""
    alone = small_loop(small_config(tmp_path / "alone", validation_rows=64)).evaluate()
    loops = small_ranks(tmp_path, watched, batch_size=3, validation_rows=64)
    ours, theirs = together(loops, TrainingLoop.evaluate)
    assert ours == theirs
    torch.testing.assert_close(ours.tensor(), alone.tensor(), rtol=1e-6, atol=1e-6)
    seen, others = (sum(count for _, count in cast(Watched, loop.compute.module).seen) for loop in loops)
    assert seen + others == sum(LENGTHS)
    assert 0 < seen < sum(LENGTHS)


def lines(loop: TrainingLoop, kind: str) -> list[dict[str, Any]]:
    path = Path(loop.cfg.output_dir) / "metrics.jsonl"
    return [line for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == kind]


def means_of(rows: list[int]) -> dict[str, Any]:
    with torch.no_grad():
        values = small_draft()(small_target()(one_text_a_row().batch(rows)))[1]
    return Sums.from_tensor(values).means()


def test_a_log_line_has_the_loss_of_its_steps_and_the_acceptance_of_the_last(tmp_path: Path, quiet: None) -> None:
    """Weights that all but stand still; four steps of two texts, two steps a line."""
    loop = small_loop(small_config(tmp_path / "out", lr=1e-12, batch_size=2, steps=4, log_every=2, validate_every=4))
    order = loop.reader.order
    loop.run()
    read = [order.rows_of_step(step) for step in range(4)]
    for line, rows in zip(lines(loop, "train"), (read[0] + read[1], read[2] + read[3]), strict=True):
        means, last = (means_of(some) for some in (rows, rows[2:]))
        assert line["loss"] == pytest.approx(means["loss"], rel=1e-6)
        assert [line[name] for name in ("alpha", "tau")] == pytest.approx([last["alpha"], last["tau"]], rel=1e-6)
    assert [line["tokens"] for line in lines(loop, "train")] == [
        sum(LENGTHS[row] for step in read[:until] for row in step) for until in (2, 4)
    ]


def test_a_run_goes_on_at_its_own_step(tmp_path: Path, quiet: None) -> None:
    """Two of four steps done: those left read their own rows, at their own rates: 1 + cos 90 and 1 + cos 135 halves,
    after one step of warm-up."""
    cfg = small_config(tmp_path / "out", steps=5, log_every=1, validate_every=5, lr=0.5)
    loop = small_loop(cfg, state=TrainState(step=3, tokens=100))
    rows = [loop.reader.order.rows_of_step(step) for step in (3, 4)]
    assert loop.run().step == 5
    seen = lines(loop, "train")
    assert [line["step"] for line in seen] == [4, 5]
    assert [line["lr"] for line in seen] == pytest.approx([0.25, 0.25 * (1 - 0.5**0.5)])
    first = 100 + LENGTHS[rows[0][0]]
    assert [line["tokens"] for line in seen] == [first, first + LENGTHS[rows[1][0]]]


def scripted(monkeypatch: pytest.MonkeyPatch, taus: list[float]) -> None:
    """Validations of these estimates, whose losses fall all the while."""
    values = iter(
        [Sums(loss=9.0 - n, loss_count=1.0, tau=tau, tau_count=1.0, tokens=1.0) for n, tau in enumerate(taus)]
    )
    monkeypatch.setattr(TrainingLoop, "evaluate", lambda self: next(values))


def test_the_first_of_equally_good_weights_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: None
) -> None:
    """And every checkpoint names the best weights up to its own step."""
    scripted(monkeypatch, [1.5, 2.5, 2.5, 2.0])
    cfg = small_config(tmp_path / "out", steps=4, validate_every=1, checkpoint_every=1, lr=1e-12)
    loop = small_loop(cfg)
    loop.recorder.checkpoints.keep = 9
    state = loop.run()
    assert (state.best_step, state.best_score) == (2, 2.5)
    assert state.best == Sums(loss=8.0, loss_count=1.0, tau=2.5, tau_count=1.0, tokens=1.0)
    assert [line["best_step"] for line in lines(loop, "validation")] == [1, 2, 2, 2]
    folder = tmp_path / "out" / "checkpoints"
    assert [read_state(folder / f"step_0000000{step}").state.best_step for step in (1, 2, 3, 4)] == [1, 2, 2, 2]


def test_a_resumed_run_keeps_weights_that_are_better_than_all_it_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: None
) -> None:
    scripted(monkeypatch, [2.0, 2.4])
    cfg = small_config(tmp_path / "out", steps=4, validate_every=1, checkpoint_every=4, lr=1e-12)
    loop = small_loop(cfg, state=TrainState(step=2, best_step=1, best_score=2.5))
    state = loop.run()
    assert (state.best_step, state.best_score) == (1, 2.5)
    assert not list((tmp_path / "out" / "checkpoints").glob("best_*"))


def test_validations_and_checkpoints_do_not_slow_the_meter_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes a second, each of those ten, and so does keeping the best weights."""
    clock, account = Clock(), TrainingLoop._account

    def step(loop: TrainingLoop, number: int, sums: Tensor) -> None:
        clock.now += 1.0
        account(loop, number, sums)

    def slow(*_: Any) -> Sums:
        clock.now += 10.0
        return Sums(loss=1.0, loss_count=1.0, tokens=1.0)

    monkeypatch.setattr("train.speed_meter.time", clock)
    monkeypatch.setattr(TrainingLoop, "_account", step)
    monkeypatch.setattr(TrainingLoop, "evaluate", slow)
    monkeypatch.setattr(Checkpoints, "save", slow)
    monkeypatch.setattr(Checkpoints, "save_best", slow)
    cfg = small_config(tmp_path / "out", steps=2, log_every=2, validate_every=1, checkpoint_every=1, lr=1e-12)
    loop = small_loop(cfg)
    rows = loop.reader.order.rows_of_step(0) + loop.reader.order.rows_of_step(1)
    loop.run()
    (line,) = lines(loop, "train")
    assert line["tokens_per_s"] == pytest.approx(sum(LENGTHS[row] for row in rows) / 2)


def test_rates_are_of_the_time_since_the_last_reading_and_the_eta_of_all(clock: Clock) -> None:
    """A run of 10 steps that goes on at step 2: 2 steps in 4 s, then 2 more in 2 s with a validation of 3 s between."""
    meter = Meter(steps=10, first_step=2)
    meter.add(60)
    meter.add(40)
    clock.now = 4.0
    first = meter.read(4, wait_s=1.0)
    assert first == {"tokens_per_s": 25.0, "eta_s": pytest.approx(12.0), "data_wait_share": 0.25}
    meter.add(60)
    for seconds in (1.0, 2.0):
        with meter.pause():
            clock.now += seconds
    clock.now = 9.0
    second = meter.read(6, wait_s=1.5)
    assert second == {"tokens_per_s": 30.0, "eta_s": pytest.approx(9.0), "data_wait_share": 0.25}


def test_a_reading_before_the_first_step_divides_by_nothing(clock: Clock) -> None:
    clock.now = 2.0
    meter = Meter(steps=5, first_step=3)
    assert meter.read(3, wait_s=0.0) == {"tokens_per_s": 0.0, "eta_s": 0.0, "data_wait_share": 0.0}
