"""Quantised targets: taken where a token's pass does not depend on which others are read beside it.

Weights may be stored in any way. What is rounded while the model runs is the activations, and a scale that is taken
over all tokens of a pass changes with the drafts in it: the same token then has another distribution with a draft than
without one, by far more than rounding of sums. LLM.int8 on a toy: its logits moved by 0.1 when two other rows came
along, and by 0.0 at llm_int8_threshold=0.

Where the activations of each token are rounded, the last bit of a sum, which differs between passes of different
shapes, may move a value by a whole step: texts with and without a draft then part as in bf16, unless strict=True.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from decode.common.errors import InputError

WEIGHTS_ALONE = ("aqlm", "auto-round", "awq", "eetq", "gguf", "gptq", "higgs", "hqq", "mxfp4", "spqr", "vptq")
"""Methods that leave activations alone."""
BY_TOKEN = ("bitnet", "fbgemm_fp8", "fp8")
"""Methods that round the activations of each token by a scale of its own, or by one that is a constant."""
TORCH_DYNAMIC = "torch.ao.nn.quantized.dynamic"
SCHEMES = {
    "Int8WeightOnlyConfig": "int8",
    "Int4WeightOnlyConfig": "int4",
    "PrototypeInt4WeightOnlyConfig": "int4",
    "Int8DynamicActivationInt8WeightConfig": "int8_dynamic",
}
"""Class of torchao's -> our word (target.quantization)."""
Settings = Mapping[str, Any]


def refuse_unreadable(found: Any, path: str, role: str) -> None:
    """Raise InputError where `found`, a quantization_config, is no table, or names no method."""
    is_table = found is None or isinstance(found, Mapping) or hasattr(found, "to_dict")
    if not is_table or (isinstance(found, Mapping) and _method(found) is None):
        what = "names no quant_method" if is_table else f"is {found!r} and no table with a quant_method"
        raise InputError(
            f"the quantization_config of {role}.path={path} {what}, so nothing says how its weights are read. Copy "
            "the folder again, or take quantization_config out where the weights are plain ones"
        )


def refuse_dependent_rows(config: PretrainedConfig, path: str) -> None:
    """Raise InputError for a quantisation whose passes mix tokens, so that the text would depend on the draft, and for
    one that is not known here."""
    refuse_unreadable(getattr(config, "quantization_config", None), path, "target")
    settings = settings_of(config)
    if settings is None:
        return
    method = _method(settings)
    if method in (*WEIGHTS_ALONE, *BY_TOKEN):
        return
    if method not in RULES:
        known = sorted((*WEIGHTS_ALONE, *BY_TOKEN, *RULES))
        raise InputError(
            f"target.path={path} is quantised by {method}, and whether a token's pass depends there on the others "
            f"beside it is not known here; then the text would depend on the draft. Known are {', '.join(known)}"
        )
    reason = RULES[method](settings)
    if reason is not None:
        raise InputError(
            f"target.path={path} is quantised by {method} with {reason}: a token's distribution depends on the others "
            "in its pass, drafted ones too. Quantise weights alone, or take a scale for each token"
        )


def refuse_dependent_layers(model: nn.Module) -> None:
    """The same for layers that torch itself quantised in memory, of which no configuration tells."""
    found = [name for name, module in model.named_modules() if type(module).__module__.startswith(TORCH_DYNAMIC)]
    if found:
        raise InputError(
            f"{len(found)} layers of the target ({', '.join(found[:2])}) are torch's dynamically quantised ones: "
            "one scale for a whole pass, drafts too. Use the model without them, or one whose weights alone are "
            "quantised"
        )


def settings_of(config: PretrainedConfig) -> Settings | None:
    """quantization_config as config.json has it; None where there is none."""
    found = getattr(config, "quantization_config", None)
    return found if found is None or isinstance(found, Mapping) else found.to_dict()


def method_of(config: PretrainedConfig) -> str | None:
    """How a checkpoint, or a model in memory, is quantised: one of our schemes, else the method's name; None where it
    is not."""
    settings = settings_of(config)
    if settings is None:
        return None
    return scheme_of(config) or _method(settings)


def scheme_of(config: PretrainedConfig) -> str | None:
    """The scheme of ours by which torchao quantised a model; None for every other method."""
    settings = settings_of(config) or {}
    if _method(settings) != "torchao":
        return None
    found = {SCHEMES.get(kind) for kind, _ in torchao_kinds(settings.get("quant_type"))}
    return found.pop() if len(found) == 1 else None


def _method(settings: Settings) -> str | None:
    named = settings.get("quant_method")
    if settings.get("load_in_8bit") or settings.get("load_in_4bit"):  # as older ones say it, without a name
        return "bitsandbytes"
    return None if named is None else str(getattr(named, "value", named))


def _bitsandbytes(settings: Settings) -> str | None:
    threshold = settings.get("llm_int8_threshold", 6.0)
    if settings.get("load_in_8bit") and threshold:
        return (
            f"load_in_8bit and llm_int8_threshold={threshold}, by which one outlier decides how a column of all tokens "
            "is computed (0.0 decides nothing)"
        )
    return None


def _compressed_tensors(settings: Settings) -> str | None:
    groups = settings.get("config_groups") or {}
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        scheme = (group or {}).get("input_activations") if isinstance(group, Mapping) else None
        if isinstance(scheme, Mapping) and scheme.get("dynamic") and scheme.get("strategy") not in ("token", "group"):
            return f"dynamic activation scales of strategy {scheme['strategy']} in {name}"
    return None


def _torchao(settings: Settings) -> str | None:
    for kind, data in torchao_kinds(settings.get("quant_type")):
        granularity = data.get("granularity")
        each = granularity if isinstance(granularity, list | tuple) else [granularity]
        per_tensor = [one for one in each if isinstance(one, Mapping) and one.get("_type") == "PerTensor"]
        by_default = kind.replace("_", "").lower().startswith("float8dynamicactivationfloat8") and granularity is None
        if by_default or ("Dynamic" in kind and per_tensor):
            return f"{kind} of PerTensor granularity, one activation scale for a whole pass"
        if data.get("weight_only_decode"):
            return f"{kind} and weight_only_decode, by which passes over one token are rounded in another way"
    return None


def torchao_kinds(quant_type: Any) -> Iterator[tuple[str, Settings]]:
    """(class, fields) of every configuration inside, by layer or for all."""
    if isinstance(quant_type, str):
        yield quant_type, {}
    elif isinstance(quant_type, Mapping) and str(quant_type.get("_type", "")).endswith("Config"):
        found = quant_type.get("_data")
        data = found if isinstance(found, Mapping) else {}
        yield quant_type["_type"], data
        yield from torchao_kinds({name: one for name, one in data.items() if isinstance(one, Mapping)})
    elif isinstance(quant_type, Mapping):
        for one in quant_type.values():
            yield from torchao_kinds(one) if isinstance(one, Mapping) else ()


def _quanto(settings: Settings) -> str | None:
    kind = settings.get("activations")
    return None if kind is None else f"activations={kind}, whose scales are not known to be of one token"


RULES: dict[str, Callable[[Settings], str | None]] = {
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "quanto": _quanto,
    "torchao": _torchao,
}
"""By method: what in its settings makes tokens depend on one another; None for nothing."""
