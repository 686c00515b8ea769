"""Responses kept on disk, so that a killed run does not write them again, and a later phase need not hold them all."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated

from pydantic import Field

from decode.common.checked_json import Content, JsonFile
from distill.records.record_manifest import FinishReason
from distill.responses import Response, Sampler


class KeptResponse(Content):
    """One of a call."""

    ids: list[Annotated[int, Field(ge=0)]]
    finish_reason: FinishReason


CALL = JsonFile(list[KeptResponse], "records would hold other texts than the target wrote", "Delete the file.")


def kept_responses(sampler: Sampler, folder: Path) -> Sampler:
    """`sampler`, whose answer to each call is written to `folder` once, and read from there when it is asked again."""

    def sample(prompts: list[list[int]], rows: list[int], seed: int) -> list[Response]:
        name = hashlib.sha256(json.dumps([prompts, rows, seed]).encode()).hexdigest()
        file = folder / f"{name}.json"
        if not file.is_file():
            answer = sampler(prompts, rows, seed)
            folder.mkdir(parents=True, exist_ok=True)
            CALL.write(file, [{"ids": one.ids, "finish_reason": one.finish_reason} for one in answer])
        return [Response(one.ids, one.finish_reason) for one in CALL.read(file)]

    return sample
