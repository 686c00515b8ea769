"""The tensors of a published folder by name; values are read when they are asked for, and written as safetensors.

Read are safetensors, and of pickled files those that such folders are known to hold, as weights alone: no program in
them is run."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from decode.common.errors import InputError
from decode.models.checkpoint_files import checkpoint_files, damaged

PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt")
"""Native EAGLE-3 (yuhuili) and Medusa (FasterDecoding)."""
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_BROKEN = (pickle.UnpicklingError, EOFError, OSError, RuntimeError, ValueError, LookupError, AttributeError, TypeError)
"""What torch.load raises of files that are cut short, or hold more than tensors."""


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies, and what its file says of it."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of the files that are read; InputError where there are none, and for damaged ones."""
    found: dict[str, Stored] = {}
    for file in files_of(folder):
        for name, one in _header(file).items():
            if name in found:
                raise InputError(
                    f"{name} lies in {found[name].file.name} and in {file.name} of {folder}; engines read "
                    "both, and keep the last one. Take one file away"
                )
            found[name] = one
    return found


def names_in(folder: Path) -> set[str]:
    """What the tensors are called, of whatever types they are; nothing where there are none, or the files are damaged,
    which is told by who reads them."""
    try:
        return {name for file in files_of(folder) for name in _names(file)}
    except (InputError, SafetensorError):
        return set()


def files_of(folder: Path) -> list[Path]:
    """Those of an index, or all *.safetensors, or a pickled file of known name."""
    if any((folder / name).is_file() for name in INDICES):
        return checkpoint_files(folder, "draft")
    files = sorted(folder.glob("*.safetensors")) or [folder / name for name in PICKLED if (folder / name).is_file()]
    if files:
        return files
    there = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    raise InputError(
        f"{folder} holds no *.safetensors and none of {', '.join(PICKLED)} (there: "
        f"{', '.join(there) or 'no weights'}). A pickled file of another name may hold a program; convert it where "
        "you trust it, or fetch the folder again"
    )


def tensor_of(name: str, stored: Stored) -> Tensor:
    """Its values, read now."""
    if stored.file.suffix != ".safetensors":
        return pickled(stored.file)[name]
    try:
        with safe_open(str(stored.file), "pt") as tensors:
            return tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise InputError(damaged(str(stored.file.parent), error, stored.file)) from error


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """As safetensors, readable for whoever reads the files beside it: the library's own are for their owner alone, and
    a server under another account could not load them."""
    save_file(dict(tensors), file, metadata={"format": "pt"})
    beside = file.parent / "config.json"
    file.chmod(beside.stat().st_mode)


def pickled(file: Path) -> dict[str, Tensor]:
    """The tensors of a pickled file, mapped into memory where it is one of torch 1.6 or later; others are not kept."""
    return _mapped(file, file.stat().st_mtime_ns) if _is_archive(file) else _tensors(file)


def read_pickle(file: Path) -> Any:
    """What a pickled file holds: tensors, numbers and texts, since no program in it is run; InputError for a damaged
    one, and for one that holds more."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=_is_archive(file))
    except _BROKEN as error:
        raise InputError(damaged(str(file.parent), error, file)) from error


def _is_archive(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(2) == b"PK"


@lru_cache(maxsize=1)
def _mapped(file: Path, changed: int) -> dict[str, Tensor]:
    return _tensors(file)


def _tensors(file: Path) -> dict[str, Tensor]:
    held = read_pickle(file)
    if not isinstance(held, dict) or not all(
        isinstance(name, str) and isinstance(one, Tensor) for name, one in held.items()
    ):
        raise InputError(
            f"{file} holds no tensors by name, as the weights of a head are saved; it may be a checkpoint of a "
            "training. Save the state_dict of the head itself"
        )
    return held


def _names(file: Path) -> list[str]:
    if file.suffix != ".safetensors":
        return list(pickled(file))
    with safe_open(str(file), "pt") as tensors:
        return list(tensors.keys())


def _header(file: Path) -> dict[str, Stored]:
    if file.suffix != ".safetensors":
        return {name: Stored(file, tuple(one.shape), one.dtype) for name, one in pickled(file).items()}
    try:
        with safe_open(str(file), "pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InputError(damaged(str(file.parent), error, file)) from error
    kinds = {name: one.get_dtype() for name, one in slices.items()}
    unknown = sorted({*kinds.values()} - {*DTYPES})
    if unknown:
        raise InputError(
            f"{file} holds tensors of type {', '.join(unknown)}, which is quantised or no weight at all; read are "
            f"{', '.join(DTYPES)}. Give the folder as it was before it was quantised"
        )
    return {name: Stored(file, tuple(one.get_shape()), DTYPES[kinds[name]]) for name, one in slices.items()}
