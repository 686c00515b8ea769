"""Every injected error is found, near-ties are counted apart, and comparison goes on behind a divergence."""

import pytest
import torch
from transformers import LogitsProcessorList

from decode.sampling.config import SamplingConfig
from decode.sampling.penalties import penalties
from decode.sampling.warp import Sampling
from eval.measure.continuations import Job, Text, generator
from eval.measure.losslessness import MARGIN, Check, check, first_divergence, flips, margin_from, scores_at
from tests.tiers import by_default
from tests.tiny import tiny_llama


def script(reference, wrong):
    """A generator that repeats the reference, except for {(row, index): token}, each error happening once."""
    left = dict(wrong)
    texts = {text.row: text for text in reference}

    def speculate(jobs):
        done = []
        for job in jobs:
            text = texts[job.row]
            start = len(job.prompt) - len(text.prompt)
            assert job.prompt == text.ids[: len(job.prompt)], "comparison goes on from the reference's own prefix"
            assert job.max_new == len(text.new) - start > 0
            new = list(text.new[start : start + job.max_new])
            for (row, index), token in list(left.items()):
                if row == job.row and index >= start:
                    new[index - start :] = [token] * (len(new) - index + start)
                    del left[row, index]
                    break
            done.append(Text(job.row, job.prompt, tuple(new)))
        return done

    return speculate


REFERENCE = [Text(0, (1, 2), tuple(range(10, 20))), Text(1, (3,), tuple(range(20, 30)))]


def test_equal_texts_have_no_divergence():
    assert check(REFERENCE, script(REFERENCE, {}), margin=lambda *_: 0.0) == [Check(0, 0, 10), Check(0, 0, 10)]


def test_injected_wrong_tokens_are_all_found_in_one_row():
    counts = check(REFERENCE, script(REFERENCE, {(0, 2): 99, (0, 7): 98, (1, 9): 97}), margin=lambda *_: 0.5)
    assert counts == [Check(2, 0, 10), Check(1, 0, 10)]


def test_every_token_is_compared_to_the_last_one_and_an_empty_text_not_at_all():
    texts = [*REFERENCE, Text(2, (4,), ())]
    counts = check(texts, script(texts, {(0, 8): 99, (0, 9): 98}), margin=lambda *_: 0.5)
    assert counts == [Check(2, 0, 10), Check(0, 0, 10), Check(0, 0, 0)]


def test_a_text_that_cannot_be_resumed_is_compared_up_to_its_divergence():
    counts = check(REFERENCE, script(REFERENCE, {(0, 7): 99}), lambda *_: 0.5, resumes=False)
    assert counts == [Check(1, 0, 8), Check(0, 0, 10)]
    late = [Text(0, (1,), (5, 6, 7))]
    assert check(late, lambda jobs: [Text(0, (1,), (5, 6, 7, 8))], lambda *_: 0.5, resumes=False) == [Check(1, 0, 3)]


def test_a_near_tie_is_counted_apart():
    gaps = {2: MARGIN / 2, 7: 2 * MARGIN}
    counts = check(REFERENCE, script(REFERENCE, {(0, 2): 99, (0, 7): 98}), margin=lambda text, at, other: gaps[at])
    assert counts[0] == Check(mismatches=1, near_ties=1, tokens=10)


def test_a_text_that_stops_early_or_late_is_a_mismatch():
    short = [Text(0, (1,), (5, 6, 7))]
    for new in ((5, 6), (5, 6, 7, 8)):
        counts = check(
            short, lambda jobs, new=new: [Text(0, jobs[0].prompt, new[len(jobs[0].prompt) - 1 :])], lambda *_: 0
        )
        assert counts[0].mismatches == 1


def test_flips_are_counted_once_per_sequence():
    assert flips([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 9, 9]]) == Check(near_ties=1, tokens=3 + 2)


def test_first_divergence():
    assert first_divergence((1, 2, 3), (1, 2, 3)) is None
    assert first_divergence((1, 2, 3), (1, 9, 3)) == 1
    assert first_divergence((1, 2, 3), (1, 2)) == 2


@pytest.mark.parametrize("temperature", by_default(1, [1.0, 0.0]))
def test_the_decoder_passes_and_a_real_flip_is_judged_by_its_margin(temperature):
    model, draft = tiny_llama(seed=0), tiny_llama(seed=1, num_layers=1)
    from decode.drafters.lm import LMDraft

    sampling = Sampling(temperature)
    jobs = [Job(row, tuple(range(3 + row, 9 + row)), 24) for row in range(3)]
    settings = {"temperature": temperature, "num_draft_tokens": 3}
    alone = generator(model, None, settings, 7, 3, "alone")
    drafted = generator(model, LMDraft(draft), settings, 7, 2, "drafted")
    reference, margin = alone(jobs), margin_from(model, sampling, 7)
    counts = check(reference, drafted, margin)
    assert sum(counts, Check()) == Check(0, 0, 72)
    text = reference[1]
    assert margin(text, 5, text.new[5]) == pytest.approx(0.0, abs=1e-6)  # the reference's own token is the best one
    wrong = (text.new[5] + 1) % 64
    assert margin(text, 5, wrong) > MARGIN
    flipped = check(reference, _flipping(drafted, row=1, at=5, token=wrong), margin)
    assert flipped[1].mismatches == 1
    assert flipped[0] == Check(0, 0, 24)


def _flipping(speculate, row, at, token):
    state = {"done": False}

    def run(jobs):
        texts = speculate(jobs)
        if state["done"]:
            return texts
        state["done"] = True
        return [Text(t.row, t.prompt, (*t.new[:at], token, *t.new[at + 1 :])) if t.row == row else t for t in texts]

    return run


@pytest.mark.parametrize(("gap", "expected"), [(0.25 * MARGIN, Check(0, 1, 1)), (8 * MARGIN, Check(1, 0, 1))])
def test_an_almost_equal_pair_of_logits_is_a_near_tie(gap, expected):
    model, ids = tiny_llama(seed=0), (1, 2, 3)
    with torch.no_grad():
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0, -1]
        best = int(model.lm_head(hidden).argmax())
        other = (best + 5) % 64
        model.lm_head.weight[other] = model.lm_head.weight[best] - gap * hidden / hidden.square().sum()
    text, margin = Text(0, ids, (best,)), margin_from(model, Sampling(0.0), 0)
    assert margin(text, 0, best) == 0
    assert margin(text, 0, other) == pytest.approx(gap, rel=0.1)
    assert margin(text, 0, (best + 6) % 64) > 100 * MARGIN
    assert check([text], lambda jobs: [Text(0, ids, (other,))], margin) == [expected]


def test_margins_are_those_of_the_penalised_scores():
    model, text = tiny_llama(seed=0), Text(0, (1, 2, 3), (4, 5))
    plain = scores_at(model, Sampling(0.0), 0, text, 1)
    best = int(plain.argmax())
    penalised = scores_at(
        model, Sampling(0.0), 0, text, 1, LogitsProcessorList(penalties(64, None, SamplingConfig(banned_words=[best])))
    )
    assert penalised[best] == -torch.inf
    counted = LogitsProcessorList(penalties(64, None, SamplingConfig(presence_penalty=2.0)))
    difference = scores_at(model, Sampling(0.0), 0, text, 1, counted) - plain
    assert (difference - difference.max()).argmin() == 4  # generated; the prompt's tokens are not counted


def test_where_texts_cannot_be_resumed_the_rest_is_not_counted():
    found = check(REFERENCE, script(REFERENCE, {(0, 2): 99, (0, 7): 98}), margin=lambda *_: 0.5, resumes=False)
    assert found == [Check(1, 0, 3), Check(0, 0, 10)]
