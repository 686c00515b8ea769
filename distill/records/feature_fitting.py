"""Fitting a feature code to the hidden states of a run's first texts, once; the result is a file of the run folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from decode.common.errors import InputError
from decode.common.progress import get_logger
from distill.records.feature_codes import CODES, FeatureCode, FeatureLayout, Pca, Tensors, grid_of
from distill.records.record_manifest import REMEDY
from distill.records.record_shards import Record
from distill.records.safetensors_file import open_arrays

if TYPE_CHECKING:
    from distill.target_passes import Passes

CODE_FILE = "features.safetensors"
MOST_TOKENS = 1 << 16  # states that are held at once: 2 GB in bfloat16 for 4 layers of 4,096 channels
ROWS = 1 << 12  # of them in float32 at a time
FEW = 4  # tokens a channel: with fewer the directions of the sample are not those of the run
LONG = 4.0  # times the median norm: first tokens are tens to thousands of times as long, ordinary ones less than twice

log = get_logger("distill")


def load_code(layout: FeatureLayout, folder: Path) -> FeatureCode:
    """The code that `folder` holds; InputError where its file is missing or damaged."""
    if not layout.is_fitted:
        return CODES[layout.code](layout, {})
    file = folder / CODE_FILE
    if not file.is_file():
        raise InputError(
            f"{file} is missing, and the hidden states in {folder} are coded by the scales in it. {REMEDY}"
        )
    tensors = open_arrays(file, layout.fitted_shapes, REMEDY)
    return CODES[layout.code](layout, {name: torch.from_numpy(tensors.get_tensor(name)) for name in tensors.keys()})


def calibrate(layout: FeatureLayout, records: Sequence[Record], passes: Passes) -> bytes:
    """The content of the file of a code fitted to the hidden states of `records`, MOST_TOKENS of them at most.

    Raises InputError where there are none, or too few.
    """
    if not records:
        raise InputError(
            "the first prompts of the run leave no text to fit the code of hidden states to; use a larger "
            "records.features.calibration_prompts, or records.features.code=bf16"
        )
    starts = np.cumsum([0, *(len(record.ids) for record in records)])
    kept = [record for record, start in zip(records, starts, strict=False) if start < MOST_TOKENS]
    states = [state.cpu() for one in passes.over(kept) for state in one.states()]
    log.info("fitting the %s code of %d layers to %d texts", layout.code, len(layout.layers), len(kept))
    return code_bytes(layout, torch.cat(states)[:MOST_TOKENS], passes.device)


def code_bytes(layout: FeatureLayout, states: Tensor, device: torch.device) -> bytes:
    """The content of the file of a code fitted to states (N, n, d), which lie anywhere; `device` does the work.

    Raises InputError where the states are too few for the components.
    """
    tokens, channels = len(states), states[0].numel()
    if tokens <= layout.components:
        raise InputError(
            f"the first texts of the run have {tokens} tokens, too few for {layout.components} components. Use a "
            "larger records.features.calibration_prompts, fewer records.features.components, or "
            "records.features.code=int8"
        )
    if layout.components and tokens < FEW * channels:
        log.warning(
            "%d components of %d channels are fitted to only %d tokens; a larger records.features.calibration_prompts "
            "lowers the error",
            *(layout.components, channels, tokens),
        )
    fit = _fit_pca if layout.code == "pca" else _fit_int8
    return save({name: tensor.contiguous().cpu() for name, tensor in fit(layout, states, device).items()})


def _fit_int8(layout: FeatureLayout, states: Tensor, device: torch.device) -> Tensors:
    """A channel's range is that over ordinary tokens; longer ones are stretched to it when they are coded."""
    fitted: dict[str, list[Tensor]] = {"mean": [], "middle": [], "step": []}
    for layer in states.unbind(1):
        ordinary = layer.to(device).float()
        norms = ordinary.norm(dim=-1)
        ordinary = ordinary[norms <= LONG * norms.median()]
        for name, tensor in {"mean": ordinary.mean(0), **grid_of(ordinary.amin(0), ordinary.amax(0))}.items():
            fitted[name].append(tensor)
    return {name: torch.stack(tensors) for name, tensors in fitted.items()}


def _fit_pca(layout: FeatureLayout, states: Tensor, device: torch.device) -> Tensors:
    """Directions of most variance, each row counted with at most LONG times the median norm: a long token has its
    direction kept, and does not make the directions of the others look like noise."""
    code = Pca(layout, _means(states, device))
    norms = torch.cat([code.standardised(part).norm(dim=-1) for part in _parts(states, device)])
    weights = (LONG * norms.median() / norms.clamp_min(torch.finfo(norms.dtype).tiny)).clamp_max(1.0)
    rows = [*zip(_parts(states, device), weights.split(ROWS), strict=True)]
    channels = states[0].numel()
    covariance = torch.zeros(channels, channels, device=device)
    for part, weight in rows:
        weighted = code.standardised(part) * weight[:, None]
        covariance += weighted.T @ weighted / len(states)
    basis = torch.linalg.eigh(covariance).eigenvectors[:, -layout.components :].flip(1).T
    found = [(code.standardised(part) * weight[:, None]) @ basis.T for part, weight in rows]
    low, high = (torch.stack([getattr(z, end)(0) for z in found]) for end in ("amin", "amax"))
    return {**code.fitted, "basis": basis, **grid_of(low.amin(0), high.amax(0))}


def _means(states: Tensor, device: torch.device) -> Tensors:
    """`mean` (n, d) and `spread` (n,), the root mean square deviation from it, of the ordinary tokens of each layer."""
    means, spreads = [], []
    for layer in states.unbind(1):
        norms = torch.cat([part.norm(dim=-1) for part in _parts(layer, device)])
        ordinary = norms <= LONG * norms.median()
        parts = [*zip(_parts(layer, device), ordinary.split(ROWS), strict=True)]
        mean = torch.stack([part[kept].sum(0) for part, kept in parts]).sum(0) / ordinary.sum()
        square = torch.stack([(part[kept] - mean).square().sum() for part, kept in parts]).sum()
        means.append(mean)
        spreads.append((square / (ordinary.sum() * layer.shape[1])).sqrt().clamp_min(torch.finfo(mean.dtype).tiny))
    return {"mean": torch.stack(means), "spread": torch.stack(spreads)}


def _parts(states: Tensor, device: torch.device) -> Iterator[Tensor]:
    """The rows, in float32 on `device`, ROWS at a time."""
    return (part.to(device).float() for part in states.split(ROWS))
