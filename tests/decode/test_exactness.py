"""Exactness first: the distributions of the rules enumerated, equality of coupled output, the audit of the cache."""

from __future__ import annotations

import pytest
import torch

from tests.decode import checks
from tests.tiers import by_default
from tests.tiny import MODELS, tiny_llama

SIMPLE = [
    checks.check_block_accepts_more,
    checks.check_delta_distribution,
    checks.check_drafts_follow_their_distribution,
    checks.check_draws,
    checks.check_end_of_text,
    checks.check_long_context,
    checks.check_more_siblings_than_tokens,
    checks.check_noise_is_read_once,
    checks.check_processors,
    checks.check_sliding_window,
    checks.check_streams_differ,
    checks.check_typical_distance,
    checks.check_zero_probability_never_accepted,
    # over a second each
    checks.check_batches,
    checks.check_perfect_draft,
    checks.check_siblings_have_numbers_of_their_own,
]


@pytest.mark.parametrize("check", by_default(13, SIMPLE), ids=lambda check: check.__name__)
def test_property_holds(check) -> None:  # noqa: ANN001
    check()


@pytest.mark.parametrize("name", checks.DISTRIBUTIONS)
def test_rule_has_the_distribution_of_the_target(name: str) -> None:
    checks.check_distribution(name)


def test_delta_rule_is_exact_where_rows_have_trees_of_their_own() -> None:
    checks.check_delta_distribution(rows_differ=True)


@pytest.mark.parametrize("kind", ["oracle", "tree"])
@pytest.mark.parametrize("temperature", by_default(1, [1.0, 0.0]))
def test_every_acceptance_length_rolls_back_right(kind: str, temperature: float) -> None:
    checks.check_oracle(kind, temperature=temperature)


@pytest.mark.parametrize("kind", ["oracle", "tree"])
def test_cache_holds_exactly_the_committed_tokens(kind: str) -> None:
    checks.check_cache(kind)


@pytest.mark.parametrize("verifier", by_default(1, ["rejection", "block", "coupled"]))
def test_tokens_outside_the_support_are_never_emitted(verifier: str) -> None:
    checks.check_filtered_tokens_never_emitted(verifier)


def test_block_verification_reads_no_number_twice() -> None:
    checks.check_noise_is_read_once("block")


def test_eager_attention_gets_an_additive_mask() -> None:
    """A boolean mask would be added as +1/0: greedy text then differs from transformers' own."""
    model = tiny_llama(attn_implementation="eager")
    ids, _ = checks.ragged_prompts(1)
    ours = checks.generate(model, None, ids, max_new_tokens=12, temperature=0, eos_token_id=())
    theirs = model.generate(ids, do_sample=False, max_new_tokens=12)  # type: ignore[operator]
    assert torch.equal(ours.sequences, theirs)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_that_of_transformers(name: str) -> None:
    model = MODELS[name]()
    ids, _ = checks.ragged_prompts(1)
    ours = checks.generate(model, None, ids, max_new_tokens=16, temperature=0, eos_token_id=())
    theirs = model.generate(ids, do_sample=False, max_new_tokens=16, eos_token_id=None)  # type: ignore[operator]
    assert torch.equal(ours.sequences, theirs)
