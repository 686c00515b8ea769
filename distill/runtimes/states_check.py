"""Whether hidden states of a fixed text that an engine gives are those of its target, by what the engine and the
checkpoint say of it. Zeros, or states of other tokens, train a draft that looks sound until it is served (vLLM pull
request 46301: hybrid models; issue 45734). Faults are told in words, None where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from decode.common.errors import ConfigError
from decode.models.output_head import OutputHead, ends_of
from distill.runtimes.engine_runtime import EnginePasses, fault_of_next, fault_of_text
from distill.runtimes.probe import ROUNDING, distance


def fault_of_probe(passes: EnginePasses, states: Tensor, ids: list[int]) -> str | None:
    """Of those of the fixed text, in which no token but a repeated one has the state of another."""
    fault = fault_of_text(passes, states, len(ids))
    if fault is not None:
        return fault
    of_layer = dict(zip(passes.asked, states.float().unbind(1), strict=True))
    for layer, found in of_layer.items():
        if len(found.unique(dim=0)) < len(set(ids)):
            return f"states of layer {layer} that are the same at different tokens"
    for one, other in combinations(of_layer, 2):
        if torch.equal(of_layer[one], of_layer[other]):
            return f"states that are the same for the layers {one} and {other}"
    if 0 in of_layer:
        embedded = ends_of(passes.runtime.ends).embed(torch.tensor(ids)).cpu()
        if not torch.allclose(embedded.float(), of_layer[0], atol=1e-2, rtol=1e-2):
            return f"states of layer 0 that are not the embeddings of target.path={passes.runtime.target.path}"
    return None


def fault_of_p(passes: EnginePasses, states: Tensor, ids: list[int], log_p: Sequence[float], who: str) -> str | None:
    """What `who` says of p has to be what the checkpoint's norm and head make of the fixed text's states."""
    rounding = ROUNDING[passes.runtime.note.dtype]
    far = distance(log_p, _log_p_of_states(passes.final(states[:, passes.asked.index(passes.last)]), passes.head, ids))
    if far <= rounding:
        return None
    return (
        f"log p of a token by {who} and by target.path={passes.runtime.target.path} differ by {far:.3g} (root mean "
        f"square over {len(ids) - 1} tokens; rounding: {rounding:g}): it serves other weights, or gives other layers "
        f"than {passes.asked}"
    )


def check_engine(passes: EnginePasses, ids: list[int]) -> None:
    """Raise ConfigError where the engine that has just started gives other states of the fixed text than its target
    has; RunError where it gives none."""
    who = f"vLLM {passes.runtime.note.version}"
    answer = passes.runtime.engine("read", passes.asked).call({"rows": [ids], "log_p": True})
    states = passes.states_in(answer["files"][0], ids)
    fault = fault_of_probe(passes, states, ids)
    fault = fault and f"{who} gives {fault}"
    if fault is None and "log_p" in answer:
        fault = fault_of_p(passes, states, ids, answer["log_p"][0], who)
    if fault is None and "next_ids" in answer:
        fault = fault_of_next(passes, passes.final(states[-1:, -1])[0], answer["next_ids"][0])
        fault = fault and f"{who} {fault}"
    if fault is not None:
        raise ConfigError(
            f"{fault} (a fixed text, before any of the run's). Use another version of vLLM (target.vllm_python), "
            "or target.runtime=transformers, and another output_dir"
        )


def _log_p_of_states(states: Tensor, head: OutputHead, ids: list[int]) -> list[float]:
    """log p of each token but the first by final states (L, d) through the checkpoint's own head."""
    log_p = head(states[:-1]).float().log_softmax(-1)
    return log_p.gather(-1, torch.tensor(ids[1:], device=log_p.device)[:, None])[:, 0].tolist()
