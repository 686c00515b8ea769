"""Reduced draft vocabularies: losses and acceptance against their definitions over all tokens."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from decode.common.errors import ConfigError
from decode.drafters.base import Batch, Step
from distill.objectives.draft_vocabulary import frequent_tokens, likeliest, places, renormalised, restricted
from distill.objectives.objective import TERMS, Objective
from distill.objectives.row_losses import acceptance
from distill.objectives.scoring import Scores, score
from distill.objectives.target_distribution import Dense, FullRows, Sparse, SparseRows
from distill.sequences import TextSequences, TrainSequence, record_sequences
from tests.distill.folders import folder_of, record
from tests.tiny import tiny_tokenizer
from train.training_inputs import special_tokens

V, VOCAB = 7, torch.tensor([0, 2, 3, 6])
ROWS = torch.arange(12)


def source(*texts: list[int]) -> TextSequences:
    """Sequences of which all tokens but the first are learned."""
    learned = [np.arange(len(text)) > 0 for text in texts]
    return TextSequences([TrainSequence(np.array(text), mask) for text, mask in zip(texts, learned, strict=True)])


def test_frequent_tokens_are_counted_where_they_are_learned() -> None:
    texts = source([5, 3, 3, 4], [5, 3, 4, 1])
    expected = {2: ([3, 4], 5 / 6), 4: ([0, 1, 3, 4], 1), 8: (list(range(8)), 1)}
    for size, (tokens, share) in expected.items():  # of tokens that never occur, the lowest ids
        found, covered = frequent_tokens(texts, size, 8)
        assert (found.tolist(), covered) == (tokens, share)


def test_special_tokens_are_always_in() -> None:
    """What is in only because it must be counts for what it is learned."""
    found, covered = frequent_tokens(source([5, 3, 3, 4]), 3, 8, always=(7, 6, 7))
    assert (found.tolist(), covered) == ([3, 6, 7], 2 / 3)
    assert frequent_tokens(source([5], [3]), 3, 8)[1] == 0  # nothing is learned


def test_what_lies_behind_the_length_that_is_trained_on_is_not_counted(tmp_path: Path) -> None:
    shards = [[record(0, [0, 1, 1, 2, 2, 2], [1, 2, 3, 4, 5]), record(1, [4, 4, 4, 4], [3])]]
    folder = folder_of(tmp_path, [*shards, [record(2, [3, 3, 3, 3, 3, 3], [1, 3, 4, 5])]])
    assert frequent_tokens(record_sequences(folder, "train", 3), 1, 5)[0].tolist() == [1]
    assert frequent_tokens(record_sequences(folder, "train", 9), 1, 5)[0].tolist() == [3]
    assert frequent_tokens(record_sequences(folder, "train", 9), 2, 5)[1] == 7 / 10


def test_every_end_of_text_is_among_the_special_tokens() -> None:
    """Chat models end a turn and a text by tokens of their own, which only the generation config lists."""
    target = SimpleNamespace(generation_config=GenerationConfig(eos_token_id=[41, 42, 900]), vocab_size=300)
    tokenizer = tiny_tokenizer()
    assert special_tokens(target, tokenizer) == {41, 42, tokenizer.eos_token_id, tokenizer.pad_token_id}  # type: ignore[arg-type]
    target.generation_config = GenerationConfig(eos_token_id=43)
    assert special_tokens(target, tokenizer) == {43, tokenizer.eos_token_id, tokenizer.pad_token_id}  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "told"), [(9, "9 is more than the 8 tokens"), (1, "no room for the 2 special")])
def test_impossible_sizes_are_refused(size: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        frequent_tokens(source([5, 3, 3, 4]), size, 8, always=(7, 6, 7))


def make_distributions() -> tuple[Tensor, Tensor]:
    """(draft logits (12, 4), p (12, V)) of 12 rows in fp32."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(12, len(VOCAB), generator=generator), torch.randn(12, V, generator=generator).mul(2).softmax(-1)


def scores(name: str, logits: Tensor, target, ids: Tensor) -> Scores:  # noqa: ANN001
    """One row of 12 slots, each judged by the row of its number."""
    step = Step(logits[None], lambda h: h, ROWS[None], torch.ones(1, 12, dtype=torch.bool), VOCAB)
    batch = Batch(ids[None], torch.arange(13)[None], torch.zeros(1, 13, dtype=torch.long), torch.ones(1, 13) > 0)
    batch.target = target
    (found,) = score([step], batch, Objective(name, (TERMS[name],)), 5)
    return found


def definition(name: str, p: Tensor, q: Tensor, next_ids: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, learned) over all V tokens, row by row."""
    whole = torch.zeros_like(p).index_copy(-1, VOCAB, q)
    within = torch.zeros_like(p).index_copy(-1, VOCAB, p[:, VOCAB] / p[:, VOCAB].sum(-1, keepdim=True))
    inside = torch.isin(torch.arange(V), VOCAB)
    m = 0.5 * within + 0.5 * whole

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a[:, inside] * (a[:, inside] / b[:, inside]).log()).sum(-1)

    ahead, hit = inside[p.argmax(-1)], inside[next_ids]
    return {
        "cross_entropy": (-whole[ROWS, next_ids].log(), hit),
        "forward_kl": (kl(within, whole), ahead),
        "reverse_kl": (kl(whole, within), ahead),
        "jsd": (0.5 * kl(within, m) + 0.5 * kl(whole, m), ahead),
        "neg_log_alpha": (-torch.minimum(p, whole).sum(-1).log(), torch.ones_like(hit)),
        "tv": ((p - whole).abs().sum(-1) / 2, torch.ones_like(hit)),
    }[name]


@pytest.mark.parametrize("name", list(TERMS))
def test_dense_losses_equal_their_definitions(name: str) -> None:
    logits, p = make_distributions()
    ids = torch.arange(13) % V
    found = scores(name, logits, FullRows(p.log(), ROWS), ids)
    loss, learned = definition(name, p, logits.softmax(-1), ids[1:])
    assert 0 < int(learned.sum())
    assert torch.equal(found.learned[0], learned)
    assert torch.allclose(found.loss[0][learned], loss[learned], atol=1e-5)
    assert not found.loss[0][~learned].any()
    whole = torch.zeros_like(p).index_copy(-1, VOCAB, logits.softmax(-1))
    assert found.alpha is not None
    assert found.valid.all()
    assert torch.allclose(found.alpha[0], torch.minimum(p, whole).sum(-1), atol=1e-6)
    assert found.greedy is not None
    assert torch.equal(found.greedy[0] > 0, p.argmax(-1) == whole.argmax(-1))  # never for a token that is not drafted


@pytest.mark.parametrize("name", ["forward_kl", "tv"])
def test_a_sparse_record_of_everything_equals_the_dense_distribution(name: str) -> None:
    logits, p = make_distributions()
    ids = torch.arange(13) % V
    everything = SparseRows(torch.arange(V).expand(12, -1), p.log(), p, ROWS)
    dense, sparse = scores(name, logits, FullRows(p.log(), ROWS), ids), scores(name, logits, everything, ids)
    assert torch.equal(dense.learned, sparse.learned)
    assert torch.allclose(dense.loss, sparse.loss, atol=1e-5)
    assert dense.alpha is not None
    assert sparse.alpha is not None
    assert torch.allclose(dense.alpha, sparse.alpha, atol=1e-6)


def test_a_top_k_record_keeps_its_missing_mass() -> None:
    """Of tokens 2 (p 0.5), 1 (0.2) and 6 (0.1), 1 cannot be drafted: its share is spread, the unrecorded 0.2 is not."""
    p = torch.tensor([[0.5, 0.2, 0.1]])
    distribution = Sparse(torch.tensor([[2, 1, 6]]), p.log(), p)
    kl = renormalised(distribution, VOCAB)
    assert isinstance(kl, Sparse)
    assert kl.ids[0, [0, 2]].tolist() == [1, 3]
    assert torch.allclose(kl.weight, torch.tensor([[0.5, 0.0, 0.1]]) * 0.8 / 0.6)
    assert torch.allclose(kl.log_p.exp()[0, [0, 2]], torch.tensor([0.5, 0.1]) * 0.8 / 0.6)
    uniform = torch.full((1, 4), 0.25).log()
    assert torch.allclose(acceptance(uniform, restricted(distribution, VOCAB)), torch.tensor([0.25 + 0.1]))


def test_padding_of_a_sparse_row_is_no_token() -> None:
    distribution = Sparse(torch.tensor([[5, 0]]), torch.tensor([[0.2, 1.0]]).log(), torch.tensor([[0.2, 0.0]]))
    assert likeliest(distribution).tolist() == [5]


def test_a_row_without_any_recorded_mass_inside_is_left_out_without_a_nan() -> None:
    logits = torch.zeros(12, 4, requires_grad=True)
    log_p = torch.full((12, V), -torch.inf)
    log_p[:, 1] = 0.0
    for target in (
        FullRows(log_p, ROWS),
        SparseRows(torch.ones(12, 1).long(), torch.zeros(12, 1), torch.ones(12, 1), ROWS),
    ):
        found = scores("forward_kl", logits, target, torch.zeros(13).long())
        (gradient,) = torch.autograd.grad(found.loss.sum(), logits)
        assert not any(rows.any() for rows in (found.learned, found.loss, gradient))
        assert found.alpha is not None
        assert not found.alpha.any()


def test_places() -> None:
    at, inside = places(torch.tensor([[0, 1], [6, 5]]), VOCAB)
    assert at.tolist() == [[0, 0], [3, 0]]
    assert inside.tolist() == [[True, False], [True, False]]
    distribution = restricted(Dense(torch.arange(V)[None] / -8), VOCAB)
    assert isinstance(distribution, Dense)
    assert distribution.log_p.tolist() == [[0, -2 / 8, -3 / 8, -6 / 8]]  # not renormalised
