"""Rows of embedding and output head that a published folder ships, compared with the target's: a head of another target
of the same sizes is told by them. Values are those of the coarser precision of both."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from decode.common.errors import InputError
from decode.drafters.head_config import HeadConfig
from decode.formats.base import EMBEDDING, OUTPUT
from decode.formats.folder import PublishedFolder
from decode.formats.vocabulary import vocabulary_of
from decode.models.describe import ModelDescription
from decode.models.output_head import Ends

SAMPLED = 64
"""Rows compared before a model is loaded, spread over the vocabulary."""
CHUNK = 4096
TINY = 1e-7
"""What float16 rounds to zero."""
NAMES = {"embedding": EMBEDDING, "output head": OUTPUT}
"""How the target's tensors are called, behind prefixes."""
Shipped = dict[str, str]
"""What should be the target's -> the tensor's name."""


def check_against_files(
    folder: PublishedFolder, shipped: Shipped, config: HeadConfig, target: ModelDescription
) -> None:
    """Raise InputError where sampled rows are not those of the target's files; what these do not hold under the usual
    names is compared when the target is loaded."""
    ids = torch.linspace(0, config.vocab_size - 1, SAMPLED).long().unique()
    for what, name in shipped.items():
        places, tokens = _places(folder, config, name, ids)
        theirs = _rows_in_files(Path(target.path), NAMES[what], tokens, target)
        if theirs is None and what == "output head" and target.config.get_text_config().tie_word_embeddings:
            theirs = _rows_in_files(Path(target.path), NAMES["embedding"], tokens, target)
        if theirs is None:
            continue
        scaled = theirs * target.hidden_size**0.5  # what Gemma's first layer gets
        found = folder.tensor(name)[places]
        if what != "embedding" or _differing(found, scaled):
            _refuse(folder, name, what, _differing(found, theirs), len(tokens), target.path)


def check_against_model(folder: PublishedFolder, shipped: Shipped, config: HeadConfig, ends: Ends, path: str) -> None:
    """The same for all rows of a target in memory."""
    device = ends.head.weight.device
    for what, name in shipped.items():
        found = folder.tensor(name)
        differing = total = 0
        for ids in torch.arange(config.vocab_size).split(CHUNK):
            places, tokens = _places(folder, config, name, ids)
            tokens = tokens.to(device)
            with torch.no_grad():
                theirs = ends.embed(tokens) if what == "embedding" else ends.head.weight[tokens]
            differing += _differing(found[places], theirs.cpu())
            total += len(tokens)
        _refuse(folder, name, what, differing, total, path)


def _places(folder: PublishedFolder, config: HeadConfig, name: str, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the folder's tensor, and the tokens that they are of, among `ids`."""
    drafted = vocabulary_of(folder, config.vocab_size)
    if drafted is None or folder.stored[name].shape[0] >= config.vocab_size:
        return ids, ids
    places = torch.isin(drafted, ids).nonzero().flatten()
    return places, drafted[places]


def _rows_in_files(folder: Path, ending: str, tokens: Tensor, target: ModelDescription) -> Tensor | None:
    """None where no one tensor of the target's shape has such a name."""
    shape, found = [target.vocab_size, target.hidden_size], []
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(str(file), "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    if name.endswith(ending) and tensors.get_slice(name).get_shape() == shape:
                        rows = tensors.get_slice(name)
                        found.append(torch.cat([rows[token : token + 1] for token in tokens.tolist()]))
        except SafetensorError:
            return None  # reported where the target is loaded
    return found[0] if len(found) == 1 and found[0].is_floating_point() else None


def _differing(ours: Tensor, theirs: Tensor) -> int:
    """Rows that are not the same in the precision of the coarser one; two that were both rounded, from a float32 that
    is not here, may be a step apart."""
    if ours.shape != theirs.shape or not ours.is_floating_point():
        return len(theirs)
    coarser = max(ours.dtype, theirs.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    one, other = (rows.to(coarser).float() for rows in (ours, theirs))
    is_one_rounding = ours.dtype == theirs.dtype or torch.float32 in (ours.dtype, theirs.dtype)
    slack = 0.0 if is_one_rounding else torch.finfo(coarser).eps
    return int(((one - other).abs() > TINY + slack * other.abs()).any(-1).sum())


def _refuse(folder: PublishedFolder, name: str, what: str, differing: int, total: int, path: str) -> None:
    if differing:
        raise InputError(
            f"{differing} of {total} compared rows of {name} in {folder.path} are not those of the {what} of {path}. "
            "Give the target that the head was published for, or insist with load_drafter(..., check=False)"
        )
