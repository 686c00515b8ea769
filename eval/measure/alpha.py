"""alpha from one pass of target and draft over text that the target wrote: no decoding, every position counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from decode.acceptance import greedy_agreement, overlap, windows
from decode.common.environment import device_of
from decode.common.progress import progress
from decode.drafters.base import Batch, Step, Trained
from decode.drafters.head_draft import HeadDraft
from decode.drafters.pard import PardDraft
from decode.models.hidden_states import Taps
from decode.models.output_head import OutputHead, head_of
from decode.models.structure import decoder_of
from decode.sampling.warp import Sampling, log_probs

if TYPE_CHECKING:
    from eval.measure.continuations import Text

_LOGIT_ELEMENTS = 2**27
"""Most elements of one pass's logits that are held at a time."""


@dataclass(frozen=True)
class Alphas:
    """alpha at every new token of every text, by the text's row (its prompt's index); of a draft that drafts a round's
    tokens otherwise than one by one at every drafted token, (rounds, depth), NaN where a round goes beyond the text."""

    by_row: dict[int, np.ndarray]

    def sums(self, rows: Sequence[int], units: Sequence[str] | None = None) -> np.ndarray:  # (n, 2)
        """Per unit (per row, where none are given) that has new tokens: sum of alpha, number of tokens."""
        each: dict[object, np.ndarray] = {}
        for row, unit in zip(rows, units or rows, strict=True):
            alpha = self.by_row.get(row, np.array([]))
            known = alpha[np.isfinite(alpha)]
            if len(known):
                each[unit] = each.get(unit, np.zeros(2)) + (known.sum(), len(known))
        return np.array(list(each.values()), dtype=float).reshape(-1, 2)

    def promised(self, k: int) -> dict[int, tuple[float, int]]:
        """Of every row how many tokens its rounds of k drafted tokens promise, and how many such rounds it has: runs of
        consecutive alphas, or a head's rounds, which end at its depth."""
        found = {}
        for row, alpha in self.by_row.items():
            if alpha.ndim == 2:
                rounds = torch.from_numpy(alpha[:, :k][np.isfinite(alpha[:, :k]).all(1)])
            else:
                known = torch.from_numpy(alpha)[None]
                rounds = windows(known, torch.ones_like(known, dtype=torch.bool), k)
            found[row] = (float(len(rounds) + rounds.double().cumprod(-1).sum()), len(rounds))
        return found

    @property
    def depth(self) -> int | None:
        """Tokens of a round; None of a draft that drafts one by one, and without texts."""
        return min((alpha.shape[1] for alpha in self.by_row.values() if alpha.ndim == 2), default=None)

    def expected_tau(self, k: int) -> float:
        """Tokens per target pass that k drafted tokens promise; NaN where all texts are shorter."""
        tokens, rounds = np.array([(0.0, 0), *self.promised(k).values()]).sum(0)
        return float(tokens / rounds) if rounds else float("nan")


@torch.inference_mode()
def measure_alpha(
    target: PreTrainedModel, drafters: Mapping[str, Any], texts: Sequence[Text], sampling: Sampling
) -> dict[str, Alphas]:
    """Per drafter, alpha(t) = sum_v min(p_v, q_v) at every new token, both distributions warped by `sampling`; at T=0
    whether argmaxes agree.

    One target pass serves all drafters, and gives heads the hidden states that they read. A draft is asked through its
    training face, which stands on the forward it serves from; a drafter that was not trained has none, and no alpha.
    """
    texts = [text for text in texts if text.new]
    found: dict[str, dict[int, np.ndarray]] = {name: {} for name in drafters}
    drafters = {name: drafter for name, drafter in drafters.items() if _unrolls(drafter)}
    if not drafters:
        return {name: Alphas({}) for name in found}
    head, taps = head_of(target), tuple({tap: None for one in drafters.values() for tap in _taps(one)})
    with progress(len(texts), "texts", f"alpha at T={sampling.temperature:g}") as bar:
        for part in _passes(texts, target.config.get_text_config().vocab_size):
            batch = _batch(part, device_of(target))
            hidden, states = _target_pass(target, batch, taps)
            for name, drafter in drafters.items():
                own = [states[tap] for tap in _taps(drafter)]
                steps = list(
                    drafter.unroll(
                        replace(
                            batch, features=torch.stack([one.to(batch.ids.device) for one in own], 2) if own else None
                        )
                    )
                )
                for i, text in enumerate(part):
                    each = [_step_alpha(head, hidden[i], step, i, sampling) for step in steps]
                    has_rounds = bool(drafter.taps) or len(each) > 1
                    found[name][text.row] = np.stack(each, 1) if has_rounds else each[0][np.isfinite(each[0])]
            bar.update(len(part))
    return {name: Alphas(rows) for name, rows in found.items()}


def _unrolls(drafter: Any) -> bool:
    """Whether its training face can be asked: not that of a PARD draft of unknown depth."""
    return isinstance(drafter, Trained) and not (isinstance(drafter, PardDraft) and drafter.masks.depth is None)


def _taps(drafter: Any) -> tuple[int, ...]:
    """Hidden states that its training face reads; an exit adapter's decoding face makes them itself."""
    return drafter.config.taps if isinstance(drafter, HeadDraft) else drafter.taps


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


def _target_pass(
    target: PreTrainedModel, batch: Batch, taps: Sequence[int]
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """The last hidden state (B, T, d), and those at `taps`."""
    mask = (batch.document >= 0).long()
    with Taps(target, taps) as seen:
        given = {"input_ids": batch.ids, "attention_mask": mask, "position_ids": batch.positions}
        out = decoder_of(target)(**given, use_cache=False)
    return out.last_hidden_state, dict(zip(taps, seen.each(), strict=True))


def _step_alpha(
    head: OutputHead, hidden: torch.Tensor, step: Step, row: int, sampling: Sampling
) -> np.ndarray:  # hidden (T, d) of the text in this row -> (M,)
    valid = step.valid[row]
    places = step.target_rows[row][valid] - row * len(hidden)
    logits_q = step.drafted(step.hidden[row, valid])
    alpha = _alpha(head(hidden[places.to(hidden.device)]).to(logits_q.device), logits_q, sampling, step.vocab)
    found = np.full(len(valid), np.nan)
    found[valid.cpu().numpy()] = alpha.double().cpu().numpy()
    return found


def _alpha(
    logits_p: torch.Tensor, logits_q: torch.Tensor, sampling: Sampling, vocab: torch.Tensor | None
) -> torch.Tensor:
    """Outside of a reduced draft vocabulary q is 0."""
    if vocab is not None:
        whole = torch.full_like(logits_p, float("-inf"), dtype=logits_q.dtype)
        logits_q = whole.index_copy(-1, vocab, logits_q)
    if sampling.is_greedy:
        return greedy_agreement(logits_p.float(), logits_q.float())
    return overlap(log_probs(logits_p, sampling), log_probs(logits_q, sampling))
