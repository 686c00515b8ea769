"""alpha from one pass of target and draft over text that the target wrote: no decoding, every position counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from decode.acceptance import expected_tau, greedy_agreement, overlap, windows
from decode.common.progress import progress
from decode.drafters.base import Batch, Step
from decode.models.output_head import OutputHead, head_of
from decode.sampling.warp import Sampling, log_probs

if TYPE_CHECKING:
    from eval.measure.continuations import Text

_LOGIT_ELEMENTS = 2**27
"""Most elements of one pass's logits that are held at a time."""


@dataclass(frozen=True)
class Alphas:
    """alpha at every new token of every text, by the text's row (its prompt's index)."""

    by_row: dict[int, np.ndarray]

    def sums(self, rows: Sequence[int], units: Sequence[str] | None = None) -> np.ndarray:  # (n, 2)
        """Per unit (per row, where none are given) that has new tokens: sum of alpha, number of tokens."""
        each: dict[object, np.ndarray] = {}
        for row, unit in zip(rows, units or rows, strict=True):
            if row in self.by_row:
                alpha = self.by_row[row]
                each[unit] = each.get(unit, np.zeros(2)) + (alpha.sum(), len(alpha))
        return np.array(list(each.values()), dtype=float).reshape(-1, 2)

    def expected_tau(self, k: int) -> float:
        """Tokens per target pass that k drafted tokens promise, from runs of consecutive alphas; NaN where all are
        shorter."""
        width = max((len(alpha) for alpha in self.by_row.values()), default=0)
        alpha, valid = torch.zeros(len(self.by_row), width), torch.zeros(len(self.by_row), width, dtype=torch.bool)
        for i, row in enumerate(self.by_row.values()):
            alpha[i, : len(row)] = torch.from_numpy(row)
            valid[i, : len(row)] = True
        return expected_tau(windows(alpha, valid, k))


@torch.inference_mode()
def measure_alpha(
    target: PreTrainedModel, drafters: Mapping[str, Any], texts: Sequence[Text], sampling: Sampling
) -> dict[str, Alphas]:
    """Per drafter, alpha(t) = sum_v min(p_v, q_v) at every new token, both distributions warped by `sampling`; at T=0
    whether argmaxes agree.

    One target pass serves all drafters. A draft is asked through its training face, which stands on the forward it
    serves from.
    """
    texts = [text for text in texts if text.new]
    found: dict[str, dict[int, np.ndarray]] = {name: {} for name in drafters}
    head = head_of(target)
    with progress(len(texts), "texts", f"alpha at T={sampling.temperature:g}") as bar:
        for part in _passes(texts, target.config.get_text_config().vocab_size):
            batch = _batch(part, target.device)
            hidden = _target_hidden(target, batch)
            for name, drafter in drafters.items():
                step = next(iter(drafter.unroll(batch)))
                found[name] |= _alpha_rows(head, hidden, step, part, sampling)
            bar.update(len(part))
    return {name: Alphas(rows) for name, rows in found.items()}


def _passes(texts: Sequence[Text], vocab_size: int) -> Iterator[Sequence[Text]]:
    longest = max((len(text.ids) for text in texts), default=1)
    size = max(1, _LOGIT_ELEMENTS // (longest * vocab_size))
    for start in range(0, len(texts), size):
        yield texts[start : start + size]


def _batch(texts: Sequence[Text], device: torch.device) -> Batch:
    """One text per row, padded on the right; only what the target wrote counts."""
    width = max(len(text.ids) for text in texts)
    ids, document = torch.zeros(len(texts), width, dtype=torch.long), torch.full((len(texts), width), -1)
    loss_mask = torch.zeros(len(texts), width, dtype=torch.bool)
    for i, text in enumerate(texts):
        ids[i, : len(text.ids)] = torch.tensor(text.ids)
        document[i, : len(text.ids)] = 0
        loss_mask[i, len(text.prompt) : len(text.ids)] = True
    positions = torch.arange(width).expand(len(texts), width).contiguous()
    return Batch(ids=ids, positions=positions, document=document, loss_mask=loss_mask).to(device)


def _target_hidden(target: PreTrainedModel, batch: Batch) -> torch.Tensor:  # (B, T, d)
    mask = (batch.document >= 0).long()
    out = target.base_model(input_ids=batch.ids, attention_mask=mask, position_ids=batch.positions, use_cache=False)
    return out.last_hidden_state


def _alpha_rows(
    head: OutputHead, hidden: torch.Tensor, step: Step, texts: Sequence[Text], sampling: Sampling
) -> dict[int, np.ndarray]:
    found = {}
    for i, text in enumerate(texts):
        valid = step.valid[i]
        rows = step.target_rows[i][valid] - i * hidden.shape[1]
        p, q = head(hidden[i, rows]), step.head(step.hidden[i, valid])
        found[text.row] = _alpha(p, q, sampling).double().cpu().numpy()
    return found


def _alpha(logits_p: torch.Tensor, logits_q: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    if sampling.is_greedy:
        return greedy_agreement(logits_p.float(), logits_q.float())
    return overlap(log_probs(logits_p, sampling), log_probs(logits_q, sampling))
