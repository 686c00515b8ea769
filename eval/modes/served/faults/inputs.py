"""Faults in what a draft is given: the map of a reduced draft vocabulary, the embedding, the output head, the target's
hidden states that an engine hands over, and tensors that it does not find."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from decode.drafters.eagle3 import usual_taps
from eval.modes.served.faults.reading import ALL, BLOCKS, HEADS, Hypothesis, Reading, Variants, random_like

_EMBEDDING, _HEAD = r"embed_tokens\.weight$", r"lm_heads?\.(0\.)?weight$"
_GROUPS = {
    "fc": r"(^|\.)fc\.weight$",
    "queries, keys and values": r"[qkv]_proj\.weight$",
    "the projection behind attention": r"o_proj\.weight$",
    "gate_proj and up_proj": r"(gate|up)_proj\.weight$",
    "down_proj": r"down_proj\.weight$",
    "all layers, as where names have a prefix that is not known": r"(layers|blocks)\.",
}


def _map_left_out(reading: Reading) -> Variants:
    ids = reading.served.drafted
    if ids is not None:
        yield "draft id i for the target's token i", reading.with_served(drafted=torch.arange(len(ids)))


def _map_in_another_order(reading: Reading) -> Variants:
    ids = reading.served.drafted
    if ids is not None:
        every = torch.arange(len(ids))
        last = len(reading.served.embedding) - 1
        yield "the last one first", reading.with_served(drafted=ids.flip(0))
        yield (
            "its steps, the last one first",
            reading.with_served(drafted=((ids - every).flip(0) + every).clamp(0, last)),
        )


def _embedding(reading: Reading) -> Variants:
    for name in reading.names(_EMBEDDING):
        yield "random rows", reading.changed([name], random_like)
        yield "rows of zeros", reading.changed([name], torch.zeros_like)


def _moved_rows(reading: Reading) -> Variants:
    for what, pattern in (("the embedding's", _EMBEDDING), ("the output head's", _HEAD)):
        names = reading.names(pattern)
        for by, word in ((1, "before"), (-1, "behind")):
            if names:
                moved = reading.changed(names, partial(torch.roll, shifts=by, dims=0))
                yield f"{what}, by one: each stands for the token {word} it", moved


def _targets_ends(reading: Reading) -> Variants:
    head, ids = reading.served.head, reading.served.drafted
    for name in reading.names(_HEAD):
        rows = head if ids is None else head[ids]
        if len(reading.weights[name]) == len(rows):
            yield "the target's output head", reading.with_weights({name: rows})
        if ids is not None:
            yield "the target's output head, of its first tokens", reading.with_weights({name: head[: len(ids)]})
    for name in reading.names(_EMBEDDING):
        yield "the target's embedding", reading.with_weights({name: reading.served.embedding})


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


def _random(reading: Reading) -> Variants:
    for what, pattern in _GROUPS.items():
        names = [name for name in reading.names(pattern) if reading.weights[name].dim() > 1]
        if names:
            yield f"{what}, zeros", reading.changed(names, torch.zeros_like)
            yield f"{what}, random", reading.changed(names, random_like)
    matrices = [name for name in reading.weights if reading.weights[name].dim() > 1]
    yield (
        "any of them, memory that holds no numbers",
        reading.changed(matrices[:1], lambda weight: torch.full_like(weight, torch.nan)),
    )


def _plain_norms(reading: Reading) -> Variants:
    for what, pattern in (
        ("of queries", r"q_norm\.weight$"),
        ("of keys", r"k_norm\.weight$"),
        ("of queries and keys", r"[qk]_norm\.weight$"),
        ("all", r"norm[\w.]*\.weight$"),
    ):
        names = reading.names(pattern)
        if names:
            yield f"{what}, ones", reading.changed(names, torch.ones_like)


def _precision(reading: Reading) -> Variants:
    for dtype in (torch.bfloat16, torch.float16):
        rounded = {name: weight.to(dtype).float() for name, weight in reading.weights.items()}
        if any(not torch.equal(rounded[name], weight) for name, weight in reading.weights.items()):
            yield str(dtype).removeprefix("torch."), reading.with_weights(rounded)


LISTED = BLOCKS | {"eagle3", "peagle"}
_LISTS = "Write indices of hidden_states (0 the embeddings) at the top, and layers, one less, in eagle_config and "
_LISTS += "target_layer_ids; python -m train.check shows what each list means"
_MISSING = "vLLM and SGLang leave tensors random that they do not find, and SGLang skips names that it does not know"
GIVEN = (
    Hypothesis(
        "the map of the draft vocabulary (d2t, token_map) is left out", HEADS, _map_left_out,
        "drafted tokens stand for other ones, and next to nothing is accepted",
        "Write d2t (what to add to a draft id) or, for Medusa, token_map (the ids); python -m train.export does",
    ),
    Hypothesis(
        "the map of the draft vocabulary is in another order", HEADS, _map_in_another_order,
        "rows of the output head stand for other tokens",
        "Write the ids in ascending order, and the rows of the output head in the same one",
    ),
    Hypothesis(
        "an embedding that is not the target's", HEADS, _embedding,
        "vLLM keeps the rows that the folder ships, others take the target's",
        "Ship the target's own rows, or none; python -m train.check compares them", is_random=True,
    ),
    Hypothesis(
        "rows of the embedding or the output head are moved", ALL, _moved_rows,
        "each token has the row of its neighbour", "Write the rows in the order of the tokens",
    ),
    Hypothesis(
        "the target's embedding or output head in place of the draft's own", HEADS, _targets_ends,
        "the draft was trained with rows of its own, and the engine takes the target's",
        "Serve with an engine that reads the folder's own rows, or train on the target's",
    ),
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
)  # fmt: skip
LOST = (
    Hypothesis(
        "weights that the engine did not load", HEADS | {"lm"}, _random, _MISSING,
        "Name the tensors as the engine does; python -m train.check format=ENGINE says which it would miss",
        is_random=True,
    ),
    Hypothesis(
        "weights of norms that the engine did not load", ALL - {"medusa"}, _plain_norms, _MISSING,
        "Name the tensors as the engine does; python -m train.check format=ENGINE says which it would miss",
    ),
    Hypothesis(
        "another precision", ALL, _precision,
        "the engine rounds the draft's weights; ties between tokens fall otherwise",
        "Serve in the precision that the draft was saved in (--dtype)", is_random=True,
    ),
)  # fmt: skip
