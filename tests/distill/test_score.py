"""Scoring: p of each learned token, whatever it is batched with, and tail draws that belong to one text alone."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from distill.records.distribution_stores import Layout, StoreName
from distill.records.feature_codes import CODES, FeatureLayout
from distill.records.record_shards import Record
from distill.scorer import Scorer
from distill.target_passes import ModelPasses
from tests.tiny import tiny_llama

V, WIDTH = 64, 32
TEXTS = [[5, 9, 1], [7, 7, 3, 20, 11, 30, 2, 8], [40, 41, 42, 43, 44]]
MASKS = [[0, 1, 1], [0, 0, 1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]
TARGET = tiny_llama(V, WIDTH)


def layout(*stores: StoreName, features: FeatureLayout | None = None, tail: int = 4) -> Layout:
    return Layout(list(stores), V, WIDTH, "float32", head=2, tail=tail, topk=5, features=features)


def record(number: int, prompt: int = 0, turn: int = 0) -> Record:
    meta = {"document": f"d{number}", "prompt": prompt, "turn": turn}
    return Record(np.array(TEXTS[number]), np.array(MASKS[number], dtype=bool), meta)


def tails(scorer: Scorer, records: Sequence[Record]) -> list[list]:
    """The token ids of each record's tail draws."""
    scorer.score(records)
    return [one.payload["head_tail.ids"][:, 2:].tolist() for one in records]


@pytest.mark.parametrize("chunk_rows", [2, 1000])
def test_p_of_a_token_is_that_of_the_text_before_it(chunk_rows: int) -> None:
    """Texts of other lengths in the batch pad it, and tokens that are not learned lie between."""
    scorer = Scorer(ModelPasses(TARGET, [], 2), layout("full"), seed=0)
    scorer.chunk_rows = chunk_rows
    records = [record(number, prompt=number) for number in range(3)]
    scorer.score(records)
    for one in records:
        with torch.no_grad():
            exact = TARGET(torch.from_numpy(one.ids)[None]).logits[0].double().log_softmax(-1)
        before = [place - 1 for place, learned in enumerate(one.loss_mask) if learned]
        found = torch.from_numpy(one.payload["full.log_p"]).double()
        torch.testing.assert_close(found, exact[before], atol=0.01, rtol=0.001)


def test_a_target_in_bfloat16_gives_p_in_float32() -> None:
    """Of near-equal logits in bfloat16 a distribution in bfloat16 would be off by 3 % of p."""
    model = tiny_llama(V, WIDTH).bfloat16()
    one = record(1)
    Scorer(ModelPasses(model, [], 1), layout("full"), seed=0).score([one])
    with torch.no_grad():
        exact = model(torch.from_numpy(one.ids)[None]).logits[0, [1, 4, 5]].double().log_softmax(-1)
    assert float((torch.from_numpy(one.payload["full.log_p"]).double() - exact).abs().max()) < 0.006


def test_each_text_has_tail_draws_of_its_own() -> None:
    """Draws shared by two texts would make the errors of their estimates agree, and averages over texts worse."""
    same = [record(1, prompt, turn) for prompt, turn in ((0, 0), (1, 0), (0, 1))]
    drawn = tails(Scorer(ModelPasses(TARGET, [], 3), layout("head_tail", tail=6), seed=0), same)
    assert drawn[0] != drawn[1]
    assert drawn[0] != drawn[2]
    assert drawn[1] != drawn[2]
    heads = [one.payload["head_tail.ids"][:, :2].tolist() for one in same]
    assert heads[0] == heads[1] == heads[2]
    (other_seed,) = tails(Scorer(ModelPasses(TARGET, [], 3), layout("head_tail", tail=6), seed=1), [record(1)])
    assert other_seed != drawn[0]
    rows = [tuple(row) for row in drawn[0]]
    assert len(set(rows)) == len(rows) == 3


def test_tail_draws_do_not_depend_on_what_a_text_is_scored_with() -> None:
    scorer = Scorer(ModelPasses(TARGET, [], 2), layout("head_tail"), seed=0)
    together = tails(scorer, [record(number, prompt=number) for number in range(3)])
    assert together == [tails(scorer, [record(number, prompt=number)])[0] for number in range(3)]
    scorer.chunk_rows = 1
    assert together == tails(scorer, [record(number, prompt=number) for number in range(3)])


def test_hidden_states_are_those_of_every_token_and_of_no_padding() -> None:
    kept = FeatureLayout([1, 0], WIDTH, "bf16", 0)
    records = [record(number, prompt=number) for number in range(3)]
    Scorer(ModelPasses(TARGET, kept.layers, 3), layout("topk", features=kept), 0, CODES["bf16"](kept, {})).score(
        records
    )
    for one in records:
        bits = torch.from_numpy(one.features["features.0.bits"]).view(torch.bfloat16)
        embeddings = TARGET.get_input_embeddings()(torch.from_numpy(one.ids)).detach()
        assert torch.equal(bits, embeddings.bfloat16())
        assert one.feature_errors is not None
        assert one.feature_errors.shape == (len(one.ids), 2)
        assert float(one.feature_errors.max()) < 2**-16  # a rounding to 8 bits is off by at most 2 ** -9
