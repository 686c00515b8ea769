"""A batch writes what its prompts write alone, and nothing but what was written is counted."""

from __future__ import annotations

import pytest
import torch

from decode.drafters.lm import LMDraft
from decode.sampling.warp import Sampling
from decode.stats import Round
from eval.arms.base import Sample
from eval.arms.ours import OurArm
from eval.arms.transformers_arms import TransformersArm
from eval.measure.continuations import Job, Text, batches, generator, left_padded
from tests.tiny import tiny_llama

SHORT, LONG = [5, 6, 7], [9, 8, 7, 6, 5, 4, 3]
SETTINGS = {"temperature": 1.0, "num_draft_tokens": 2}


def test_shorter_prompts_are_padded_on_the_left_and_masked_there() -> None:
    ids, mask = left_padded([[5, 6, 7], [8]], 0, torch.device("cpu"))
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_batches_hold_jobs_of_similar_length_the_longest_first() -> None:
    jobs = [Job(0, (1,), 4), Job(1, (1, 2), 9), Job(2, (1,) * 5, 4), Job(3, (1,), 9)]
    assert [[job.row for job in batch] for batch in batches(jobs, 2)] == [[1, 3], [2, 0]]


def test_a_job_gets_its_own_noise_and_length_whatever_it_is_batched_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.forward.runner.CAPTURE_AFTER", 10**9)  # captures would cost more than the passes do
    model = tiny_llama(seed=0, num_layers=1)
    jobs = [Job(7, tuple(SHORT), 3), Job(2, tuple(LONG), 8), Job(5, tuple(SHORT), 8)]
    together, alone = (generator(model, None, SETTINGS, 3, size, "x")(jobs) for size in (3, 1))
    assert together == alone
    assert [(text.row, text.prompt, len(text.new)) for text in together] == [
        (7, tuple(SHORT), 3),
        (2, tuple(LONG), 8),
        (5, tuple(SHORT), 8),
    ]
    assert together[0].new != together[2].new[:3]  # the same prompt with other noise
    assert together[2] != generator(model, None, SETTINGS, 4, 3, "x")(jobs)[2]


def test_a_text_ends_with_its_end_token_and_padding_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.forward.runner.CAPTURE_AFTER", 10**9)
    model, jobs = tiny_llama(seed=0, num_layers=1), [Job(0, tuple(SHORT), 6), Job(1, tuple(LONG), 6)]
    free = generator(model, None, SETTINGS, 3, 2, "x")(jobs)
    end = next(token for token in free[0].new[1:] if token not in free[1].new)
    ended, whole = generator(model, None, {**SETTINGS, "eos_token_id": [end]}, 3, 2, "x")(jobs)
    assert ended.new == free[0].new[: free[0].new.index(end) + 1]
    assert whole == free[1]


def test_a_text_knows_what_was_read_and_what_was_written() -> None:
    assert Text(0, (1, 2), (3,)).ids == (1, 2, 3)


def test_our_arm_counts_what_every_row_was_given_up_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.forward.runner.CAPTURE_AFTER", 10**9)  # captures would cost more than the passes do
    model, draft = tiny_llama(seed=0, num_layers=1), LMDraft(tiny_llama(seed=0, num_layers=1))
    plain = OurArm("x", model, None, SETTINGS)
    free = plain.run([SHORT, LONG], [0, 1], 8, 3).new_ids
    end = next(token for token in free[0][2:] if token not in free[1])
    expected = [free[0][: free[0].index(end) + 1], free[1]]
    for drafter in (None, draft):
        arm = OurArm("x", model, drafter, {**SETTINGS, "eos_token_id": [end]})
        sample = arm.run([SHORT, LONG], [0, 1], 8, 3)
        assert sample.new_ids == expected
        assert sample.tokens == len(expected[0]) + 8
        assert sample.first_tokens == (2 if drafter is None else 6)  # of either row: a token, or with two drafted ones
        assert bool(sample.rounds) == (drafter is not None)  # plain decoding drafts nothing, so it has no acceptance


def test_transformers_padding_after_the_end_is_no_token() -> None:
    model = tiny_llama(seed=0, num_layers=1)
    arm = TransformersArm("x", model, Sampling(0.0))
    free = arm.run([SHORT, LONG], [0, 1], 8, 0).new_ids
    end = next(token for token in free[0][1:] if token not in free[1])
    assert model.generation_config is not None
    model.generation_config.eos_token_id = end
    sample = arm.run([SHORT, LONG], [0, 1], 8, 0)
    assert sample.new_ids == [free[0][: free[0].index(end) + 1], free[1]]
    assert sample.first_tokens == 2
    assert sample.seconds >= sample.arrivals[-1] >= sample.arrivals[0] == sample.first_s > 0


def test_transformers_samples_other_text_for_other_rows_and_seeds() -> None:
    arm = TransformersArm("x", tiny_llama(seed=0, num_layers=1), Sampling(1.0))
    drawn = {row_and_seed: arm.run([SHORT], [row_and_seed[0]], 8, row_and_seed[1]).new_ids[0] for row_and_seed in KEYS}
    assert drawn[0, 5] != drawn[1, 5]
    assert drawn[0, 5] != drawn[0, 6]


KEYS = ((0, 5), (1, 5), (0, 6))


def test_decoding_begins_at_the_first_arrival() -> None:
    sample = Sample([[1] * 5, [1] * 7], 3.0, 0.5, 4, [0.5, 3.0], [Round(0, 1, 1, 2)])
    assert (sample.tokens, sample.decode_tokens, sample.decode_s) == (12, 8, 2.5)
