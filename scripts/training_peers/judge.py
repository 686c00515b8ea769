"""Acceptance of drafts on the validation split of `python -m train`, whoever trained them:

python scripts/training_peers/judge.py '{"name": "folder", ...}' key=value ...
"""

from __future__ import annotations

import json
import sys

import torch

from decode.common.compose import compose
from decode.common.typed_config import build
from decode.drafters.saved_draft import load_drafter
from decode.models.load import load_model
from distill.objectives.scoring import rows_at_once
from train.config import TrainConfig
from train.live_target import LiveTarget
from train.loss import DraftLoss
from train.metric_sums import Sums
from train.training_inputs import open_inputs


@torch.no_grad()
def main(folders: dict[str, str], overrides: list[str]) -> None:
    """A line of JSON: alpha, at temperature 1 and 0, and tokens judged of each."""
    composed = compose("train", TrainConfig, overrides)
    assert composed is not None
    cfg = build(TrainConfig, composed)
    inputs, target, found = open_inputs(cfg), load_model(cfg.target), {}
    cfg.objective.chunk_rows = rows_at_once(inputs.vocab_size)
    for name, folder in folders.items():
        draft = load_drafter(folder, target, dtype="float32")
        live = LiveTarget(target, inputs.blueprint.layers_read)
        module = DraftLoss(draft, cfg.objective, inputs.window_along_rows).eval()  # type: ignore[arg-type]
        rows = inputs.validation.sample(cfg.validation_rows)
        parts = [module(live(inputs.validation.batch([row])))[1] for row in rows]
        means = Sums.from_tensor(torch.stack(parts).sum(0)).means()
        found[name] = {key: means[key] for key in ("alpha", "alpha_greedy")}
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
