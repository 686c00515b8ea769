"""What plan=true says of memory is what a training then takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiers import by_default, spread
from tests.train.toy import data_settings, head_config, tiny_config, write_records
from train import memory_plan
from train.memory_plan import MemoryPlan, memory_lines, peak_bytes, planned
from train.settled import settled
from train.stage import run
from train.training_inputs import open_inputs
from train.training_loop import TrainingLoop

LARGER: dict[str, Any] = {"sequence_length": 128, "batch_size": 6, "steps": 2, "log_every": 2, "validate_every": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "lm": {"draft": {"layers": 2, "width": 64, "heads": 4}},
    "lm, muon": {"draft": {"layers": 2, "width": 64, "heads": 4}, "optimizer": "muon"},
    "lm, micro-steps": {"draft": {"layers": 2, "width": 64, "heads": 4}, "batch_size": 3, "gradient_accumulation": 2},
    "eagle3": {},
    "medusa": {},
    "dspark": {},
}


@pytest.mark.parametrize("recomputes", by_default(1, [True, False]))
@pytest.mark.parametrize("name", spread(3, SETTINGS))
def test_a_training_takes_what_was_planned(
    tmp_path: Path, target: Path, corpus: Path, name: str, recomputes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 15 %: of all that training has made from its first step on, and what it held by then."""
    make = tiny_config if name.startswith("lm") else head_config
    family = () if name.startswith("lm") else (name,)
    changes = {"data": data_settings(corpus), "target_source": "live", **LARGER, **SETTINGS[name]}
    cfg = make(tmp_path / "run", target, *family, engine={"recompute": recomputes}, **changes)
    inputs = open_inputs(cfg)
    cfg = settled(cfg, inputs.blueprint, inputs.widest_row(makes_p=True))
    plan = planned(cfg, inputs, processes=1)
    seen = _peak_of_training(cfg, monkeypatch)
    assert plan.total(cfg.batch_size) == pytest.approx(seen, rel=0.15)


def _peak_of_training(cfg: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of weights, and of what both steps make at their peak."""
    peaks: list[int] = []
    train = TrainingLoop.run

    def measured(self: TrainingLoop) -> Any:
        with monkeypatch.context() as patch, peak_bytes(torch.device("cpu")) as peak:
            patch.setattr(TrainingLoop, "_write_down", lambda self, bar: None)
            state = train(self)
        target = self.compute.live
        models = [self.compute.module, *([] if target is None else [target.reader.model])]
        peaks.append(peak[0] + sum(one.numel() * one.itemsize for model in models for one in model.parameters()))
        return state

    monkeypatch.setattr(TrainingLoop, "run", measured)
    monkeypatch.setattr("train.stage.keep_result", lambda *_: None)
    run(cfg)
    return peaks[0]


@pytest.mark.parametrize("store", ["last_hidden", "head_tail"])
def test_records_are_planned_with_what_they_need_of_the_target(
    tmp_path: Path, target: Path, corpus: Path, store: str
) -> None:
    records = write_records(tmp_path / "records", target, corpus, [store])
    cfg = tiny_config(tmp_path / "run", target, records=str(records))
    inputs = open_inputs(cfg)
    held = planned(settled(cfg, inputs.blueprint, inputs.widest_row(makes_p=False)), inputs, 1).held
    assert ("the target" in held) == (store == "last_hidden")


MUCH, ROOM = 10 * 10**9, 80 * 10**9


@pytest.mark.parametrize(
    ("changes", "one_row", "held", "told"),
    [
        ({"batch_size": 8}, MUCH, MUCH, "that does not fit. batch_size=4 gradient_accumulation=2 would: .* 50.00 GB"),
        ({"batch_size": 1}, 9 * MUCH, MUCH, "that does not fit. engine.recompute=true would: .* 55.00 GB"),
        (
            {"batch_size": 1},
            12 * MUCH,
            3 * MUCH,
            "engine=fsdp2 optimizer=adamw engine.recompute=true would: .* 75.00 GB",
        ),
        ({"batch_size": 1}, 20 * MUCH, MUCH, "use a smaller draft"),
    ],
)
def test_the_first_setting_that_fits_is_told(
    tmp_path: Path, target: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any], one_row: int, held: int, told: str,
) -> None:  # fmt: skip
    def made(cfg: Any, *_: Any) -> MemoryPlan:
        row = one_row // (2 if cfg.engine.recompute else 1)
        return MemoryPlan({"weights": held // (2 if cfg.engine.name == "fsdp2" else 1)}, row, row, 0, ROOM)

    monkeypatch.setattr(memory_plan, "planned", made)
    cfg = tiny_config(tmp_path, target, data=data_settings(corpus), target_source="live", **changes)
    _, found = memory_lines(cfg, open_inputs(cfg), 2)
    assert re.search(told, found)
