"""strict=True: plain and speculative loops give the same bits in bfloat16, where shapes otherwise decide near-ties."""

import pytest
import torch

from decode.api import generate
from decode.common.errors import ConfigError
from decode.config import SamplingConfig
from decode.drafters.lm import LMDraft
from decode.forward.target import CachedModel
from tests.decode.checks import both_ways
from tests.tiers import by_default
from tests.tiny import tiny_llama

VOCAB, NODES = 256, 5


def target(num_layers: int = 2):
    shape = {"vocab_size": VOCAB, "hidden_size": 64, "num_heads": 4, "num_layers": num_layers}
    return tiny_llama(dtype=torch.bfloat16, max_position_embeddings=1024, **shape)


@pytest.mark.parametrize("length", [3, 250, 254])
def test_a_token_has_the_same_logits_at_every_place_of_a_pass(length: int) -> None:
    """Bit for bit, as row 0 (plain decoding) or row j, in passes that end before slot 256 or behind it."""
    model, batch = target(), 3
    ids = torch.randint(0, VOCAB, (batch, length + 2 * NODES), generator=torch.Generator().manual_seed(0))
    plain, drafted = CachedModel(model, batch, 600), CachedModel(model, batch, 600)
    logits = {}
    with torch.inference_mode():
        for runner in (plain, drafted):
            runner.prefill(ids, [0] * batch, [length] * batch)
        for at in range(length, length + NODES):  # one token a pass, the rest of it filler
            filler = ids[:, at : at + 1].expand(-1, NODES)
            logits[at] = plain.chain(filler, torch.full((batch, 1), at), at, strict=True)[:, 0]
        together = drafted.chain(ids[:, length : length + NODES], torch.full((batch, 1), length), length, strict=True)
    for j in range(NODES):
        assert torch.equal(logits[length + j], together[:, j]), f"row {j}"


@pytest.mark.parametrize("temperature", by_default(1, [1.0, 0.0]))
@pytest.mark.parametrize("batch", by_default(1, [3, 1]))
def test_strict_speculative_text_is_the_strict_plain_text_in_bf16(temperature: float, batch: int) -> None:
    """Two thousand tokens over the four cases, acceptance from 0 to k in turn, past the first bucket of the cache."""
    settings = {"temperature": temperature, "max_new_tokens": 260, "num_draft_tokens": 4, "strict": True}
    plain, speculative = both_ways(target(), "oracle", batch, **settings)
    assert torch.equal(plain.sequences, speculative.sequences)
    assert speculative.stats.num_target_passes < plain.stats.num_target_passes


@pytest.mark.slow
def test_strict_holds_when_waiting_requests_take_rows_at_other_times() -> None:
    model, draft = target(), LMDraft(target(num_layers=1))
    ids = torch.randint(0, VOCAB, (5, 12), generator=torch.Generator().manual_seed(2))
    mask = torch.tensor([[column >= 2 * row for column in range(12)] for row in range(5)]).long()
    settings = {
        "max_new_tokens": 40,
        "batch_size": 2,
        "strict": True,
        "seed": 0,
        "eos_token_id": tuple(range(0, VOCAB, 16)),
    }
    plain = generate(model, None, ids, mask, **settings)
    speculative = generate(model, draft, ids, mask, **settings)
    assert torch.equal(plain.sequences, speculative.sequences)
    assert len(set(plain.lengths.tolist())) > 1  # rows ended at different times


def test_both_loops_run_passes_of_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal bits on one machine may be luck; equal shapes are why they are equal on all."""
    shapes: list[tuple[object, ...]] = []
    run = CachedModel.run
    monkeypatch.setattr(CachedModel, "run", lambda self, key, *rest: shapes.append(key) or run(self, key, *rest))
    both_ways(target(), "oracle", 2, num_draft_tokens=3, max_new_tokens=30, strict=True)
    passes = {shape for shape in shapes if shape[0] == "straight" and isinstance(shape[1], int)}  # not while traced
    assert passes == {("straight", 4, 256, None)}  # nodes, slots in sight, all layers


def test_trees_are_refused() -> None:
    with pytest.raises(ConfigError, match="strict=true"):
        generate(target(), None, torch.tensor([[1, 2]]), tree="2x2", strict=True)
    with pytest.raises(ConfigError, match="tree=2x2"):
        SamplingConfig(tree="2x2", strict=True)
    assert SamplingConfig(tree="1x1", strict=True).strict
