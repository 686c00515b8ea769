"""The files that hold a checkpoint's weights, and what their headers say: names and shapes, and no value is read."""

from __future__ import annotations

import pickle
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor
from transformers.modeling_utils import load_state_dict

from decode.common.checked_json import read_json
from decode.common.errors import InputError

KINDS = ("*.safetensors", "pytorch_model*.bin")
NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""What transformers loads, in its order."""
DAMAGED = (SafetensorError, pickle.UnpicklingError, EOFError, OSError)
"""What files raise that are damaged or missing, and pickled ones that hold more than tensors."""


def read_headers(folder: Path, role: str) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by name, on the meta device; InputError for files that are missing or damaged, or
    that hold anything but tensors. A pickled file is read as weights alone: no program in it is run."""
    tensors: dict[str, Tensor] = {}
    for file in checkpoint_files(folder, role):
        try:
            found = load_state_dict(file, map_location="meta", weights_only=True)
        except (*DAMAGED, ValueError, KeyError, IndexError, AttributeError, TypeError, RuntimeError) as error:
            raise InputError(damaged(f"{role}.path={folder}", error, file)) from error
        if not isinstance(found, dict) or not all(isinstance(one, Tensor) for one in found.values()):
            raise InputError(
                f"{file} of {role}.path={folder} holds no tensors by name, as the weights of a model are saved; it may "
                "be a training checkpoint. Save the model itself with save_pretrained"
            )
        tensors |= found
    return tensors


def checkpoint_files(folder: Path, role: str) -> list[Path]:
    """The files that transformers reads; InputError where there are none by its names, or an index names others."""
    first = next((folder / name for name in NAMES if (folder / name).is_file()), None)
    if first is None:
        there = sorted(file.name for kind in ("*.safetensors", "*.bin") for file in folder.glob(kind))
        raise InputError(
            f"{role}.path={folder} holds a config.json but no weights that transformers would load "
            f"(there: {', '.join(there) or 'none'}; read are {', '.join(NAMES)}). Save the model in transformers format"
        )
    if first.suffix != ".json":
        return [first]
    index = read_json(first)
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise InputError(f"{first} has no weight_map that says in which file a tensor lies; copy it again")
    files = [folder / name for name in sorted(set(names.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise InputError(
            f"{role}.path={folder} lacks {', '.join(missing[:3])}, {len(missing)} of the {len(files)} files of weights "
            f"that {first.name} names: what they hold would be random numbers. Copy the folder again"
        )
    return files


def weight_files(folder: Path) -> list[Path]:
    """Every file of weights, whether transformers reads it or not."""
    return sorted(file for pattern in KINDS for file in folder.glob(pattern))


def damaged(which: str, error: Exception, file: Path | None = None) -> str:
    """What to say of weights that cannot be read."""
    reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    if isinstance(error, pickle.UnpicklingError):
        return (
            f"the weights of {which} cannot be read{f' from {file.name}' if file else ''} as tensors alone: a pickled "
            "file may hold a program, or be damaged, and nothing of it was run. Fetch it again, or convert it to "
            f"safetensors where you trust it ({reason})"
        )
    where = f"{file.name} cannot be read" if file else "they cannot be read"
    return f"the weights of {which} are damaged or missing: {where} ({reason}). Fetch them again"
