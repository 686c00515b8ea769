"""Responses kept on disk, so that a killed run does not write them again, and a later phase need not hold them all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from decode.common.checked_json import write_atomically
from distill.records.record_shards import FINISH_REASONS
from distill.records.safetensors_file import open_arrays
from distill.responses import Response, Sampler

REMEDY = "Delete it, and the run writes these responses again"


def kept_responses(sampler: Sampler, folder: Path) -> Sampler:
    """`sampler`, whose answer to each call is written to `folder` once, and read from there when it is asked again."""

    def sample(prompts: list[list[int]], rows: list[int], seed: int) -> list[Response]:
        name = hashlib.sha256(json.dumps([prompts, rows, seed]).encode()).hexdigest()
        file = folder / f"{name}.safetensors"
        if not file.is_file():
            answer = sampler(prompts, rows, seed)
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(file, _packed(answer))
        return _unpacked(file, len(prompts))

    return sample


def _packed(responses: Sequence[Response]) -> bytes:
    arrays = {
        "ids": np.array([token for one in responses for token in one.ids], np.int32),
        "lengths": np.array([len(one.ids) for one in responses], np.int64),
        "reasons": np.array([FINISH_REASONS.index(one.finish_reason) for one in responses], np.uint8),
        "passes": np.array([-1 if one.passes is None else one.passes for one in responses], np.int64),
    }
    return save(arrays)


def _unpacked(file: Path, count: int) -> list[Response]:
    shapes = {
        "ids": ((-1,), np.dtype(np.int32)),
        "lengths": ((count,), np.dtype(np.int64)),
        "reasons": ((count,), np.dtype(np.uint8)),
        "passes": ((count,), np.dtype(np.int64)),
    }
    arrays = open_arrays(file, shapes, REMEDY)
    ids, lengths, reasons, passes = (arrays.get_tensor(name) for name in shapes)
    each = np.split(ids, np.cumsum(lengths)[:-1])
    counted = [None if one < 0 else one for one in passes.tolist()]
    return [
        Response(one.tolist(), FINISH_REASONS[code], took)
        for one, code, took in zip(each, reasons, counted, strict=True)
    ]
