"""The folder of a head: config.json, model.safetensors and draftsmith.json, checked whole before anything is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from decode.common.checked_json import JsonFile
from decode.common.errors import InputError
from decode.common.progress import get_logger
from decode.drafters.dflash2 import DFlash2Config, DFlash2Draft
from decode.drafters.dspark import DSparkConfig, DSparkDraft
from decode.drafters.eagle3 import Eagle3Config, Eagle3Draft
from decode.drafters.exit_adapter import ExitAdapter, ExitAdapterConfig
from decode.drafters.head_config import HeadConfig
from decode.drafters.head_draft import HeadDraft
from decode.drafters.hydra import HydraConfig, HydraDraft
from decode.drafters.lilicorr import LiLiCorrConfig, LiLiCorrDraft
from decode.drafters.medusa import MedusaConfig, MedusaDraft
from decode.drafters.mtp import MTPConfig, MTPDraft
from decode.drafters.peagle import PEagleConfig, PEagleDraft
from decode.drafters.provenance import FILE, TrainedTarget, check_sum, read_provenance
from decode.models.describe import ModelDescription
from decode.models.fingerprint import comparable, same_values
from decode.models.head_targets import check_taps
from decode.models.output_head import Ends
from decode.sampling.stopping import own_eos_ids

WEIGHTS = "model.safetensors"
VOCAB = "vocab"
FIELDS = JsonFile(
    dict[str, Any],
    "the head would draft from other states or for other tokens than it was trained for",
    "Copy its folder again, or train it anew.",
)
HEADS: dict[str, tuple[type[HeadConfig], type[HeadDraft]]] = {
    "dflash2": (DFlash2Config, DFlash2Draft),
    "dspark": (DSparkConfig, DSparkDraft),
    "eagle3": (Eagle3Config, Eagle3Draft),
    "exit_adapter": (ExitAdapterConfig, ExitAdapter),
    "hydra": (HydraConfig, HydraDraft),
    "lilicorr": (LiLiCorrConfig, LiLiCorrDraft),
    "medusa": (MedusaConfig, MedusaDraft),
    "mtp": (MTPConfig, MTPDraft),
    "peagle": (PEagleConfig, PEagleDraft),
}
Shapes = dict[str, tuple[int, ...]]
log = get_logger("decode")


def load_head(folder: str | Path, ends: Ends, target: ModelDescription, check: bool = True) -> HeadDraft:
    """The head saved in `folder`, in the precision it was saved in, on the CPU; InputError as `read_head` raises, and
    where its draft vocabulary has no end of text."""
    config = read_head(folder, target, check)
    provenance = read_provenance(folder)
    assert provenance is not None, "checked by read_head"
    check_sum(Path(folder) / WEIGHTS, provenance)  # all of it is read in any case
    vocab = None if config.draft_vocab_size is None else torch.zeros(config.draft_vocab_size, dtype=torch.long)
    head = HEADS[config.family][1](config, ends, vocab)
    weights = load_file(Path(folder) / WEIGHTS)
    head.to(next(weight.dtype for weight in weights.values() if weight.is_floating_point()))
    head.load_state_dict(weights)
    _check_vocabulary(folder, head)
    return head


def read_head(folder: str | Path, target: ModelDescription, check: bool = True) -> HeadConfig:
    """The configuration of a whole head of this target; InputError for anything that is missing, damaged, of another
    version or of another target. `check=False`: of any target of the same sizes."""
    missing = [name for name in ("config.json", WEIGHTS, FILE) if not (Path(folder) / name).is_file()]
    if missing:
        raise InputError(f"the head {folder} lacks {' and '.join(missing)}, so it is not whole; copy its folder again")
    written = read_provenance(folder)
    assert written is not None
    if check and written.target is not None:  # else its family is none of a head, which is refused below
        _check_target(folder, written.target, target)
    config = _config(folder, written.family)
    _check_sizes(folder, config, target)
    check_taps(target.config, config.taps, target.path)
    config.refuse_target(target)
    check_fits(described(folder, config, FIELDS.remedy), shapes_of(folder), f"the head {folder}")
    _check_types(folder)
    _check_draft_tokens(folder, config)
    return config


def expected(config: HeadConfig) -> Shapes:
    """Names and shapes of a head's tensors; nothing is allocated."""
    return {name: tuple(tensor.shape) for name, tensor in empty_head(config).state_dict().items()}


def empty_head(config: HeadConfig) -> HeadDraft:
    """Between no ends, on the device `meta`: nothing is allocated."""
    size = config.draft_vocab_size
    with torch.device("meta"):
        vocab = None if size is None else torch.zeros(size, dtype=torch.long)
        return HEADS[config.family][1](config, cast(Ends, None), vocab)


def shapes_of(folder: str | Path) -> Shapes:
    """Those of the saved weights; InputError where the file is damaged."""
    try:
        with safe_open(str(Path(folder) / WEIGHTS), "np") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"the weights of the head {folder} are damaged: {error}. Copy its folder again") from error


def check_fits(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], who: str) -> None:
    """InputError unless both name the same tensors of the same shapes."""
    wrong = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
    if wrong:
        shown = ", ".join(f"{name} {found.get(name, 'missing')} for {wanted.get(name, 'none')}" for name in wrong[:4])
        raise InputError(
            f"{who} does not hold the weights that its configuration calls for: {shown}"
            f"{f' and {len(wrong) - 4} more' if len(wrong) > 4 else ''}. Copy it again, or train it anew"
        )


def _config(folder: str | Path, family: str) -> HeadConfig:
    fields = FIELDS.read(Path(folder) / "config.json")
    if fields.get("family") != family or family not in HEADS:
        raise InputError(
            f"{folder}/config.json says family={fields.get('family')!r} and {FILE} {family!r}; a head is one of "
            f"{', '.join(HEADS)}. One of the files was edited; copy the folder again"
        )
    known = HEADS[family][0]
    wrong = set(fields) ^ {field.name for field in dataclasses.fields(known)}
    if wrong:
        raise InputError(
            f"{folder}/config.json and this version's {family} heads do not share the fields "
            f"{', '.join(sorted(wrong))}; train the head with this version, or load it with the one that wrote it"
        )
    return JsonFile(known, FIELDS.why, FIELDS.remedy).read(Path(folder) / "config.json")


def _check_sizes(folder: str | Path, config: HeadConfig, target: ModelDescription) -> None:
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(config, name), getattr(target, name)
        if ours != theirs:
            raise InputError(
                f"{folder}/config.json says {name}={ours}, and {target.path} has {theirs}: {FIELDS.why}. "
                f"{FIELDS.remedy}"
            )


def described(folder: str | Path, config: HeadConfig, remedy: str) -> Shapes:
    """As `expected`; InputError with `remedy` where the config.json of `folder` describes no head."""
    try:
        return expected(config)
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise InputError(
            f"{folder}/config.json describes no {config.family} head that can be built "
            f"({type(error).__name__}: {error}). {remedy}"
        ) from error


def _check_types(folder: str | Path) -> None:
    """Whole numbers in place of weights would be converted without a word."""
    with safe_open(str(Path(folder) / WEIGHTS), "np") as tensors:
        types = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    weights = {kind for name, kind in types.items() if name != VOCAB}
    if len(weights) > 1 or not weights <= {"F64", "F32", "F16", "BF16"} or types.get(VOCAB, "I64") != "I64":
        raise InputError(
            f"the weights of the head {folder} are of the types {', '.join(sorted({*types.values()}))}, where one "
            f"floating-point type (and I64 for {VOCAB}) is saved: its header is damaged. {FIELDS.remedy}"
        )


def _check_draft_tokens(folder: str | Path, config: HeadConfig) -> None:
    """The ids of a reduced draft vocabulary: ascending, each once, all of them the target's."""
    if config.draft_vocab_size is None:
        return
    with safe_open(str(Path(folder) / WEIGHTS), "np") as tensors:
        ids = tensors.get_tensor(VOCAB)
    outside = ids[(ids < 0) | (ids >= config.vocab_size)]
    (falls,) = np.nonzero(np.diff(ids) <= 0)
    if len(outside) or len(falls):
        pair = "" if not len(falls) else f"{ids[falls[0]]} is followed by {ids[falls[0] + 1]}"
        raise InputError(
            f"the draft vocabulary of {folder} should hold ascending ids of the target's {config.vocab_size} tokens, "
            f"each once, and {f'{outside[0]} is none of them' if len(outside) else pair}: drafted tokens would stand "
            f"for other ones. {FIELDS.remedy}"
        )


def is_of(trained: TrainedTarget, target: ModelDescription) -> bool:
    """Whether the files of the two hold the same weights: by a sample of every tensor where both have one, since a
    fingerprint of files reads their edges, and layers in between may have been trained further."""
    stored = target.stored_fingerprint
    if comparable(trained.weights, stored):
        return trained.weights == stored
    return trained.fingerprint == target.fingerprint or same_values(trained.weights, stored)


def _check_target(folder: str | Path, trained: TrainedTarget, target: ModelDescription) -> None:
    """The same weights may lie in other files: a copy of a hub's folder, other shards, what was a GGUF file."""
    if not is_of(trained, target):
        raise InputError(
            f"the head {folder} was trained on the hidden states of {trained.path} with fingerprint "
            f"{trained.fingerprint}, {trained.weights}, and {target.path} has {target.fingerprint}, "
            f"{target.stored_fingerprint or 'weights not told'}. Give that target, or train it on: "
            f"draft.init_from={folder}"
        )
    ours, theirs = target.weights_fingerprint, trained.weights
    if comparable(ours, theirs) and ours != theirs:
        raise InputError(
            f"the head {folder} was trained on weights {theirs}, and {target.path} has {ours}, changed after they "
            "were loaded. Load it anew, train a head for it, or insist with load_drafter(..., check=False)"
        )


def _check_vocabulary(folder: str | Path, head: HeadDraft) -> None:
    """A draft that can never say EOS drafts past every end; one that began as a published head has the tokens that it
    was published with."""
    if not head.head_is_frozen:
        tell_ends(folder, head)
        return
    missing = missing_ends(head)
    if missing:
        raise InputError(
            f"the draft vocabulary of {folder} ({head.config.draft_vocab_size} of {head.config.vocab_size} tokens) "
            f"lacks the end of text {missing}, so it would draft past every end. Train it with draft.head.vocab=N, "
            "which always keeps EOS"
        )


def missing_ends(head: HeadDraft) -> list[int]:
    """The target's ends of text that a reduced draft vocabulary lacks."""
    ends = own_eos_ids(head.ends.head.model.generation_config, head.config.vocab_size)
    return [] if head.vocab is None else sorted(set(ends) - set(head.vocab.tolist()))


def tell_ends(folder: str | Path, head: HeadDraft) -> None:
    """Heads are published that cannot draft every end of text: those of a target with several."""
    missing = missing_ends(head)
    if missing:
        log.warning(
            "%s does not draft the target's ends of text %s: where a text ends by one, the round drafts past it, and "
            "what it drafted there is refused", folder, missing,
        )  # fmt: skip
