"""Rows that are filled again as requests end, long prompts read in chunks, and passes of equal shape."""

from __future__ import annotations

import pytest
import torch

from decode import generate
from decode.common.errors import ConfigError
from decode.drafters.lm import LMDraft
from decode.forward import runner, target
from decode.rounds.rows import RequestState, Rows
from tests.decode.checks import VOCAB, ragged_prompts
from tests.tiers import by_default
from tests.tiny import tiny_llama


def test_waiting_requests_take_the_rows_of_finished_ones_in_order() -> None:
    requests = [RequestState(2, [index, 7], 4) for index in range(5)]
    rows = Rows(requests, 2)
    assert rows.refill() == []
    requests[1].reason = "eos"
    assert rows.refill() == [1]
    assert rows.seated == [0, 2]
    requests[0].reason = requests[2].reason = "length"
    assert rows.refill() == [0, 1]
    assert rows.seated == [3, 4]


@pytest.mark.parametrize("batch_size", by_default(1, [2, 1, 3]))
@pytest.mark.parametrize("drafted", [False, True])
def test_text_does_not_depend_on_how_many_rows_there_are(batch_size: int, drafted: bool) -> None:
    """Requests end at different tokens (each has its own end token), so rows are refilled at different rounds."""
    model = tiny_llama(VOCAB, dtype=torch.float64)
    drafter = LMDraft(tiny_llama(VOCAB, num_layers=1, seed=3, dtype=torch.float64)) if drafted else None
    ids, mask = ragged_prompts(7)
    settings = {"max_new_tokens": 24, "num_draft_tokens": 3, "eos_token_id": list(range(6))}
    whole = generate(model, None, ids, mask, **settings, seed=0)  # type: ignore[arg-type]
    events = []
    out = generate(model, drafter, ids, mask, batch_size=batch_size, observer=events.append, **settings, seed=0)  # type: ignore[arg-type]
    assert torch.equal(out.sequences, whole.sequences)
    assert out.stats.finish_reasons == whole.stats.finish_reasons
    assert len(set(out.lengths.tolist())) > 3
    for row in range(7):
        emitted = [token for event in events if event.row == row for token in event.tokens]
        prompt = int(mask[row].sum())
        assert len(emitted) == int(out.lengths[row]) - prompt


def test_a_long_prompt_is_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No mask is larger than a chunk by the tokens before it, and the text is transformers' own."""
    model = tiny_llama(VOCAB, num_layers=1, max_position_embeddings=8200)
    ids = torch.randint(0, VOCAB, (1, 8000), generator=torch.Generator().manual_seed(0))
    sizes = []
    real = target.layer_masks

    def counted(config, visible, *rest):  # noqa: ANN001, ANN002, ANN202
        sizes.append(visible.numel())
        return real(config, visible, *rest)

    monkeypatch.setattr(target, "layer_masks", counted)
    ours = generate(model, None, ids, max_new_tokens=8, temperature=0, eos_token_id=(), seed=0)
    assert max(sizes) <= runner.PREFILL_CHUNK * 8000
    theirs = model.generate(ids, do_sample=False, max_new_tokens=8)  # type: ignore[operator]
    assert torch.equal(ours.sequences, theirs)


def test_captures_follow_the_weights() -> None:
    """Packed weights are copies: after a training step they would be stale."""
    model = tiny_llama(VOCAB)
    ids, _ = ragged_prompts(1)
    generate(model, None, ids, max_new_tokens=20, temperature=0, eos_token_id=(), seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.5)
    ours = generate(model, None, ids, max_new_tokens=20, temperature=0, eos_token_id=(), seed=0)
    theirs = model.generate(ids, do_sample=False, max_new_tokens=20)  # type: ignore[operator]
    assert torch.equal(ours.sequences, theirs)


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_of_nothing_is_refused(batch_size: int) -> None:
    model = tiny_llama(VOCAB)
    with pytest.raises(ConfigError, match="batch_size"):
        generate(model, None, ragged_prompts(1)[0], batch_size=batch_size)
