"""A published head as a drafter of ours: its configuration read before anything is loaded, and the head itself."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from decode.common.errors import ConfigError, InputError
from decode.drafters.dspark import DSparkConfig
from decode.drafters.head_config import HeadConfig
from decode.drafters.head_draft import HeadDraft
from decode.drafters.peagle import PEagleConfig
from decode.drafters.saved_head import HEADS, check_fits, described, expected, tell_ends
from decode.formats.base import Reader
from decode.formats.blocks import DFLASH
from decode.formats.dflash2 import DFLASH2
from decode.formats.dspark import DSPARK
from decode.formats.eagle3 import EAGLE3
from decode.formats.folder import PublishedFolder, read_folder
from decode.formats.form import published_form
from decode.formats.lilicorr import LILICORR
from decode.formats.medusa import MEDUSA
from decode.formats.peagle import PEAGLE
from decode.formats.target_rows import Shipped, check_against_files, check_against_model
from decode.models.describe import ModelDescription
from decode.models.head_targets import check_taps
from decode.models.hidden_states import FINAL
from decode.models.output_head import Ends

LAYOUTS = (EAGLE3, PEAGLE, MEDUSA, DFLASH, DFLASH2, LILICORR, DSPARK)
READERS = {one.name: one.reader for one in LAYOUTS if one.reader is not None}
"""By form."""
WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)


def read_published(path: str | Path, target: ModelDescription, check: bool = True) -> HeadConfig:
    """The configuration of the head published in a folder, every tensor of which was found to fit.

    InputError for layouts that are unknown or mixed, for tensors that are missing, cut short, of another shape or too
    many, and for a head of another target; `check=False` compares no rows with the target's.
    """
    folder, form = _opened(path)
    config, reader = _config(folder, form, target), READERS[form]
    check_taps(target.config, config.taps, target.path)
    found = {name: tuple(one.shape) for name, one in reader.tensors(folder, config, _shape_in(folder)).items()}
    check_fits(described(folder.path, config, "Fetch the folder again"), found, f"the published head {folder.path}")
    _precision(folder)
    if check:
        check_against_files(folder, _shipped(folder, reader), config, target)
    return config


def load_published(path: str | Path, ends: Ends, target: ModelDescription, check: bool = True) -> HeadDraft:
    """The head in the precision it was published in, on the CPU; InputError as `read_published` raises."""
    config = read_published(path, target, check)
    folder, form = _opened(path)
    reader = READERS[form]
    if check:
        check_against_model(folder, _shipped(folder, reader), config, ends, target.path)
    held = reader.tensors(folder, config, folder.tensor)
    _check_finite(folder, held)
    vocab = None if config.draft_vocab_size is None else torch.zeros(config.draft_vocab_size, dtype=torch.long)
    head = HEADS[config.family][1](config, ends, vocab).to(_precision(folder))
    head.load_state_dict(held)
    tell_ends(folder.path, head)
    return head


def in_words(config: HeadConfig) -> str:
    """Its family, size, and what it reads and drafts."""
    size = sum(map(prod, expected(config).values()))
    reads = "the final hidden state" if config.taps == (FINAL,) else f"the hidden states {list(config.taps)}"
    drafted = config.draft_vocab_size or config.vocab_size
    rows = "an output head of its own" if config.has_own_head else "the target's"
    words = [
        f"draftsmith reads it as a draft of family {config.family}: {size:,} parameters on {reads} of the target",
        f"drafts {drafted} of {config.vocab_size} tokens by {rows}",
    ]
    if isinstance(config, DSparkConfig):
        order = ", in causal order" if config.causal else ""
        words.append(f"{config.depth} tokens a block{order}, {config.layers} layers, Markov rank {config.markov_rank}")
    if isinstance(config, PEagleConfig):
        words.append(f"{config.depth} tokens a pass, {config.layers} layers, token {config.mask_token} as mask")
    if config.family == "medusa":
        words.append(f"{config.depth} heads")
    return "; ".join(words)


def _check_finite(folder: PublishedFolder, held: Mapping[str, Tensor]) -> None:
    broken = [name for name, one in held.items() if one.is_floating_point() and not bool(one.isfinite().all())]
    if broken:
        raise InputError(
            f"{', '.join(broken[:3])} of {folder.path} ({len(broken)} of {len(held)} tensors) holds NaN or infinite "
            "numbers, so that every draft would be the same token. Fetch the folder again; what was trained to that "
            "end cannot be mended"
        )


def _shipped(folder: PublishedFolder, reader: Reader) -> Shipped:
    return {what: name for what, name in reader.ends(folder).items() if name is not None}


def _opened(path: str | Path) -> tuple[PublishedFolder, str]:
    form = published_form(path)
    assert form is not None, path
    return read_folder(Path(path)), form


def _config(folder: PublishedFolder, form: str, target: ModelDescription) -> HeadConfig:
    try:
        return READERS[form].config(folder, target)
    except (ConfigError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{folder.path}/config.json describes no {form} head that can be built ({type(error).__name__}: "
            f"{error}). Fetch the folder again"
        ) from error


def _shape_in(folder: PublishedFolder):
    def get(name: str) -> Tensor:
        stored = folder.stored[name]
        return torch.empty(stored.shape, dtype=stored.dtype, device="meta")

    return get


def _precision(folder: PublishedFolder) -> torch.dtype:
    """That of most weights; a chance of acceptance may be in float32 among them."""
    kinds = [one.dtype for one in folder.stored.values() if one.dtype.is_floating_point]
    found = max(dict.fromkeys(kinds), key=kinds.count, default=None)
    if found not in WEIGHTS:
        raise InputError(
            f"the weights in {folder.path} are of type {found or 'int64 or bool alone'}, and heads are read in "
            "float32, bfloat16 and float16. Fetch the folder again"
        )
    return found
