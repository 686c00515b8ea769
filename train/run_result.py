"""The end of a run: the kept weights exported, with a card and a manifest that say what was measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from decode.common.checked_json import write_json
from decode.common.progress import get_logger
from decode.common.run_folder import RunFolder
from decode.drafters.base import Batch
from decode.models.fingerprint import weights_fingerprint
from decode.models.output_head import Ends
from distill.objectives.scoring import MOST_ROWS
from train.checkpoints.state import TrainState
from train.config import TrainConfig
from train.drafts.blueprint import TrainableDraft
from train.export.draft_folder import Export
from train.export.model_card import model_card
from train.loss import DraftLoss
from train.training_inputs import Inputs, tokenizer_folder

if TYPE_CHECKING:
    from train.training_loop import Recorder

logger = get_logger("train")


def keep_result(
    cfg: TrainConfig,
    inputs: Inputs,
    folder: RunFolder,
    state: TrainState,
    recorder: Recorder,
    ends: Ends | None,
    validation: Iterable[Batch],
) -> None:
    """Export the best weights to `model/`, hand the report to the tracker, and finish the run; rank 0 only.

    `validation` are batches that a draft is calibrated on, where its family is.
    """
    draft = kept_draft(cfg, inputs, recorder, state, ends)
    measured = facts(inputs, state) | draft.calibrate(validation, cfg.objective.chunk_rows or MOST_ROWS)
    weights = _target_weights(cfg, inputs, ends)
    draft.export(folder.path / "model", _export(cfg, inputs, measured, weights))
    write_json(folder.file("result.json"), measured)
    recorder.tracker.finish([folder.path / "model" / "README.md", folder.file("result.json")], measured)
    if recorder.log is not None:
        recorder.log.close()
    folder.finish({"model": "model", **measured})
    logger.info("kept step %d; exported to %s", measured["step"], folder.path / "model")


def kept_draft(
    cfg: TrainConfig, inputs: Inputs, recorder: Recorder, state: TrainState, ends: Ends | None
) -> TrainableDraft:
    """The draft with the weights of the best validation, on the CPU and outside of any engine."""
    assert state.best_step is not None, "the last step always validates"
    draft = inputs.blueprint.build(ends)
    module = DraftLoss(draft.module, cfg.objective, inputs.window_along_rows)
    weights = load_file(recorder.checkpoints.best_weights(state.best_step))
    _, unexpected = module.load_state_dict(weights, strict=False)  # tied weights are stored under one of their names
    assert not unexpected, unexpected
    return draft


def facts(inputs: Inputs, state: TrainState) -> dict[str, Any]:
    """What was measured of the kept weights."""
    return {
        "step": state.best_step,
        "rule": state.best.rule,
        **state.best.means(),
        "validation_tokens": int(state.best.tokens),
        "tokens": state.tokens,
        "train_tokens": inputs.train.num_tokens,
        **({} if state.switched_at is None else {"switched_at": state.switched_at}),
        "num_parameters": inputs.blueprint.num_parameters,
        **({} if state.start is None else {"start": state.start.means()}),
    }


def _target_weights(cfg: TrainConfig, inputs: Inputs, ends: Ends | None) -> str | None:
    """Fingerprint of the weights whose hidden states a head learned from: the live target's, or those of its
    records."""
    if ends is not None and cfg.makes_p and inputs.blueprint.layers_read:
        assert inputs.target is not None
        whole = cfg.target_source == "live" and weights_fingerprint(ends.head.model)
        return whole or inputs.target.stored_fingerprint  # where it is sharded, or in a server
    return inputs.recorded_weights


def _export(cfg: TrainConfig, inputs: Inputs, measured: dict[str, Any], weights: str | None) -> Export:
    provenance: dict[str, Any] = {"config": asdict(cfg), "data": inputs.data, "measured": measured, "target": None}
    shape = inputs.blueprint
    source, revision = cfg.tokenizer.path or str(tokenizer_folder(cfg)), None
    if inputs.target is not None:
        source, revision = inputs.target.path, cfg.target.revision
        names = ("path", "fingerprint", "quantization", "vocab_size", "token_map_hash", "chat_template_hash")
        provenance["target"] = {name: getattr(inputs.target, name) for name in names} | {"weights": weights}
    return Export(
        tokenizer_source=source,
        tokenizer_revision=revision,
        dtype=getattr(torch, cfg.export_dtype),
        num_draft_tokens=inputs.num_draft_tokens,
        card=model_card(cfg, measured, inputs.num_draft_tokens, shape.attends, shape.made_from, shape.drafts_few),
        provenance=provenance,
    )
