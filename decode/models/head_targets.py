"""Which targets heads can be built on: those whose embedding, layers, last norm and output head do what heads take them
for, whatever their type is called."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from decode.common.errors import InputError
from decode.models.hidden_states import FINAL, Taps
from decode.models.output_head import ends_of
from decode.models.small import random_like
from decode.models.structure import last_norm_of, layers_of

_found: dict[str, str | None] = {}
"""Config -> what `_strangeness` says of it."""


def check_taps(config: PretrainedConfig, taps: Sequence[int], path: str) -> None:
    """Raise InputError for a target whose hidden states are not where heads look for them, by a small random model of
    its architecture, and for layers that it does not have."""
    asked = config.to_json_string()
    if asked not in _found:
        _found[asked] = _strangeness(config)
    if _found[asked] is not None:
        raise InputError(
            f"{path} is a {config.model_type} model, whose hidden states heads cannot be built on: {_found[asked]}. "
            "Use draft=lm, which needs none"
        )
    num_layers = config.get_text_config().num_hidden_layers
    wrong = [tap for tap in taps if tap != FINAL and not 0 <= tap <= num_layers]
    if wrong or len(set(taps)) < len(taps) or not taps:
        raise InputError(
            f"the hidden states {list(taps)} are asked of {path}, which has {num_layers} layers: name different ones "
            f"of 0 (embeddings) to {num_layers} (the last layer's raw output), or {FINAL} for the final state, normed"
        )


def _strangeness(config: PretrainedConfig) -> str | None:
    """Why heads cannot be built on such a target; None where they can."""
    try:
        return strangeness(random_like(config))
    except InputError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - whatever its own code raises where it is made small
        return f"no small model of its kind can be made to look at them ({type(error).__name__}: {error})"


@torch.no_grad()
def strangeness(model: PreTrainedModel) -> str | None:
    """In what a pass of `model` over four tokens is not what heads take it for: embedding, layers with the hidden
    states between them that transformers returns too, last norm, output head. None where it is."""
    ids = torch.tensor([[1, 2, 3, 4]], device=model.device)
    last, ends = len(layers_of(model)), ends_of(model)
    with Taps(model, (*range(last + 1), FINAL)) as seen:
        out = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    *states, raw, final = seen.each()
    theirs = out.hidden_states
    if theirs is None or len(theirs) != last + 1:
        return f"transformers returns {len(theirs or ())} of them, and it has {last} layers"
    wrong = [index for index, (ours, other) in enumerate(zip(states, theirs, strict=False)) if not _alike(ours, other)]
    if wrong or not (_alike(final, theirs[last]) or _alike(raw, theirs[last])):
        return f"those between its layers are not those that transformers returns (of {[*wrong, last][0]})"
    if not _alike(ends.embed(ids), states[0]):
        return "its first layer does not get what its embedding gives: positions or another scale come between"
    if not _alike(last_norm_of(model)(raw), final):
        return "its final states are not its last layer's, normed"
    return None if _alike(ends.head(final), out.logits) else "its logits are not its output head's of its final states"


def _alike(ours: Tensor, theirs: Tensor) -> bool:
    theirs = theirs.to(ours.device)
    return ours.shape == theirs.shape and bool((ours - theirs).abs().max() <= 1e-4 * theirs.abs().max())
