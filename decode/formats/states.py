"""Which of the target's hidden states a published head reads. Lists of two conventions are in use: indices of
transformers' `hidden_states` (0 the embeddings), and the layers that those come out of, one less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from decode.common.errors import InputError
from decode.formats.folder import PublishedFolder

LISTS = (
    ("eagle_aux_hidden_state_layer_ids", 0),
    ("aux_hidden_state_layer_ids", 0),
    ("eagle_config.eagle_aux_hidden_state_layer_ids", 1),
    ("target_layer_ids", 1),
    ("dflash_config.target_layer_ids", 1),
    ("dspark_config.target_layer_ids", 1),
)
"""Where states may be listed, and what is added to give indices of `hidden_states`."""


def listed(fields: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Each list that config.json holds, as indices of `hidden_states`."""
    found = {}
    for name, offset in LISTS:
        where = fields
        *nested, last = name.split(".")
        for key in nested:
            where = where.get(key) or {}
        if where.get(last):
            found[name] = tuple(one + offset for one in where[last])
    return found


def taps_of(folder: PublishedFolder) -> tuple[int, ...] | None:
    """The states by all lists, ascending, as engines hand them over; None where there is none. InputError where lists
    differ."""
    found = listed(folder.fields)
    taps = {name: tuple(sorted(ids)) for name, ids in found.items()}
    if len(set(taps.values())) > 1:
        told = "; ".join(f"{name} means {list(ids)}" for name, ids in taps.items())
        raise InputError(
            f"{folder.path}/config.json lists different hidden states of the target (0 the embeddings): {told}. Write "
            "the ones that it was trained on in every list"
        )
    return next(iter(taps.values()), None)


def lists(taps: Sequence[int], *names: str) -> dict[str, list[int]]:
    """The states as they are written in the lists of those names, by their last part."""
    offsets = dict(LISTS)
    return {name.rpartition(".")[2]: [tap - offsets[name] for tap in sorted(taps)] for name in names}


def ascending(weight: Tensor, taps: Sequence[int]) -> Tensor:
    """What reads the states of all taps side by side (..., n * d), in the order in which engines hand them over: that
    of the target's layers."""
    order = sorted(range(len(taps)), key=taps.__getitem__)
    return weight.unflatten(-1, (len(taps), -1))[..., order, :].flatten(-2).contiguous()
