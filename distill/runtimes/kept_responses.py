"""Responses kept on disk, so that a killed run does not write them again, and a later phase need not hold them all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from decode.common.checked_json import write_atomically
from distill.records.feature_codes import Shapes
from distill.records.record_shards import FINISH_REASONS
from distill.records.safetensors_file import open_arrays
from distill.responses import OnResponse, Response, Sampler, ignored

REMEDY = "Delete it, and the run writes these responses again"


@dataclass(frozen=True)
class KeptResponses:
    """The answers to calls of a sampler, a file in `folder` each. Threads and runs may share it."""

    folder: Path
    rows_of_p: Shapes = field(default_factory=dict)
    """Arrays of p that come with them, of the tokens that it is known of."""

    def get(self, prompts: list[list[int]], rows: list[int], seed: int) -> list[Response] | None:
        """The answer to a call, None where there is none yet. Raises InputError for a file that is damaged."""
        file = self._file(prompts, rows, seed)
        return _unpacked(file, len(prompts), self.rows_of_p) if file.is_file() else None

    def put(self, prompts: list[list[int]], rows: list[int], seed: int, answer: list[Response]) -> None:
        """Keep it, all of it or nothing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file(prompts, rows, seed), _packed(answer, self.rows_of_p))

    def _file(self, *call: object) -> Path:
        return self.folder / f"{hashlib.sha256(json.dumps(call).encode()).hexdigest()}.safetensors"


def kept_responses(sampler: Sampler, folder: Path, shard_size: int) -> Sampler:
    """`sampler`, whose answers are written to `folder` once, a file for each shard, and read from there when they are
    asked for again. One call may be about several shards, and another one about some of them."""
    kept = KeptResponses(folder)

    def sample(
        prompts: list[list[int]], rows: list[int], seed: int, on_response: OnResponse = ignored
    ) -> list[Response]:
        shards: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            shards.setdefault(row // shard_size, []).append(place)
        calls = {shard: (_at(prompts, places), _at(rows, places), seed) for shard, places in shards.items()}
        found = {shard: kept.get(*call) for shard, call in calls.items()}
        left = [place for shard, places in shards.items() if found[shard] is None for place in places]
        left.sort()  # in the order of the call
        written = dict(zip(left, sampler(_at(prompts, left), _at(rows, left), seed) if left else (), strict=True))
        answers: dict[int, Response] = {}
        for shard, places in shards.items():
            answer = found[shard]
            if answer is None:
                answer = _at(written, places)
                kept.put(*calls[shard], answer)
            answers |= zip(places, answer, strict=True)
        for place in range(len(prompts)):
            on_response(place, answers[place], None)
        return _at(answers, range(len(prompts)))

    return sample


def _at(values: Any, places: Iterable[int]) -> list[Any]:
    return [values[place] for place in places]


def _packed(responses: Sequence[Response], rows_of_p: Shapes) -> bytes:
    arrays = {
        "ids": np.array([token for one in responses for token in one.ids], np.int32),
        "lengths": np.array([len(one.ids) for one in responses], np.int64),
        "reasons": np.array([FINISH_REASONS.index(one.finish_reason) for one in responses], np.uint8),
        "passes": np.array([-1 if one.passes is None else one.passes for one in responses], np.int64),
    }
    if rows_of_p:
        arrays["has_p"] = np.concatenate([one.has_p for one in responses if one.has_p is not None]).astype(np.uint8)
    for name, (shape, dtype) in rows_of_p.items():
        rows = [one.payload[name] for one in responses]
        arrays[name] = np.concatenate([np.empty((0, *shape), dtype), *rows]).astype(dtype, copy=False)
    return save(arrays)


def _unpacked(file: Path, count: int, rows_of_p: Shapes) -> list[Response]:
    shapes: Shapes = {
        "ids": ((-1,), np.dtype(np.int32)),
        "lengths": ((count,), np.dtype(np.int64)),
        "reasons": ((count,), np.dtype(np.uint8)),
        "passes": ((count,), np.dtype(np.int64)),
    }
    of_p: Shapes = {name: ((-1, *shape), dtype) for name, (shape, dtype) in rows_of_p.items()}
    marks: Shapes = {"has_p": ((-1,), np.dtype(np.uint8))} if rows_of_p else {}
    arrays = open_arrays(file, shapes | marks | of_p, REMEDY)
    ids, lengths, reasons, passes = (arrays.get_tensor(name) for name in shapes)
    counted = [None if one < 0 else one for one in passes.tolist()]
    found = [
        Response(one.tolist(), FINISH_REASONS[code], took)
        for one, code, took in zip(_each(ids, lengths), reasons, counted, strict=True)
    ]
    if not rows_of_p:
        return found
    has_p = _each(arrays.get_tensor("has_p").astype(bool), lengths)
    rows = {name: _each(arrays.get_tensor(name), [mark.sum() for mark in has_p]) for name in of_p}
    return [
        replace(one, has_p=mark, payload={name: rows[name][place] for name in rows})
        for place, (one, mark) in enumerate(zip(found, has_p, strict=True))
    ]


def _each(values: np.ndarray, lengths: Sequence[int] | np.ndarray) -> list[np.ndarray]:
    """Those of one response after another."""
    return np.split(values, np.cumsum(lengths)[:-1])
