"""alpha from the chunked teacher-forced pass equals the plain sum over whole logits."""

import numpy as np
import pytest
import torch

from decode.drafters.lm import LMDraft
from decode.drafters.pard import Masks, lm_draft, set_masks
from decode.sampling.warp import Sampling, log_probs
from eval.measure import alpha as teacher_forced
from eval.measure.alpha import Alphas, measure_alpha
from eval.measure.continuations import Text
from tests.decode.heads import VARIANTS, batch_of, random_head
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


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.0)])
@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_a_head_is_judged_at_every_token_of_its_rounds(name, sampling):
    target = tiny_llama(seed=0)
    head = random_head(name, target).eval()
    draft = LMDraft(tiny_llama(seed=1, num_layers=1))
    found = measure_alpha(target, {"head": head, "lm": draft}, TEXTS, sampling)
    assert found["lm"].by_row[1].ndim == 1  # beside a head it is measured as alone
    np.testing.assert_array_equal(
        found["lm"].by_row[1], measure_alpha(target, {"lm": draft}, TEXTS, sampling)["lm"].by_row[1]
    )
    batch = batch_of(target, head, [list(TEXTS[1].ids)])
    first, second = list(head.unroll(batch))[:2]
    with torch.no_grad():
        logits = target(torch.tensor([TEXTS[1].ids])).logits[0]
    for number, step in enumerate((first, second)):
        q = step.drafted(step.hidden[0])
        for slot in range(q.shape[0]):
            have = found["head"].by_row[1][slot, number]
            row = int(step.target_rows[0, slot])
            if not bool(step.valid[0, slot]) or row + 1 < len(TEXTS[1].prompt):
                assert np.isnan(have)
                continue
            p = logits[row]
            if sampling.is_greedy:
                assert have == float(p.argmax() == q[slot].argmax())
            else:
                assert have == pytest.approx(torch.minimum(p.softmax(-1), q[slot].softmax(-1)).sum().item(), abs=1e-5)
    assert 1 <= found["head"].expected_tau(4) <= 5


def test_a_draft_model_of_one_pass_is_judged_at_its_masks_too() -> None:
    """All of them, or none where nothing says how many it was trained with."""
    draft = tiny_llama(seed=1)
    for depth, shape in ((3, 3), (None, None)):
        set_masks(draft.config, Masks(5, depth))
        found = measure_alpha(tiny_llama(seed=0), {"pard": lm_draft(draft)}, TEXTS, Sampling(1.0))["pard"]
        assert found.depth == shape


def test_rounds_of_a_head_that_leave_the_text_promise_nothing():
    alphas = Alphas({0: np.array([[1.0, 0.5], [0.5, np.nan]])})
    assert alphas.expected_tau(2) == pytest.approx(1 + 1.5)
    assert alphas.expected_tau(1) == pytest.approx(1 + 0.75)
    assert alphas.sums([0]).tolist() == [[2.0, 3.0]]
    too_short = Alphas({0: np.full((3, 2), np.nan), 1: np.array([[1.0, 0.5]])})
    assert too_short.sums([0, 1]).tolist() == [[1.5, 2.0]]  # a text of no tokens would be a ratio of 0 to 0


def test_a_reduced_vocabulary_covers_nothing_outside():
    target, vocab = tiny_llama(seed=0), torch.arange(0, 40)
    head = random_head("eagle3", target, vocab=vocab).eval()
    (found,) = measure_alpha(target, {"head": head}, TEXTS[1:2], Sampling(1.0)).values()
    step = next(iter(head.unroll(batch_of(target, head, [list(TEXTS[1].ids)]))))
    with torch.no_grad():
        p = target(torch.tensor([TEXTS[1].ids])).logits[0].softmax(-1)[int(step.target_rows[0, 2]), vocab]
    q = step.drafted(step.hidden[0, 2]).softmax(-1)
    assert found.by_row[1][2, 0] == pytest.approx(torch.minimum(p, q).sum().item(), abs=1e-5)
