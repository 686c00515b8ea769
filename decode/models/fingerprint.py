"""Which weights a folder holds, and which a model in memory has, whose files may say something else by now."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from decode.common.checked_json import read_json
from decode.models.adapters import plain_names
from decode.models.checkpoint_files import published_files, weight_files
from decode.models.quantisation.quantised import method_of, scheme_of
from decode.models.weight_counts import empty_model

EDGE_BYTES = 1 << 20  # read at both ends of a weight file: cheap for 100 GB, blind to nothing real
PLACES = 16  # of a tensor, spread over it
NEIGHBOURS = 16  # values at each: they lie on one page, which a file that is mapped into memory reads whole
STRIDE = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, whose multiples fill an interval evenly
PLAIN, HALF = "bfloat16", "float16"


def files_fingerprint(folder: Path) -> str:
    """Hash of config.json and of the edges of each weight file; of a GGUF file, whatever its name, its edges."""
    if folder.is_file():
        return hashlib.sha256(_edges(folder)).hexdigest()
    digest = hashlib.sha256(_canonical_config(folder))
    for file in (*weight_files(folder), *published_files(folder)):
        digest.update(file.name.encode() + _edges(file))
    return digest.hexdigest()


def weights_fingerprint(model: PreTrainedModel) -> str | None:
    """KIND:HASH over name, shape and 256 values of every tensor; None where not all weights are in this process.

    Values are rounded to bfloat16, as loading rounds them, so that device and precision do not matter (kind PLAIN).
    float16 rounds otherwise and is a kind of its own, and so is every method of quantisation, of which the tensors
    count that stay in floating point of 16 bits or more. 8B parameters on a CPU: 14 ms of one core.
    """
    weights, method = _weights(model), _quantisation(model)
    sampled = {name: one for name, one in weights.items() if _is_sampled(one)}
    whole = method is not None or all(map(_is_plain, weights.values()))
    if not whole or any(one.is_meta or not one.numel() for one in sampled.values()):
        return None
    kind = method or (HALF if any(one.dtype == torch.float16 for one in sampled.values()) else PLAIN)
    return _fingerprint(kind, sampled)


def stored_fingerprint(folder: Path, config: PretrainedConfig) -> str | None:
    """`weights_fingerprint` of the model in `folder`, told from the pages of its safetensors that hold the sample; None
    where these are not the model's tensors by name and shape: there they are merged or unpacked in loading."""
    wanted = {name: one.shape for name, one in _weights(empty_model(config)).items() if _is_sampled(one)}
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), "pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in sorted(wanted.keys() & set(tensors.keys()))}
    if method_of(config) is not None or wanted != {name: one.shape for name, one in found.items()}:
        return None
    return _fingerprint(PLAIN, {name: found[name] for name in wanted})


def comparable(one: str | None, other: str | None) -> bool:
    """Whether two fingerprints of the same files would be equal."""
    return one is not None and other is not None and one.partition(":")[0] == other.partition(":")[0]


def same_values(one: str | None, other: str | None) -> bool:
    """Whether two fingerprints are of the same unquantised weights, one of them loaded in float16 maybe: what is
    sampled is rounded to bfloat16 in both."""
    parts = [(each or "").partition(":") for each in (one, other)]
    return all(kind in (PLAIN, HALF) for kind, _, _ in parts) and parts[0][2] == parts[1][2]


def changed_since_read(model: PreTrainedModel, folder: Path) -> list[str]:
    """Names of tensors in memory whose sample is not that of the tensor of this name and shape in the folder's
    safetensors; what transformers renamed or merged, and what float16 rounds, is not compared."""
    here = {name: one for name, one in _weights(model).items() if _is_sampled(one) and not one.is_meta}
    changed = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), "pt") as tensors:
            for name in sorted(here.keys() & set(tensors.keys())):
                ours, theirs = here[name], tensors.get_tensor(name)  # mapped: pages are read where the sample is
                halves = (ours.dtype == torch.float16) != (theirs.dtype == torch.float16)
                if ours.shape == theirs.shape and not halves and _samples([ours]) != _samples([theirs]):
                    changed.append(name)
    return changed


def _fingerprint(kind: str, weights: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for (name, one), values in zip(weights.items(), _samples([*weights.values()]), strict=True):
        digest.update(f"{name} {tuple(one.shape)}".encode() + values)
    return f"{kind}:{digest.hexdigest()[:32]}"


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name, tied ones once, by their first name; without adapters that are off."""
    state = plain_names(model, model.state_dict(keep_vars=True))
    first = {id(one): name for name, one in reversed(state.items())}
    return {name: one.detach() for name, one in state.items() if first[id(one)] == name}


def _is_sampled(tensor: Tensor) -> bool:
    return _is_plain(tensor) and tensor.is_floating_point() and tensor.itemsize > 1


def _quantisation(model: nn.Module) -> str | None:
    method = method_of(model.config)  # type: ignore[arg-type]
    return method if scheme_of(model.config) is None else f"torchao-{method}"  # type: ignore[arg-type]


def _is_plain(tensor: Tensor) -> bool:
    """Neither quantised storage nor a part of a tensor that is spread over processes."""
    return type(tensor) in (Tensor, nn.Parameter)


def _samples(tensors: list[Tensor]) -> list[bytes]:
    """One transfer a device, since each waits for it."""
    found: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for number, one in enumerate(tensors):
        values = one.take(_places(one.numel(), one.device)).to(torch.bfloat16)
        found.setdefault(one.device, []).append((number, values))
    samples: dict[int, bytes] = {}
    for pairs in found.values():
        together = torch.cat([values for _, values in pairs]).cpu().split([len(values) for _, values in pairs])
        samples |= {
            number: part.view(torch.int16).numpy().tobytes() for (number, _), part in zip(pairs, together, strict=True)
        }
    return [samples[number] for number in range(len(tensors))]


@lru_cache(maxsize=64)
def _places(size: int, device: torch.device) -> Tensor:
    """(n,) indices into a tensor of `size` values: all of a small one."""
    if size <= PLACES * NEIGHBOURS:
        return torch.arange(size, device=device)
    starts = [(number * STRIDE % 2**64) * (size - NEIGHBOURS) >> 64 for number in range(PLACES)]
    return (torch.tensor(starts)[:, None] + torch.arange(NEIGHBOURS)).flatten().to(device)


def _canonical_config(folder: Path) -> bytes:
    fields = read_json(folder / "config.json")
    fields.pop("transformers_version", None)
    return json.dumps(fields, sort_keys=True).encode()


def _edges(file: Path) -> bytes:
    size = file.stat().st_size
    with file.open("rb") as stream:
        first = stream.read(EDGE_BYTES)
        stream.seek(max(0, size - EDGE_BYTES))
        last = stream.read()
    return str(size).encode() + hashlib.sha256(first + last).digest()
