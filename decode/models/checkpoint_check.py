"""Whether a checkpoint holds the weights that its config.json calls for; what is missing would be random numbers."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from decode.common.errors import InputError
from decode.common.progress import get_logger, quiet
from decode.models.quantisation.quantiser import refuse_missing_scales

if TYPE_CHECKING:
    from decode.config import ModelConfig

SHOWN = 4  # names in a message
MASKS = re.compile(r"\.attn(\.attention)?\.(masked_)?bias$")  # causal masks, which GPT-2 and its like used to save
OWN_DRAFT = re.compile(r"(?:model\.)?(mtp\.|mtp_layers\.\d+\.|layers\.\d+\.)")
OWN_DRAFT_PARTS = ("eh_proj.weight", "enorm.weight")  # what a numbered layer has where it is a draft layer of its own
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")

log = get_logger("decode")


@dataclass(frozen=True)
class Gaps:
    """What a checkpoint and its config.json do not share."""

    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    other_shapes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    """Name, shape in the file, shape by config.json."""

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> Gaps:
        """Those of transformers' loading report, in which tied weights, converted ones and what the model's class
        ignores are no faults; neither are old masks and the target's own draft layers."""
        unknown = report["unexpected_keys"]
        drafts = own_draft_layers(unknown)
        left = {name for name in unknown if not MASKS.search(name) and not name.startswith(drafts)}
        shapes = {(name, tuple(found), tuple(wanted)) for name, found, wanted in report["mismatched_keys"]}
        return cls(tuple(sorted(report["missing_keys"])), tuple(sorted(left)), tuple(sorted(shapes)))

    def __bool__(self) -> bool:
        return bool(self.missing or self.unknown or self.other_shapes)

    def __str__(self) -> str:
        shapes = [f"{name} {found} for {wanted}" for name, found, wanted in self.other_shapes]
        kinds = {"missing": self.missing, "not known": self.unknown, "of another shape": shapes}
        return "; ".join(f"{kind}: {_some(names)}" for kind, names in kinds.items() if names)


def check_headers(source: ModelConfig, config: PretrainedConfig, role: str, tensors: Mapping[str, Tensor]) -> None:
    """InputError where the headers of a checkpoint's weights, `tensors` on the meta device, do not fit `config`, by
    name, and where `config` describes no model at all. Transformers loads them on the meta device, so that whatever it
    converts is judged as it will be; a quantised checkpoint, whose scales are looked for, or one that cannot be
    converted there, is judged by the report once it is loaded."""
    which = f"{role}.path={source.path}"
    if is_quantised(config):
        _check_builds(config, which)
        refuse_missing_scales(config, tensors, which)
    if is_quantised(config) or source.allow_missing:
        return
    shapes = tuple(sorted((name, tuple(one.shape)) for name, one in tensors.items()))
    report = _report(_Question(_canonical(config), shapes, config, which))
    if report is not None:
        check_report(report, source, role, _sizes(config, tensors))


def check_report(report: Mapping[str, Any], source: ModelConfig, role: str, sizes: str = "") -> None:
    """InputError where the loading report of `source` names gaps, which would be random numbers, unless it says
    allow_missing; `sizes` says more."""
    gaps = Gaps.of(report)
    if not gaps:
        return
    if source.allow_missing:
        log.warning("%s.path=%s has other weights than its config.json: %s", role, source.path, gaps)
        return
    insist = f", or insist with {role}.allow_missing=true" if role == "target" else ""
    raise InputError(
        f"the weights of {role}.path={source.path} are not those that its config.json calls for: {sizes}{gaps}. Copy "
        f"the folder again or repair its config.json{insist}"
    )


def is_quantised(config: PretrainedConfig) -> bool:
    """Whether its checkpoint holds packed weights, with scales under names of their own."""
    return getattr(config, "quantization_config", None) is not None


def own_draft_layers(names: Collection[str]) -> tuple[str, ...]:
    """Prefixes of the draft layers (MTP) that a target's checkpoint holds beside its own weights, unknown to its class;
    `decode.drafters.mtp` reads them."""
    found = {match[0] for match in map(OWN_DRAFT.match, names) if match}
    return tuple(one for one in found if "mtp" in one or any(one + part in names for part in OWN_DRAFT_PARTS))


@dataclass(frozen=True)
class _Question:
    """Models of the same fields and shapes have the same report: it is asked for once."""

    fields: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    config: PretrainedConfig = field(compare=False)
    which: str = field(compare=False)


@lru_cache(maxsize=64)
def _report(question: _Question) -> Mapping[str, Any] | None:
    """transformers' report of loading tensors of these shapes; None where it cannot load them without their values."""
    config = question.config
    tensors = {name: torch.empty(shape, device="meta") for name, shape in question.shapes}
    with quiet(), warnings.catch_warnings(action="ignore"):
        try:
            model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            return model_class.from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                dtype=torch.float32,
                device_map="meta",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )[1]
        except Exception:  # noqa: BLE001  whatever a conversion or a size raises
            _check_builds(config, question.which)
            return None


def _check_builds(config: PretrainedConfig, which: str) -> None:
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise InputError(no_model(which, vars(config.get_text_config()), error)) from error


def no_model(which: str, fields: Mapping[str, Any], error: Exception) -> str:
    """What to say of a config.json with these fields that describes no model."""
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    shown = ", ".join(f"{name}={fields[name]}" for name in sizes if name in fields)
    return (
        f"no model can be built from the config.json of {which} ({shown}): {error}. It was edited, or is of another "
        "version of transformers; copy the folder again"
    )


def _sizes(config: PretrainedConfig, tensors: Mapping[str, Tensor]) -> str:
    """The sizes that config.json and the tensors do not share, as far as names tell."""
    text = config.get_text_config()
    drafts = own_draft_layers(tensors)
    own = [name for name in tensors if not name.startswith(drafts)]
    layers = {int(match[1]) for match in map(LAYER.search, own) if match}
    found = {"num_hidden_layers": len(layers)} if layers else {}
    embedding = next((one for name, one in tensors.items() if _is_embedding(name)), None)
    if embedding is not None and embedding.dim() == 2:
        found |= {"vocab_size": embedding.shape[0], "hidden_size": embedding.shape[1]}
    wrong = {name: size for name, size in found.items() if getattr(text, name, size) != size}
    return "".join(f"{name}={getattr(text, name)}, and the weights have {size}; " for name, size in wrong.items())


def _is_embedding(name: str) -> bool:
    return name.endswith(("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight"))


def _canonical(config: PretrainedConfig) -> str:
    fields = {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}
    return type(config).__name__ + json.dumps(fields, sort_keys=True, default=str)


def _some(names: Collection[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join([*names][:SHOWN]) + (f" and {more} more" if more > 0 else "")
