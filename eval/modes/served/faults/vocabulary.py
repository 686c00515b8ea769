"""Faults in what tokens stand for: the map of a reduced draft vocabulary, the embedding, the output head."""

from __future__ import annotations

import torch

from eval.modes.served.faults.hypotheses import ALL, HEADS, Hypothesis, Reading, Variants, random_like

_EMBEDDING, _HEAD = r"embed_tokens\.weight$", r"lm_heads?\.(0\.)?weight$"


def _map_left_out(reading: Reading) -> Variants:
    ids = reading.served.drafted
    if ids is not None:
        yield "draft id i for the target's token i", reading.with_served(drafted=torch.arange(len(ids)))


def _map_by_the_other_rule(reading: Reading) -> Variants:
    ids = reading.served.drafted
    if ids is None:
        return
    every, last = torch.arange(len(ids)), len(reading.served.embedding) - 1
    yield "what is to be added to a draft id is taken for the id", reading.with_served(drafted=ids - every)
    yield "ids are added to draft ids", reading.with_served(drafted=(ids + every).clamp(max=last))


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
        rows = reading.weights[name]
        yield "random rows", reading.with_weights({name: random_like(rows)})
        yield "rows of zeros", reading.with_weights({name: torch.zeros_like(rows)})


def _moved_rows(reading: Reading) -> Variants:
    for what, pattern in (("the embedding's", _EMBEDDING), ("the output head's", _HEAD)):
        names = reading.names(pattern)
        for by, word in ((1, "before"), (-1, "behind")):
            if names:
                moved = {name: reading.weights[name].roll(by, 0) for name in names}
                yield f"{what}, by one: each stands for the token {word} it", reading.with_weights(moved)


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


def _random_head(reading: Reading) -> Variants:
    for name in reading.names(_HEAD):
        yield "random rows", reading.with_weights({name: random_like(reading.weights[name])})


VOCABULARY = (
    Hypothesis(
        "the map of the draft vocabulary (d2t, token_map) is left out", HEADS, _map_left_out,
        "drafted tokens stand for other ones, and next to nothing is accepted",
        "Write d2t (what to add to a draft id) or, for Medusa, token_map (the ids); python -m train.export does",
    ),
    Hypothesis(
        "the map of the draft vocabulary is read by the other rule", HEADS, _map_by_the_other_rule,
        "d2t holds what to add to a draft id, and one side takes it for the ids themselves",
        "Write d2t = ids - arange(len(ids)), of the ascending ids",
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
        "an output head of random numbers", ALL, _random_head,
        "the engine finds no output head and takes none of the target's (SGLang issue 27829)",
        "Ship lm_head.weight with the rows of the drafted tokens", is_random=True,
    ),
)  # fmt: skip
