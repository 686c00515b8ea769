"""Which hypothesis explains which of the faults that are done to folders (tests.engines.faults)."""

from __future__ import annotations

_MAP = "the map of the draft vocabulary"
_LOST = "weights that the engine did not load"
NAMED: dict[tuple[str, str], str] = {
    ("eagle3", "d2t left out"): f"{_MAP} (d2t, token_map) is left out",
    ("eagle3", "d2t out of order"): f"{_MAP} is in another order",
    ("eagle3", "a random embedding"): "an embedding that is not the target's",
    ("eagle3", "norm_before_residual"): "norm_before_residual is taken otherwise",
    ("eagle3", "another rope"): "another rotary base",
    ("eagle3", "hidden states one layer early"): "hidden states of layers beside the trained ones",
    ("eagle3", "hidden states not named"): "hidden states of the engine's default layers",
    ("eagle3", "fc left out"): _LOST,
    ("eagle3", "a projection left out"): _LOST,
    ("eagle3", "the output head left out"): "the target's embedding or output head in place of the draft's own",
    ("eagle3", "the output head's rows moved"): "rows of the embedding or the output head are moved",
    ("eagle3", "states before embeddings"): "embedding and state in the other order",
    ("eagle3", "hidden states backwards"): "hidden states in another order",
    ("eagle3", "norm_output left out"): "norm_output is taken otherwise",
    ("eagle3", "not a number"): _LOST,
    ("medusa", "medusa_fc_bias left out"): "Medusa's biases are dropped",
    ("medusa", "token_map out of order"): f"{_MAP} is in another order",
    ("medusa", "heads swapped"): "Medusa heads out of order",
    ("medusa", "a head left out"): "a Medusa head that the engine did not load",
    ("medusa", "the output head's rows moved"): "rows of the embedding or the output head are moved",
    ("medusa", "the target's layers counted"): "Medusa heads of more layers than they have",
    ("dflash", "hidden states one layer late"): "hidden states of layers beside the trained ones",
    ("dflash", "the mask left out"): "another mask",
    ("dflash", "another rope"): "another rotary base",
    ("dflash", "causal"): "a causal block",
    ("dflash", "fc left out"): _LOST,
    ("dflash", "norms of queries left out"): "weights of norms that the engine did not load",
    ("lm", "another rope"): "another rotary base",
    ("lm", "untied by mistake"): "an untied output head",
    ("lm", "a projection left out"): _LOST,
}
UNEXPLAINED = {("eagle3", "another epsilon")}
"""No epsilon is tried."""
