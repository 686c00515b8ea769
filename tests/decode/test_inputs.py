"""Padding: masks of every make, and the one that is inferred where none is given."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from decode import generate, speculative
from decode.common.errors import ConfigError
from decode.drafters.lm import LMDraft
from tests.decode.checks import VOCAB
from tests.tiny import tiny_llama

NEW = 6
PAD = 0


@pytest.fixture
def model() -> Any:
    model = tiny_llama(VOCAB, dtype=torch.float64)
    model.generation_config.pad_token_id = PAD  # type: ignore[union-attr]
    return model


@pytest.fixture(scope="module")
def draft() -> LMDraft:
    return LMDraft(tiny_llama(VOCAB, num_layers=1, seed=3, dtype=torch.float64))


def padded(left: bool = True) -> tuple[Tensor, Tensor]:
    """(ids, mask): rows of 7, 6 and 5 tokens, none of which is the pad token."""
    ids = torch.randint(1, VOCAB, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in range(3):
        mask[row, :row] = 0
    if not left:
        mask = mask.flip(1)
    return ids.masked_fill(mask == 0, PAD), mask


def theirs(model: Any, ids: Tensor, **settings: Any) -> Tensor:
    return model.generate(ids, do_sample=False, max_new_tokens=NEW, **settings)[:, ids.shape[1] :]


def ours(model: Any, ids: Tensor, mask: Tensor | None = None, drafter: Any = None, **settings: Any) -> Tensor:
    settings = {"temperature": 0, "max_new_tokens": NEW, **settings}
    return generate(model, drafter, ids, mask, **settings, seed=0).sequences[:, ids.shape[1] :]


def test_padding_without_a_mask_is_found_as_transformers_finds_it(model: Any, draft: LMDraft) -> None:
    ids, mask = padded()
    want = theirs(model, ids)
    assert torch.equal(ours(model, ids), want)
    assert torch.equal(ours(model, ids, drafter=draft), want)
    assert torch.equal(want, theirs(model, ids, attention_mask=mask))
    assert not torch.equal(want, theirs(model, ids, attention_mask=torch.ones_like(ids)))
    assert torch.equal(theirs(model, ids, custom_generate=speculative, drafter=draft), want)


def test_padding_on_the_right_is_found_too(model: Any, draft: LMDraft) -> None:
    (left, _), (right, mask) = padded(), padded(left=False)
    alone = torch.cat([ours(model, row[kept][None]) for row, kept in zip(right, mask.bool(), strict=True)])
    assert torch.equal(ours(model, right), alone)
    assert torch.equal(ours(model, right, drafter=draft), alone)
    assert not torch.equal(left, right)


@pytest.mark.parametrize("ends", [[PAD], [5, PAD], None])
def test_a_pad_token_that_is_an_end_token_or_not_known_is_text(model: Any, ends: list[int] | None, caplog: Any) -> None:
    """transformers infers nothing there either; a batch that looks padded is warned about."""
    logging.getLogger("draftsmith").propagate = True
    ids, mask = padded()
    if ends is None:
        model.generation_config.pad_token_id = None
    else:
        model.generation_config.eos_token_id = ends
    want = theirs(model, ids)
    with caplog.at_level(logging.WARNING, "draftsmith"):
        assert torch.equal(ours(model, ids), want)
    assert ("read as text" in caplog.text) == (ends is not None)
    assert torch.equal(ours(model, ids, torch.ones_like(ids)), want)
    assert not torch.equal(ours(model, ids, mask), want)


def test_without_end_tokens_the_models_own_still_tell_padding_from_text(model: Any) -> None:
    """eos_token_id=() says where a row ends, not what its prompt holds."""
    model.generation_config.eos_token_id = PAD
    ids, _ = padded()
    assert torch.equal(ours(model, ids, eos_token_id=()), ours(model, ids, torch.ones_like(ids), eos_token_id=()))


def test_a_mask_of_ones_says_that_pad_tokens_are_text(model: Any, draft: LMDraft) -> None:
    """transformers drops such a mask before a custom method sees it."""
    ids, _ = padded()
    ones = torch.ones_like(ids)
    want = theirs(model, ids, attention_mask=ones)
    assert torch.equal(ours(model, ids, ones), want)
    assert torch.equal(theirs(model, ids, attention_mask=ones, custom_generate=speculative, drafter=draft), want)


def test_the_pad_token_of_a_call_counts(model: Any, draft: LMDraft) -> None:
    """In the prompt and behind the end, in both faces."""
    ids, mask = padded()
    other = torch.where(mask == 0, 9, torch.where(ids == 9, 8, ids))
    free = theirs(model, other, pad_token_id=9)
    assert torch.equal(ours(model, other, pad_token_id=9), free)
    end = int(free[0, 2])
    want = theirs(model, other, pad_token_id=9, eos_token_id=end)
    assert (want == 9).any()
    assert torch.equal(ours(model, other, pad_token_id=9, eos_token_id=end), want)
    asked = {"pad_token_id": 9, "eos_token_id": end, "custom_generate": speculative, "drafter": draft}
    assert torch.equal(theirs(model, other, **asked), want)


def test_rows_are_filled_with_the_first_of_several_end_tokens_where_there_is_no_pad_token(model: Any) -> None:
    model.generation_config.pad_token_id = None
    ids = padded()[0][:2, 2:]
    free = theirs(model, ids)
    model.generation_config.eos_token_id = [int(free[0, 1]), 63]
    assert torch.equal(ours(model, ids), theirs(model, ids))


@pytest.mark.parametrize("kind", [torch.bool, torch.int32, torch.float32])
def test_a_mask_may_have_holes_and_any_type(model: Any, kind: torch.dtype) -> None:
    """What is masked is left out, at the edges and between tokens, and positions go on without it."""
    ids, mask = padded()
    mask[0, 3], mask[1, 4:6] = 0, 0
    assert torch.equal(ours(model, ids, mask.to(kind)), theirs(model, ids, attention_mask=mask))


@pytest.mark.parametrize("kind", [torch.int32, torch.int16, torch.uint8])
def test_ids_may_be_integers_of_any_width(model: Any, kind: torch.dtype) -> None:
    ids, mask = padded()
    out = generate(model, None, ids.to(kind), mask, temperature=0, max_new_tokens=NEW, seed=0)
    assert out.sequences.dtype == torch.int64
    assert torch.equal(
        out.sequences, generate(model, None, ids, mask, temperature=0, max_new_tokens=NEW, seed=0).sequences
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"attention_mask": torch.zeros(3, 7).masked_fill_(padded()[1] == 0, -1e9)}, "give mask == 0"),
        ({"attention_mask": torch.full((3, 7), float("nan"))}, "nan"),
        ({"attention_mask": torch.full((3, 7), 2)}, r"\[2\]"),
        ({"attention_mask": [[1] * 7] * 3}, "type list"),
        ({"attention_mask": torch.ones(3, 1, 7, 7)}, "must be equal"),
        ({"input_ids": [[1, 2]]}, "type list"),
        ({"input_ids": {"input_ids": padded()[0]}}, "input_ids and"),
        ({"input_ids": padded()[0].bool()}, "torch.bool"),
    ],
    ids=str,
)
def test_what_is_no_batch_or_no_mask_is_refused(model: Any, given: dict[str, Any], words: str) -> None:
    call = {"input_ids": padded()[0], "max_new_tokens": 2} | given
    with pytest.raises(ConfigError, match=words):
        generate(model, None, **call)
