"""What the checks look at, and what they say."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from decode.common.errors import InputError
from decode.formats.base import Spec
from decode.formats.form import word_of
from decode.formats.peagle import HIDDEN
from decode.models.describe import ModelDescription
from decode.models.output_head import Ends
from decode.models.small import load_ends
from train.check.folder import ServedFolder
from train.export.engines.base import Engine, Loads

_OF_PYTHON = (LookupError, TypeError, ValueError, ArithmeticError, StopIteration, AttributeError, RuntimeError)
UNCLEAR = (*_OF_PYTHON, StrictDataclassError)
"""Raised where config.json does not say enough for a manifest."""
WRITE = "Write it as the draft was trained"
"""A remedy."""


@dataclass(frozen=True)
class Finding:
    """One fault of a folder."""

    what: str
    """What was found, both values."""
    effect: str
    """What an engine does with it."""
    remedy: str
    """How to mend it."""
    check: str = ""
    """The check that found it."""

    def __str__(self) -> str:
        return f"{self.check}: {self.what}: {self.effect}. {self.remedy}"


@dataclass(frozen=True)
class Subject:
    """A folder, the target it would be served with, and the engines that would."""

    folder: ServedFolder
    target: ModelDescription
    form: str
    engines: tuple[Engine, ...]
    read_ends: Ends | None = None
    """The target's ends, where they are in memory already."""

    def loads(self, engine: Engine) -> Loads:
        """How the engine loads this form."""
        how = engine.forms[self.form]
        assert isinstance(how, Loads), engine.name
        return how

    @property
    def most(self) -> int | None:
        """Tokens that it drafts in a round at most; None where there is no end to them."""
        return self.loads(self.engines[0]).layout.most(self.folder.fields)

    @property
    def names(self) -> str:
        """Of the engines."""
        return ", ".join(engine.title for engine in self.engines)

    def called_for(self, engine: Engine) -> dict[str, Spec]:
        """The tensors that config.json calls for. What a draft model of any type leaves out its own class knows, which
        may take no such field."""
        fields = self.folder.written if self.form == "lm" else self.folder.fields
        return self.loads(engine).layout.manifest(fields)

    def manifest(self, engine: Engine) -> dict[str, Spec]:
        """The tensors that the engine makes room for, by the names that it takes them by."""
        loads = self.loads(engine)
        renamed = {loads.names.renamed(name): spec for name, spec in self.called_for(engine).items()}
        return {name: spec for name, spec in renamed.items() if not loads.names.passes_over(name)}

    def renamed(self, engine: Engine) -> dict[str, str]:
        """The engine's name of each tensor in the folder -> its own; without those that are passed over on purpose."""
        rules = self.loads(engine).names
        pairs = {rules.renamed(name): name for name in self.folder.stored}
        return {theirs: own for theirs, own in pairs.items() if not rules.passes_over(theirs)}

    @cached_property
    def specs(self) -> dict[str, Spec]:
        """What each tensor in the folder should be, by its name there; those that no engine knows are left out."""
        found: dict[str, Spec] = {}
        for engine in self.engines:
            try:
                wanted = self.called_for(engine)
            except UNCLEAR:
                continue
            rules = self.loads(engine).names
            by_theirs = {rules.renamed(name): spec for name, spec in wanted.items()}
            found |= {
                own: by_theirs[rules.renamed(own)] for own in self.folder.stored if rules.renamed(own) in by_theirs
            }
        return found

    @cached_property
    def ends(self) -> Ends:
        """The target's embedding and output head, in float32."""
        if self.read_ends is not None:
            return self.read_ends
        return load_ends(replace(self.target.source, dtype="float32", device="cpu", device_map=None))

    @cached_property
    def embedding(self) -> Tensor:
        """(V, d) rows of the target's embedding, as its first layer gets them."""
        with torch.no_grad():
            return self.ends.embed(torch.arange(self.target.vocab_size)).detach()

    @cached_property
    def output_rows(self) -> Tensor:
        """(V, d) rows of the target's output head."""
        return self.ends.head.weight.detach()


def form_of(folder: ServedFolder) -> str:
    """What engines take the folder for; InputError where none would know."""
    fields = folder.written
    named = "peagle" if HIDDEN in folder.stored else word_of(fields)  # engines' word for it is eagle3
    if named is not None:
        return named
    if fields.get("draft_vocab_size") and fields.get("num_hidden_layers") == 1:  # so TensorRT-LLM and llama.cpp see it
        return "eagle3"
    if fields.get("model_type"):
        return "mtp" if any(name.startswith("mtp.") for name in folder.stored) else "lm"
    raise InputError(
        f"{folder.path}/config.json has architectures={fields.get('architectures')} and "
        f"model_type={fields.get('model_type')}: neither a known draft head (EAGLE-3, Medusa, DFlash, DSpark, "
        "DFlash2, LiLiCorr) nor a language model. Write the engine's key"
    )
