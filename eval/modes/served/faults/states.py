"""Faults in the target's hidden states that an engine hands to a head."""

from __future__ import annotations

from dataclasses import replace

import torch

from decode.drafters.eagle3 import usual_taps
from decode.models.hidden_states import FINAL
from eval.modes.served.faults.hypotheses import BLOCKS, HEADS, Hypothesis, Reading, Variants

LISTED = BLOCKS | {"eagle3"}
_LISTS = "Write indices of hidden_states (0 the embeddings) at the top, and layers, one less, in eagle_config and "
_LISTS += "target_layer_ids; python -m train.check shows what each list means"


def _neighbours(reading: Reading) -> Variants:
    for by, word in ((-1, "lower"), (1, "higher")):
        taps = tuple(tap + by for tap in reading.taps)
        if all(0 <= tap <= reading.num_layers for tap in taps):
            yield f"{list(taps)} for {list(reading.taps)}, one layer {word}", replace(reading, taps=taps)


def _default(reading: Reading) -> Variants:
    taps = usual_taps(reading.num_layers)
    if len(reading.taps) == 3 and taps != reading.taps and 0 < taps[0] < taps[1] < taps[2]:
        yield f"{list(taps)} for {list(reading.taps)}", replace(reading, taps=taps)


def _backwards(reading: Reading) -> Variants:
    if len(reading.taps) > 1:
        yield "the last layer's first", replace(reading, taps=reading.taps[::-1])
        for name in reading.names(r"(^|\.)fc\.weight$"):
            columns = reading.weights[name].chunk(len(reading.taps), -1)
            yield "columns of fc, the last layer's first", reading.with_weights({name: torch.cat(columns[::-1], -1)})


def _final(reading: Reading) -> Variants:
    if reading.taps == (FINAL,):
        yield "the last layer's output, before the target's last norm", replace(reading, taps=(reading.num_layers,))
        yield "the output of the layer before the last", replace(reading, taps=(reading.num_layers - 1,))


def _late(reading: Reading) -> Variants:
    yield "those of the token before", replace(reading, lag=1)


STATES = (
    Hypothesis(
        "hidden states of layers beside the trained ones", LISTED, _neighbours,
        "one convention counts the embeddings as state 0, the other counts layers, and the engine reads the list by "
        "the other one", _LISTS,
    ),
    Hypothesis(
        "hidden states of the engine's default layers", LISTED, _default,
        "the engine does not find the list, and takes (2, L // 2, L - 3) of L layers (58.9 became 1.2 % accepted, vLLM "
        "PR 50170)", _LISTS,
    ),
    Hypothesis(
        "hidden states in another order", LISTED, _backwards,
        "fc reads the states of one layer with the columns of another",
        "Order the columns of fc by ascending layers, as engines hand states over",
    ),
    Hypothesis(
        "another hidden state than the final one", HEADS - LISTED, _final,
        "heads read a state that is scaled otherwise",
        "Serve it with an engine that hands over the state behind the target's last norm",
    ),
    Hypothesis(
        "hidden states a token late", HEADS, _late,
        "the draft goes on from the state of the token before",
        "Report it to the engine's makers with both counters; another version of the engine may be right",
    ),
)  # fmt: skip
