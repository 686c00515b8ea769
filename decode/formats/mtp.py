"""A target with its own MTP layer tuned: a copy of the target's folder in which that layer's tensors are the draft's,
so that an engine which knows such targets serves it as it serves the published one.

    mtp.fc.weight (d, 2d)                                over [embedding; final hidden state]
    mtp.pre_fc_norm_embedding.weight, ..._hidden.weight  norms of those two
    mtp.layers.0.*                                       one layer, named like the target's own
    mtp.norm.weight                                      last norm

Files of weights that hold none of these are hard links to the target's where that works (nobody edits such files in
place), and copies on another file system: a tuned layer costs the file that holds it and not the 60 GB of the target.
An extra file with a new index in place of the rewritten one would not do: vLLM reads all tensors of every file that the
index names, the old layer's too, and keeps whichever comes last.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode.common.checked_json import read_json
from decode.drafters.mtp import PARTS, QWEN, MTPConfig
from decode.drafters.saved_head import expected
from decode.formats.base import LAYER, Layout, Spec
from decode.formats.folder import completed

if TYPE_CHECKING:
    from decode.formats.source import Source

NEW = {"README.md"}
"""Files of the target's folder that the export has of its own."""
OTHER_WEIGHTS = {".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
"""Suffixes of files that hold the untuned layer once more."""


@dataclass(frozen=True)
class WholeTarget(Layout):
    """A target's folder."""

    def write(self, source: Source, folder: Path) -> None:
        """Everything that lies in the target's folder, with the layer's tensors replaced."""
        tuned = self.tensors(source)
        for file in sorted(Path(source.target.path).iterdir()):
            if not file.is_file() or file.name in NEW or file.suffix in OTHER_WEIGHTS:
                continue
            if file.suffix != ".safetensors":
                shutil.copyfile(file, folder / file.name)
            elif tuned.keys() & _names(file):
                _rewrite(file, folder / file.name, tuned)
            else:
                _link(file.resolve(), folder / file.name)


def their_name(name: str) -> str:
    """Our name of a tensor -> the target's."""
    part, _, kind = name.rpartition(".")
    return f"mtp.{PARTS[part][QWEN]}.{kind}" if part in PARTS else f"mtp.layers.0.{name}"


def written_config(source: Source) -> dict[str, Any]:
    """The target's own config.json."""
    return read_json(Path(source.target.path) / "config.json")


def written_tensors(source: Source) -> dict[str, Tensor]:
    """Those of the layer, under the target's names."""
    return {their_name(name): one for name, one in source.weights.items()}


def manifest(fields: Mapping[str, Any]) -> dict[str, Spec]:
    """Those of the layer; the target's own ones are transformers' business."""
    told = completed(fields)
    layer = MTPConfig(
        **{ours: told[key] for ours, key in LAYER.items()},
        vocab_size=fields["vocab_size"],
        taps=(-1,),
        depth=1,
        rope={"rope_type": "default", "rope_theta": 10000.0},  # of no tensor
        max_positions=1,
        qk_norm=True,
    )
    return {their_name(name): Spec(shape) for name, shape in expected(layer).items()}


def own_layer(source: Source) -> tuple[dict[str, tuple[int, ...]], torch.dtype | None]:
    """Names and shapes of what the target's own layer holds, and its precision; nothing and None where it has none."""
    shapes: dict[str, tuple[int, ...]] = {}
    dtype = None
    for file in Path(source.target.path).glob("*.safetensors"):
        with safe_open(str(file), "pt") as found:
            own = [name for name in found.keys() if name.startswith("mtp.")]  # noqa: SIM118
            shapes |= {name: tuple(found.get_slice(name).get_shape()) for name in own}
            dtype = found.get_tensor("mtp.norm.weight").dtype if "mtp.norm.weight" in own else dtype
    return shapes, dtype


def misfits(source: Source, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Names of tensors that the draft has and the target's own layer has not, or of another shape, and the reverse."""
    ours = {their_name(name): shape for name, shape in expected(source.config).items()}
    return sorted(name for name in {*ours, *shapes} if ours.get(name) != shapes.get(name))


def _names(file: Path) -> set[str]:
    with safe_open(str(file), "pt") as found:
        return set(found.keys())


def _rewrite(file: Path, new: Path, tuned: dict[str, Tensor]) -> None:
    """In the precision of the tensors that are replaced, which is no narrower."""
    with safe_open(str(file), "pt") as found:
        metadata = cast("dict[str, str] | None", found.metadata())
    old = load_file(file)
    replaced = {name: tuned[name].to(old[name].dtype) for name in tuned.keys() & old.keys()}
    save_file(old | replaced, new, metadata=metadata or {"format": "pt"})


def _link(file: Path, new: Path) -> None:
    try:
        os.link(file, new)
    except OSError:  # another file system, or one without links
        shutil.copyfile(file, new)


OWN_MTP = WholeTarget("own_mtp", written_config, written_tensors, manifest)
