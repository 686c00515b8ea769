"""Saved drafts: what one is, read from its folder without its weights, and from a folder to a drafter, both checked
against the target that it is to serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from decode.common.environment import device_of, resolve_device
from decode.common.errors import InputError
from decode.common.typed_config import require
from decode.config import ModelConfig, Precision, Scheme, model_folder, require_scheme
from decode.drafters.base import Drafter
from decode.drafters.beside.refusals import check_device
from decode.drafters.head_config import HeadConfig
from decode.drafters.head_draft import HeadDraft
from decode.drafters.mtp import MTPDraft, own_mtp
from decode.drafters.pard import lm_draft
from decode.drafters.provenance import FILE, read_provenance
from decode.drafters.saved_head import HEADS, expected, load_head, read_head
from decode.drafters.untrained.config import UNTRAINED, settings_of
from decode.drafters.untrained.named import DRAFTERS, check_named
from decode.formats.form import published_form
from decode.formats.head import load_published, read_published
from decode.forward.window import Window, own_window
from decode.models.adapters import unwrapped
from decode.models.compatibility import refuse_unsupported
from decode.models.describe import ModelDescription, describe_loaded, describe_model
from decode.models.few_rows import keep_few_rows
from decode.models.fingerprint import changed_since_read, files_fingerprint
from decode.models.load import load_model
from decode.models.output_head import Ends, ends_of
from decode.models.padded_rows import with_rows
from decode.models.quantisation.torchao_schemes import check_runs_here, check_sizes, quantise
from decode.models.same_tokens import check_same_size, check_same_tokens, tokens_padded_otherwise

FAMILIES = ("lm", *HEADS)
OWN = "mtp"
"""In place of a folder: the MTP layer of the target's own checkpoint."""


def load_drafter(
    path: str | Path | PreTrainedModel,
    target: PreTrainedModel,
    dtype: Precision = "auto",
    check: bool = True,
    device: str | None = None,
    quantization: Scheme | None = None,
    **settings: Any,
) -> Drafter:
    """The drafter saved in `path`, on `device` (None: the target's; another is for draft language models alone), in
    `dtype` ("auto": the target's own), or by name one that has no weights, with its `settings`: load_drafter("ngram",
    target=model, memory=100_000).

    `path` is a draft's folder or that of the run that trained it, or the folder of a head as others publish them
    (`decode.formats`); a plain transformers folder is an `lm` draft, and so is a causal language model in memory,
    which is taken as it is, where it was asked for. A PeftModel, as target or draft, is the model with the adapter that
    is on. `quantization` (int8, int4, int8_dynamic) rounds the linear layers of a draft in a folder
    (`decode.models.quantisation.torchao_schemes`).
    Raises ConfigError for settings that the drafter does not have, and InputError where vocabularies or tokenizers
    differ (where a folder holds no tokenizer files, or a model in memory comes from none, only vocabulary sizes are
    compared), and where a head was trained on other weights than the target has, in its files or in memory; of a
    published one, where the rows that it ships are not the target's.
    `check=False` compares sizes alone, also with a target that came from no files.
    """
    target = unwrapped(target)
    asked = settings_of(path if isinstance(path, str) else None, settings, "load_drafter")
    place = device_of(target) if device is None else resolve_device(device)
    in_folder = asked is None and isinstance(path, str | PathLike)
    if quantization is not None:
        require_scheme(quantization, "quantization", "None")
        require(
            in_folder,
            f"quantization={quantization} rounds the weights of a draft as they are loaded from a folder, and "
            f"{path!r:.80} is none. Leave it out",
        )
    if asked is not None:
        check_device(cast(str, path), device, "device")
        load = partial(load_drafter, target=target, dtype=dtype, check=check)
        return DRAFTERS[cast(str, path)](asked, target, load, dtype)
    if not isinstance(path, str | PathLike):
        return _loaded_draft(path, target, dtype, check, place)
    folder = model_folder(str(path))
    if dtype == "auto":
        dtype = cast(Precision, str(target.dtype).removeprefix("torch."))
    known = describe_loaded(target, check)
    family = OWN if folder == OWN else family_of(folder)
    if family in HEADS:
        check_device(family, device, "device")
        if quantization is not None:
            check_runs_here(quantization, place, getattr(torch, dtype), "draft")
        head = load_own(target, check) if folder == OWN else head_in(folder, ends_of(target), known, check)
        head.source = known.path if folder == OWN else folder
        head.to(place, getattr(torch, dtype)).requires_grad_(False).eval()
        return head if quantization is None else _quantised(head, quantization, folder)
    source = ModelConfig(path=folder, dtype=dtype, quantization=quantization, device=str(place))
    described = describe_model(source, role="draft")
    tokens = tokens_padded_otherwise(known, described)
    if tokens is None:
        (check_same_tokens if check else check_same_size)(known, described)
    model = load_model(source, role="draft")
    if tokens is not None:
        with_rows(model, known.vocab_size, tokens)
    return lm_draft(keep_few_rows(model), tokens).eval()


def _quantised(head: HeadDraft, scheme: Scheme, folder: str) -> HeadDraft:
    if scheme == "int4":
        check_sizes(head, folder, "draft")
    quantise(head, scheme, head.device)
    return head


def _loaded_draft(given: Any, target: PreTrainedModel, dtype: Precision, check: bool, place: torch.device) -> Drafter:
    """The draft LM on a model in memory, whose weights, precision and mode stay what they are."""
    model = unwrapped(given)
    if not isinstance(model, PreTrainedModel):
        raise InputError(
            f"a draft is a folder, a hub id or a transformers model, and {given!r:.80} is of type "
            f"{type(given).__name__}; give one of these"
        )
    refuse_unsupported(model.config, model.config.name_or_path or type(model).__name__, role="draft")
    wanted = model.dtype if dtype == "auto" else getattr(torch, dtype)
    if (model.device, model.dtype) != (place, wanted):
        raise InputError(
            f"the draft in memory is on {model.device} in {model.dtype}, and {place} and {wanted} are asked "
            "for (device=, else the target's, and dtype=). It is not moved behind your back: call its to(...) first"
        )
    draft = describe_loaded(model, check=False)
    known = describe_loaded(target, check=False)
    check_same_size(known, draft)  # it gets no other rows behind your back
    if check and model.config.name_or_path and target.config.name_or_path:
        check_same_tokens(known, draft)
    return lm_draft(model)


def load_own(target: PreTrainedModel, check: bool = True) -> HeadDraft:
    """The target's own MTP layer, applied to its own output; InputError where the checkpoint has none, and, with
    `check`, where the target in memory has other weights than the checkpoint."""
    known = describe_loaded(target, check)
    config, weights = own_mtp(known, depth=1)
    if check:
        _check_as_in_files(target, known.path)
    head = MTPDraft(config, ends_of(target))
    head.load_state_dict(weights)
    return head


def _check_as_in_files(target: PreTrainedModel, folder: str) -> None:
    changed = changed_since_read(target, Path(folder))
    if changed:
        raise InputError(
            f"the MTP layer in {folder} was trained with {len(changed)} other tensors of the target "
            f"({', '.join(changed[:3])}), changed after they were loaded. Load it anew, train a head, or insist with "
            "load_drafter(..., check=False)"
        )


def family_of(path: str) -> str:
    """The family that a draft folder names, or that a published head is of; raises InputError for one that is not known
    here."""
    provenance = read_provenance(path)
    if provenance is None:
        form = published_form(path)
        return {None: "lm", "dflash": "dspark"}.get(form, cast(str, form))
    family = provenance.family
    if family not in FAMILIES:
        raise InputError(
            f"{Path(path) / FILE} says family={family!r}; this version knows {', '.join(FAMILIES)}. Update draftsmith"
        )
    return family


def config_in(folder: str | Path, target: ModelDescription, check: bool = True) -> HeadConfig:
    """The configuration of the head in a folder, ours or a published one; InputError where it is not this target's."""
    read = read_published if read_provenance(folder) is None else read_head
    return read(folder, target, check)


def head_in(folder: str | Path, ends: Ends, target: ModelDescription, check: bool = True) -> HeadDraft:
    """The head in a folder, ours or a published one, in the precision it was saved in, on the CPU."""
    load = load_published if read_provenance(folder) is None else load_head
    return load(folder, ends, target, check)


@dataclass(frozen=True)
class DraftDescription:
    """A draft of any family."""

    path: str
    """Its folder; of a target's own layers, the target's; of a drafter without weights, its name."""
    family: str
    fingerprint: str
    max_positions: int
    """Longest context in tokens."""
    num_parameters: int
    """Its own; a head's do not hold the target's embedding and output head."""
    window: Window | None = None
    """Of a language model that attends to a part of the text."""
    foresees: bool = False
    """Predicts what becomes of its tokens, as DSpark heads do."""


def describe_draft(
    path: str, target: ModelDescription, role: str = "draft", settings: Mapping[str, Any] | None = None
) -> DraftDescription:
    """The draft in `path` (a draft's folder, that of the run that trained it, a hub id, OWN, or the name of a drafter
    without weights) with its `settings` (of a folder `quantization`); raises InputError where it does not fit the
    target, or cannot be quantised so."""
    if path in UNTRAINED:
        check_named(path, settings or {}, target, describe_draft)
        return DraftDescription(path, path, path, target.max_positions, 0)
    folder, scheme = model_folder(path), (settings or {}).get("quantization")
    own = folder == OWN
    if scheme is not None and (own or family_of(folder) in HEADS):
        dtype = getattr(torch, target.dtype_name)
        check_runs_here(scheme, resolve_device(target.source.device), dtype, role)
    if own:
        config, weights = own_mtp(target, depth=1)
        size = sum(tensor.numel() for tensor in weights.values())
        return DraftDescription(target.path, config.family, target.fingerprint, config.max_positions, size)
    family = family_of(folder)
    if family in HEADS:
        config = config_in(folder, target)
        size = sum(map(prod, expected(config).values()))
        weights = files_fingerprint(Path(folder))
        return DraftDescription(folder, family, weights, config.max_positions, size, foresees=config.foresees)
    dtype = "auto" if scheme is None else target.dtype_name
    found = describe_model(ModelConfig(path=folder, dtype=cast(Precision, dtype), quantization=scheme), role)
    check_same_tokens(target, found)
    window = own_window(found.config)
    return DraftDescription(found.path, family, found.identity, found.max_positions, found.num_parameters, window)
