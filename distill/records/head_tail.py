"""A sparse estimate of p in tens of bytes a token: exact head, sampled tail, log p in 12 bits.

For distributions p over tokens, with head H (the K likeliest tokens) and tail mass 1 - a, p_hat_i = p_i on H and
(1 - a) c_i / M for M draws from p / (1 - a). E[p_hat] = p, so every sum_i p_hat_i f(p_i, q_i) is unbiased: forward KL
needs p_hat, and alpha = sum_i p_hat_i min(1, q_i / p_i) needs the exact log p of each kept token besides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CODES_PER_NAT = 102  # half a step of log p is then 0.0049: 0.49 % of p
ABSENT = 4095  # the largest 12-bit code: p below exp(-40), which no estimate can feel


@dataclass(frozen=True)
class SparseRecord:
    """Coded rows as they lie on disk."""

    ids: np.ndarray
    """(R, S) token ids in `pack_ids` form: K head entries by falling p, then M tail draws (repeats are counts)."""
    codes: np.ndarray
    """(R, bytes) packed 12-bit codes of S log p and, with a tail, of the log tail mass."""


def encode(log_p: Tensor, head: int, uniforms: Tensor | None) -> SparseRecord:  # (R, V), (R, M) in [0, 1)
    """Code rows of log p: `head` likeliest tokens and one tail draw for each uniform (none for None).

    Holds as much as four (R, V) tensors at once.
    """
    vocab_size = log_p.shape[-1]
    head_log_p, head_ids = log_p.topk(min(head, vocab_size), dim=-1)
    if uniforms is None:
        return packed(head_ids, head_log_p, vocab_size)
    tail_ids, tail_mass = draw_tail(log_p, head_ids, uniforms)
    ids = torch.cat([head_ids, tail_ids], -1)
    kept = torch.cat([head_log_p, log_p.gather(-1, tail_ids), tail_mass.log().unsqueeze(-1)], -1)
    return packed(ids, kept, vocab_size)


def packed(ids: Tensor, kept: Tensor, vocab_size: int) -> SparseRecord:  # (R, S), (R, C)
    """Rows as they lie on disk; `kept` are log p, and with a tail its log mass."""
    return SparseRecord(pack_ids(_numpy(ids), vocab_size), pack_codes(_numpy(code(kept))))


def decode(record: SparseRecord, head: int, tail: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids (R, S) int64, log p (R, S), p_hat (R, S)) of coded rows; p_hat is 0 where an entry says nothing."""
    ids = torch.from_numpy(unpack_ids(record.ids))
    head = ids.shape[-1] - tail
    codes = torch.from_numpy(unpack_codes(record.codes))
    log_p = codes[:, : head + tail] / -float(CODES_PER_NAT)
    weight = log_p.exp()
    if tail:
        mass = (codes[:, head + tail] / -float(CODES_PER_NAT)).exp()
        weight[:, head:] = mass.unsqueeze(-1) / tail
    return ids, log_p, weight.masked_fill(codes[:, : head + tail] == ABSENT, 0.0)


def draw_tail(log_p: Tensor, head_ids: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """M draws from p outside the head by inverting its cumulative sum: ids (R, M) and the tail's mass (R,)."""
    reached = running_sum(log_p.exp().scatter_(-1, head_ids, 0.0))
    mass = reached[:, -1].contiguous()
    below = torch.nextafter(mass, torch.zeros_like(mass))  # a rounded-up product must not pass the end
    wanted = torch.minimum((uniforms * mass.unsqueeze(-1).double()).to(mass.dtype), below.unsqueeze(-1))
    ids = torch.searchsorted(reached, wanted, right=True)  # right: an entry of mass 0 is never the first one past
    return ids.clamp_max(log_p.shape[-1] - 1), mass


def running_sum(p: Tensor) -> Tensor:  # (R, V) -> (R, V)
    """cumsum(-1) of what is not below 0, rounded once, to the same bits on every device and in every run; it never
    falls. A float cumsum on a GPU adds in an order of its own, by whichever block is first; whole numbers add up alike
    in any. A row's sum lies between 2**60 and 2**61 of them, so that 2**17 entries lose 2**-43 of it."""
    sums = p.sum(-1, keepdim=True)
    shift = 61 - torch.frexp(sums).exponent.clamp_min(-60)  # 2**shift must be finite in fp32
    unit = torch.ones_like(sums).ldexp(-shift)
    counts = (p / unit).long().cumsum_(-1)  # a power of two changes no digit
    return counts.to(p.dtype).mul_(unit)


def code(log_p: Tensor) -> Tensor:
    """The 12-bit code of log p, to 0.5 % of p; ABSENT below exp(-40)."""
    return (log_p * -CODES_PER_NAT).round().clamp(0, ABSENT).to(torch.int32)


def pack_codes(codes: np.ndarray) -> np.ndarray:  # (R, C) -> (R, 3 * ceil(C / 2)) uint8
    """Two 12-bit codes in three bytes."""
    padded = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2))).astype(np.uint16)
    first, second = padded[:, 0::2], padded[:, 1::2]
    triples = np.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], -1)
    return triples.reshape(len(codes), 3 * triples.shape[1]).astype(np.uint8)


def unpack_codes(packed: np.ndarray) -> np.ndarray:  # (R, bytes) uint8 -> (R, C) int32; C is even
    """What `pack_codes` packed, with the padding code of an odd C at the end."""
    triples = packed.reshape(len(packed), packed.shape[1] // 3, 3).astype(np.int32)  # of no rows -1 says nothing
    first = triples[..., 0] << 4 | triples[..., 1] >> 4
    second = (triples[..., 1] & 15) << 8 | triples[..., 2]
    return np.stack([first, second], -1).reshape(len(packed), 2 * first.shape[1])


def id_width(vocab_size: int) -> int:
    """Bytes of a token id on disk."""
    return 2 if vocab_size <= 1 << 16 else 3


def pack_ids(ids: np.ndarray, vocab_size: int) -> np.ndarray:  # (...) -> (...) uint16 or (..., 3) uint8
    """Ids as uint16, or as three bytes where the vocabulary has more than 65,536 entries."""
    if id_width(vocab_size) == 2:
        return ids.astype(np.uint16)
    return np.ascontiguousarray(ids.astype("<u4")[..., None].view(np.uint8)[..., :3])


def unpack_ids(packed: np.ndarray) -> np.ndarray:  # -> (...) int64
    """What `pack_ids` packed."""
    if packed.dtype == np.uint16:
        return packed.astype(np.int64)
    wide = packed.astype(np.int64)
    return wide[..., 0] | wide[..., 1] << 8 | wide[..., 2] << 16


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.cpu().numpy()
