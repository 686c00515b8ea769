"""alpha from the chunked teacher-forced pass equals the plain sum over whole logits."""

import numpy as np
import pytest
import torch

from decode.drafters.lm import LMDraft
from decode.sampling.warp import Sampling, log_probs
from eval.measure import alpha as teacher_forced
from eval.measure.alpha import Alphas, measure_alpha
from eval.measure.continuations import Text
from tests.tiny import tiny_llama

TEXTS = [Text(0, (5, 6, 7), (8, 9, 10, 11)), Text(1, (3,), tuple(range(20, 30))), Text(2, (4, 5), ())]


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.5, top_k=7), Sampling(0.0)])
@pytest.mark.parametrize("elements", [2**27, 1])
def test_alpha_equals_the_plain_sum(sampling, elements, monkeypatch):
    monkeypatch.setattr(teacher_forced, "_LOGIT_ELEMENTS", elements)
    target, draft = tiny_llama(seed=0), tiny_llama(seed=1, num_layers=1)
    (found,) = measure_alpha(target, {"d": LMDraft(draft)}, TEXTS, sampling).values()
    assert set(found.by_row) == {0, 1}  # the third text is empty
    for text in TEXTS[:2]:
        ids = torch.tensor([text.ids])
        with torch.no_grad():
            p, q = target(ids).logits[0], draft(ids).logits[0]
        rows = range(len(text.prompt) - 1, len(text.ids) - 1)
        if sampling.is_greedy:
            expected = [float(p[t].argmax() == q[t].argmax()) for t in rows]
        else:
            distributions = [(log_probs(p[t], sampling).exp(), log_probs(q[t], sampling).exp()) for t in rows]
            expected = [torch.minimum(a, b).sum().item() for a, b in distributions]
        np.testing.assert_allclose(found.by_row[text.row], expected, atol=1e-5)


def test_a_draft_equal_to_the_target_has_alpha_one():
    target = tiny_llama(seed=0)
    (found,) = measure_alpha(target, {"d": LMDraft(tiny_llama(seed=0))}, TEXTS, Sampling(1.0)).values()
    sums = found.sums([0, 1, 2])
    assert sums[:, 0] == pytest.approx(sums[:, 1], abs=1e-4)
    assert found.expected_tau(3) == pytest.approx(4.0, abs=1e-4)


def test_expected_tau_uses_runs_of_consecutive_tokens():
    alphas = Alphas({0: np.array([1.0, 0.5, 0.5]), 4: np.array([0.2])})
    # windows of two: (1, .5) -> 1 + .5, (.5, .5) -> .5 + .25; the second row is too short for one
    assert alphas.expected_tau(2) == pytest.approx(1 + (1.5 + 0.75) / 2)
    assert alphas.sums([4, 9]).tolist() == [[0.2, 1.0]]


def test_windows_of_one_document_are_resampled_together() -> None:
    alphas = Alphas({0: np.array([0.5, 0.5]), 1: np.array([1.0]), 3: np.array([0.25])})
    assert alphas.sums([0, 1, 2, 3], ["a", "a", "b", "c"]).tolist() == [[2.0, 3.0], [0.25, 1.0]]
