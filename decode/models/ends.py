"""The two frozen ends of a target, its embedding and its output head: used by heads, owned by the target alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor
from transformers import PreTrainedModel

from decode.config import ModelConfig
from decode.models.checkpoint_check import check_report, quiet
from decode.models.load import describe_model, read_weights, resolve_device
from decode.models.output_head import OutputHead


@dataclass(frozen=True)
class Ends:
    """No module on purpose: a draft that refers to it neither saves nor trains nor moves the target's weights."""

    embed: Callable[[Tensor], Tensor]
    """Token ids (...) -> (..., d), scaled as the target's first layer gets them."""
    head: OutputHead
    """Final hidden states (..., d) -> logits (..., V)."""


def ends_of(model: PreTrainedModel) -> Ends:
    """Those of a model in memory, looked up at every call."""
    return Ends(lambda ids: model.get_input_embeddings()(ids), OutputHead(model))


def load_ends(source: ModelConfig) -> Ends:
    """Those of a checkpoint, of which no layer is read into memory: the model is loaded with none.

    Raises InputError as `decode.models.load.describe_model` does.
    """
    description = describe_model(source)
    fields = {"num_hidden_layers": 0, "layer_types": []}
    fields = {name: value for name, value in fields.items() if hasattr(description.config, name)}
    config = type(description.config)(**description.config.to_dict() | fields)
    with quiet():  # else it lists every weight of the layers that are left out on purpose
        model, report = read_weights(replace(source, device_map=None), config, role="target")
    check_report(report | {"unexpected_keys": ()}, source, role="target")
    return ends_of(model.to(resolve_device(source.device)).eval().requires_grad_(False))  # type: ignore[arg-type]
