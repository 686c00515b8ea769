"""What a live target makes of a batch is what the target says of each text alone."""

from __future__ import annotations

import pytest
import torch

from decode.drafters.base import Batch
from distill.objectives.target_distribution import Dense
from tests.tiny import tiny_llama
from train.live_target import LiveTarget

TEXTS = ([5, 9, 2, 7, 1], [3, 3, 8])


def two_texts() -> Batch:
    """In one row, with padding behind them."""
    ids = torch.tensor([[*TEXTS[0], *TEXTS[1], 0]])
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0]])
    document = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, -1]])
    return Batch(ids, positions, document, document >= 0)


def test_rows_hold_p_of_the_token_after_them_whatever_lies_before_their_text() -> None:
    model = tiny_llama(16, 16, dtype=torch.float64)
    batch = LiveTarget(model)(two_texts())
    assert batch.features is None
    assert batch.target is not None
    distribution = batch.target.chunk(torch.arange(8))
    assert isinstance(distribution, Dense)
    assert not distribution.log_p.requires_grad
    with torch.no_grad():
        alone = [model(torch.tensor([ids])).logits[0] for ids in TEXTS]
    torch.testing.assert_close(distribution.log_p, torch.cat(alone).float().log_softmax(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layers", [(0, 1, -1), (-1, 0)])
def test_hidden_states_come_in_the_order_of_the_layers(layers: tuple[int, ...]) -> None:
    """0 is the embedding, 1 the first layer's output, -1 the final state, from which the head makes logits."""
    model = tiny_llama(16, 16, dtype=torch.float64)
    batch = LiveTarget(model, layers)(two_texts())
    assert batch.features is not None
    assert batch.features.shape == (1, 9, len(layers), 16)
    with torch.no_grad():
        for text, place in zip(TEXTS, (slice(0, 5), slice(5, 8)), strict=True):
            out = model(torch.tensor([text]), output_hidden_states=True)
            known = {0: out.hidden_states[0], 1: out.hidden_states[1], -1: out.hidden_states[-1]}
            for number, tap in enumerate(layers):
                torch.testing.assert_close(batch.features[:, place, number], known[tap])
            final = batch.features[:, place, layers.index(-1)]
            torch.testing.assert_close(model.lm_head(final), out.logits)
