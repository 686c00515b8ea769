"""A draft's folder as an engine may read it: rightly, or with one thing taken otherwise, in a few ways."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from decode.drafters.eagle3 import usual_taps
from decode.formats.states import listed
from decode.models.describe import ModelDescription
from decode.models.hidden_states import FINAL
from train.check.folder import open_folder
from train.check.replicas import REPLICAS
from train.check.replicas.base import Served
from train.check.served import served
from train.check.subject import Subject, form_of
from train.export.engines import ENGINES

Drafting = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""As a replica's, (ids (T,), features (T, n, d), places (N,), steps S), but to the tokens drafted (S, N)."""
HEADS = frozenset({"eagle3", "peagle", "medusa", "dflash", "dflash2", "lilicorr", "dspark", "mtp"})
BLOCKS = frozenset({"dflash", "dflash2", "lilicorr", "dspark"})
RECURSIVE = frozenset({"eagle3", "mtp"})
ALL = HEADS | {"lm"}


@dataclass(frozen=True)
class Reading:
    """What an engine computes with. A draft LM's `served` has its config.json and its tensors by their own names."""

    form: str
    served: Served
    taps: tuple[int, ...]
    """Hidden states that it is handed, in this order; () for a draft LM."""
    num_layers: int
    """Of the target."""
    depth: int | None
    """Most tokens that it drafts; None is any number."""

    @property
    def fields(self) -> Mapping[str, Any]:
        """Of config.json."""
        return self.served.fields

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """By the names of vLLM."""
        return self.served.weights

    def with_fields(self, **values: Any) -> Reading:
        """It with other values in config.json."""
        return replace(self, served=replace(self.served, fields={**self.fields, **values}))

    def with_weights(self, changes: Mapping[str, Tensor]) -> Reading:
        """It with other tensors."""
        return replace(self, served=replace(self.served, weights={**self.weights, **changes}))

    def changed(self, names: Iterable[str], new: Callable[[Tensor], Tensor]) -> Reading:
        """It with these tensors made anew."""
        return self.with_weights({name: new(self.weights[name]) for name in names})

    def with_served(self, **changes: Any) -> Reading:
        """It with other ends, map of tokens or mask."""
        return replace(self, served=replace(self.served, **changes))

    def names(self, pattern: str) -> list[str]:
        """Tensors in whose names the pattern is found."""
        return [name for name in self.weights if re.search(pattern, name)]

    @torch.no_grad()
    def drafting(self) -> Drafting:
        """What drafts so."""
        if self.form == "lm":
            return _of_model(self)
        replica = REPLICAS[self.form]

        def drafted(ids: Tensor, features: Tensor, places: Tensor, steps: int) -> Tensor:
            whole = self.depth if self.form == "dspark" and self.depth else steps  # all slots of a block are there
            return replica(self.served, ids, features, places, whole)[:steps].argmax(-1)

        return drafted


Variants = Iterator[tuple[str, Reading]]
"""(what exactly, the draft read so); none where the fault cannot be there."""


@dataclass(frozen=True)
class Hypothesis:
    """One of them."""

    name: str
    forms: frozenset[str]
    variants: Callable[[Reading], Variants]
    effect: str
    """What the engine does then."""
    remedy: str
    """How to mend it."""
    is_random: bool = False
    """The engine's numbers are others than ours, so that its counters come near to ours and are not the same."""


def random_like(weight: Tensor) -> Tensor:
    """Of its shape and size, and nothing else of it."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(weight.shape, generator=generator) * weight.std(unbiased=False).clamp(min=1e-3)


def is_tried(folder: str) -> bool:
    """Whether the draft can be computed here: of EAGLE-3 heads, those of one layer."""
    opened = open_folder(folder)
    return form_of(opened) != "eagle3" or opened.fields.get("num_hidden_layers", 1) == 1


def open_reading(folder: str, target: ModelDescription) -> Reading:
    """The folder as vLLM reads it where nothing is wrong; InputError for what is no draft's folder."""
    opened = open_folder(folder)
    form = form_of(opened)
    subject = Subject(opened, target, form, (ENGINES["vllm"],))
    if form == "lm":
        weights = {name: opened.tensor(name).float() for name in opened.stored}
        none = torch.empty(0)
        return Reading(form, Served(opened.written, weights, none, none, None, none), (), target.num_layers, None)
    lists = listed(opened.fields)
    usual = usual_taps(target.num_layers) if form in ("eagle3", "peagle") else (FINAL,)
    taps = tuple(sorted(next(iter(lists.values())))) if lists else usual
    return Reading(form, served(subject), taps, target.num_layers, subject.most)


def _of_model(reading: Reading) -> Drafting:
    fields = {name: one for name, one in reading.fields.items() if name != "model_type"}
    config = AutoConfig.for_model(reading.fields["model_type"], **fields)
    torch.manual_seed(0)  # what is missing stays random
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict(dict(reading.weights), strict=False)
    model.tie_weights()

    @torch.no_grad()
    def drafted(ids: Tensor, features: Tensor, places: Tensor, steps: int) -> Tensor:
        likeliest = model(ids[None]).logits[0].argmax(-1)
        return torch.stack([likeliest[places + step] for step in range(steps)])

    return drafted
