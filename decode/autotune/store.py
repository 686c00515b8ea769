"""What is known of a target and a draft on one machine, kept beside the draft: acceptance by depth and rank, and
costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from weakref import WeakKeyDictionary

import torch
from pydantic import Field, model_validator
from torch import nn
from transformers import PreTrainedModel

from decode.common.checked_json import Content, JsonFile, Share, read_json, shown
from decode.common.environment import environment
from decode.common.errors import InputError
from decode.common.progress import get_logger
from decode.common.sealed import SEAL, check_seal, sealed
from decode.drafters.base import Drafter
from decode.drafters.head_draft import HeadDraft
from decode.drafters.lm import LMDraft
from decode.models.adapters import has_adapter_on
from decode.models.fingerprint import files_fingerprint
from decode.models.load import describe_loaded
from decode.trees.sequoia import RoundCosts

if TYPE_CHECKING:
    from decode.requests import Request

log = get_logger("decode")

FILE = "calibration.json"
SCHEMA = 2
Key = dict[str, Any]
"""What a calibration depends on, as plain JSON values."""
_fingerprints: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


@dataclass(frozen=True)
class PairCalibration:
    """One entry of the file."""

    profile: Annotated[list[Annotated[list[Share], Field(min_length=1)]], Field(min_length=1)]
    """P(the b-th candidate of a node at depth d is the one that stands, if the node does); one row for all depths where
    they are alike."""
    costs: RoundCosts


@dataclass(frozen=True)
class Entry:
    """What was measured, and of what."""

    key: Key
    calibration: PairCalibration


class Head(Content):
    """What every version of the file begins with."""

    version: int = Field(alias="schema")


class Calibrations(Head):
    """calibration.json."""

    calibrations: list[Entry]

    @model_validator(mode="after")
    def _has_plain_decoding(self) -> Calibrations:
        for known in (one.calibration for one in self.calibrations):
            if 1 not in known.costs.t_target:
                raise ValueError("costs.t_target should begin with plain decoding, which speedups are over")
        return self


HEAD = JsonFile(Head, "a plan would be chosen by costs that nobody measured", "Delete it: it is measured anew.")
CALIBRATIONS = JsonFile(Calibrations, HEAD.why, HEAD.remedy)


def key_of(target: Key, draft: Key, request: Request, batch_size: int) -> Key:
    """Both models (`model_key`), the machine, the rule and the distribution."""
    return {
        "target": target,
        "draft": draft,
        "batch_size": batch_size,
        "verifier": request.verifier,
        "replacement": request.replacement,
        "sampling": asdict(request.sampling),
        "threads": torch.get_num_threads(),
    }


def model_key(fingerprint: str, dtype: torch.dtype, device: torch.device) -> Key:
    """A model's weights, precision and device."""
    return {"fingerprint": fingerprint, "dtype": str(dtype).removeprefix("torch."), "device": _device_name(device.type)}


@cache
def _device_name(kind: str) -> str:
    machine = environment()
    return machine["cuda_device"] if kind == "cuda" else machine["cpu"]


def pair_key(model: PreTrainedModel, drafter: Drafter, request: Request, batch_size: int) -> Key:
    """The key of two loaded models."""
    target = loaded_key(model, model.config.name_or_path, lambda: describe_loaded(model).identity)
    if not isinstance(drafter, LMDraft | HeadDraft):
        return key_of(target, {"fingerprint": f"object {id(drafter)}"}, request, batch_size)
    source = drafter.source
    draft = loaded_key(drafter, source, lambda: _draft_fingerprint(drafter))
    return key_of(target, draft, request, batch_size)


def _draft_fingerprint(drafter: LMDraft | HeadDraft) -> str:
    """Of its files, whether or not it was trained for the target that it serves."""
    if isinstance(drafter, HeadDraft):
        return files_fingerprint(Path(drafter.source))
    return describe_loaded(drafter.model).identity


def loaded_key(model: PreTrainedModel | LMDraft | HeadDraft, source: str | None, fingerprint: Callable[[], str]) -> Key:
    """A model that came from nowhere, or has an adapter on, is known by its place in memory. Files are read once: every
    call asks."""
    if isinstance(model, PreTrainedModel) and has_adapter_on(model):
        return model_key(f"object {id(model)} with an adapter", model.dtype, model.device)
    if model not in _fingerprints:
        _fingerprints[model] = fingerprint() if source else f"object {id(model)}"
    return model_key(_fingerprints[model], model.dtype, model.device)


def folder_beside(drafter: Drafter, key: Key) -> Path | None:
    """Where the file lies: the folder that the draft was loaded from; None where there is none, or where one of the
    models came from nowhere."""
    folder = Path(drafter.source if isinstance(drafter, LMDraft | HeadDraft) else "")
    nameless = any(key[one]["fingerprint"].startswith("object ") for one in ("target", "draft"))
    return None if nameless or not folder.is_dir() else folder


def load_calibration(folder: Path, key: Key) -> PairCalibration | None:
    """The entry of `key` in the folder's file, if there is one; raises InputError for a damaged file."""
    found = [one for one in _entries(folder) if one.key == key]
    return found[0].calibration if found else None


def save_calibration(folder: Path, key: Key, calibration: PairCalibration) -> None:
    """Write or replace the entry; a folder that cannot be written to only warns, since nothing but time is lost."""
    others = [one for one in _entries(folder) if one.key != key]
    entries = [asdict(one) for one in (*others, Entry(key, calibration))]
    try:
        CALIBRATIONS.write(folder / FILE, sealed({"schema": SCHEMA, "calibrations": entries}))
    except OSError as error:
        log.warning(
            "the calibration cannot be kept in %s (%s): it will be measured anew by the next process. Make the folder "
            "writable, or name the plan: decode.tree=chain", folder, error.strerror,
        )  # fmt: skip


def _entries(folder: Path) -> list[Entry]:
    """Those of this schema; InputError for a damaged file, and for two entries of one key."""
    file = folder / FILE
    if not file.is_file() or HEAD.read(file).version != SCHEMA:
        return []
    content = read_json(file)
    if SEAL in content:  # the first files of this schema have none
        check_seal(content, file, HEAD)
    found = CALIBRATIONS.read(file).calibrations
    twice = next((one.key for n, one in enumerate(found) if one.key in [before.key for before in found[:n]]), None)
    if twice is not None:
        raise InputError(f"{file} holds two calibrations of {shown(twice)}: {HEAD.why}. {HEAD.remedy}")
    return found
