"""Sequential temperature scaling (DSpark, arXiv 2607.05147): predicted acceptance made to mean what it says.

A chain is cut by the chance that all of its tokens stand, a product. Trained one by one, its factors err alike, and the
product is off by all of them together. So each slot in turn gets the temperature at which the product up to it is
calibrated best, those before it being settled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from decode.common.progress import get_logger
from decode.drafters.base import Batch
from decode.drafters.dspark import DSparkConfig, DSparkDraft
from distill.objectives.config import ObjectiveConfig
from distill.objectives.objective import build_objective
from distill.objectives.scoring import score

log = get_logger("train")

BINS = 10
LEAST_ROUNDS = 64  # with fewer, noise would be fitted
CANDIDATES = 2.0 ** (torch.arange(-30, 31, dtype=torch.float64) / 10)
NEAR_ONE = 1e-5  # of ECE that a temperature must gain for each octave away from 1: ties go to the nearest


def calibrated(
    draft: DSparkDraft, batches: Iterable[Batch], chunk_rows: int = 1024
) -> tuple[DSparkConfig, dict[str, float]]:
    """(the configuration with `temperatures`; the expected calibration errors before and after, and how many rounds
    temperatures were fitted on).

    `batches` are teacher-forced, with p and hidden states, and the draft goes where they are. Temperatures are fitted
    on the first half of the rounds; the errors, means over slots, are those of the other half. Where they do not fall,
    and where rounds are too few, the temperatures stay 1; without p there is nothing to compare with and no error
    either.
    """
    draft.eval()
    untouched = replace(draft.config, temperatures=())
    logits, alphas = predictions(draft, batches, chunk_rows)
    half = len(logits) // 2
    if len(logits) < LEAST_ROUNDS:
        log.info("confidence is not calibrated: %d rounds, and it takes %d", len(logits), LEAST_ROUNDS)
        return untouched, {}
    temperatures = fitted(logits[:half], alphas[:half])
    raw, scaled = (error(logits[half:] / scale, alphas[half:]) for scale in (1.0, torch.tensor(temperatures)))
    log.info("expected calibration error of confidence: %.4f, calibrated %.4f", raw, scaled)
    if scaled >= raw:
        return untouched, {"confidence_ece_raw": raw, "confidence_ece": raw, "confidence_rounds": half}
    kept = replace(untouched, temperatures=tuple(temperatures))
    return kept, {"confidence_ece_raw": raw, "confidence_ece": scaled, "confidence_rounds": half}


@torch.no_grad()
def predictions(draft: DSparkDraft, batches: Iterable[Batch], chunk_rows: int) -> tuple[Tensor, Tensor]:
    """(N, S) float64 logits of the predicted chances and (N, S) chances of acceptance alpha, of all rounds of S tokens
    that have p throughout."""
    objective = build_objective(ObjectiveConfig(name="cross_entropy"))
    none = torch.zeros(0, draft.config.depth, dtype=torch.float64)
    logits, alphas = [none], [none]
    for batch in batches:
        if batch.target is None:
            continue
        steps = list(draft.to(batch.ids.device).unroll(batch))
        scores = score(steps, batch, objective, chunk_rows)
        whole = torch.stack([one.valid for one in scores], -1).all(-1)
        predicted = torch.stack([step.confidence for step in steps if step.confidence is not None], -1)
        actual = torch.stack([one.alpha for one in scores if one.alpha is not None], -1)
        logits.append(predicted[whole].double().cpu())
        alphas.append(actual[whole].double().cpu().clamp(0.0, 1.0))  # estimates from sparse records may lie above
    return torch.cat(logits), torch.cat(alphas)


def fitted(logits: Tensor, alphas: Tensor) -> list[float]:  # (N, S), (N, S) -> S
    """The temperature of each slot, in order."""
    stood = torch.ones_like(logits[:, 0])
    temperatures = []
    for slot, actual in enumerate(alphas.cumprod(-1).unbind(-1)):
        products = stood * (logits[:, slot] / CANDIDATES[:, None]).sigmoid()  # (candidates, N)
        errors = expected_calibration_error(products, actual) + NEAR_ONE * CANDIDATES.log2().abs()
        best = int(errors.argmin())
        stood = products[best]
        temperatures.append(float(CANDIDATES[best]))
    return temperatures


def error(logits: Tensor, alphas: Tensor) -> float:  # (N, S), (N, S)
    """Mean over slots of the products' expected calibration error."""
    products, actual = logits.sigmoid().cumprod(-1), alphas.cumprod(-1)
    errors = [expected_calibration_error(*one) for one in zip(products.T[:, None], actual.T, strict=True)]
    return float(torch.stack(errors).mean())


def expected_calibration_error(predicted: Tensor, actual: Tensor) -> Tensor:  # (C, N), (N,) -> (C,)
    """Of C predictors: the mean over events of |mean prediction - mean outcome| of their bin. Outcomes are chances
    rather than throws, which have the same mean and more noise."""
    bins = (predicted * BINS).long().clamp(max=BINS - 1)
    off = torch.zeros(len(predicted), BINS, dtype=predicted.dtype).scatter_add(1, bins, predicted - actual)
    return off.abs().sum(-1) / predicted.shape[-1]
