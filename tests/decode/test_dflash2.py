"""DFlash2: what DFlash is with its two parts as training finds them, and what they then do; shapes that cannot be."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from decode import generate
from decode.common.errors import ConfigError
from decode.drafters.block_layers import BlockConvolution
from decode.drafters.dflash2 import DFlash2Config, DFlash2Draft
from decode.loop import Loop
from decode.models.output_head import ends_of
from decode.requests import Request
from decode.trees.tree_plans import chain
from tests.decode.heads import DEPTH, batch_of, random_head
from tests.faults import Fault, check_caught, noticed_by
from tests.tiny import tiny_llama

pytestmark = pytest.mark.usefixtures("uncaptured")
TEXTS = [[5, 9, 2, 7, 11, 30, 2, 8, 14], [4, 4, 6, 3, 2, 60, 21, 8, 17]]
CANDIDATES = 5
LAYERS = "decode.drafters.block_layers"


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_llama(num_layers=6, dtype=torch.float64).requires_grad_(False)


def head(target: PreTrainedModel, name: str = "dflash2") -> DFlash2Draft:
    found = random_head(name, target)
    assert isinstance(found, DFlash2Draft)
    return found


def noted(draft: DFlash2Draft) -> tuple[DFlash2Draft, list[torch.Tensor]]:
    """It, and log q of every tree that it will propose with one."""
    propose, found = draft.propose, []

    def proposed(context: Any) -> Any:
        tree = propose(context)
        found.extend([] if tree.log_q is None else [tree.log_q])
        return tree

    draft.propose = proposed  # type: ignore[method-assign]
    return draft, found


def test_a_new_head_drafts_as_dflash_does(target: PreTrainedModel) -> None:
    """Training starts from the identity, and from a selector that adds nothing."""
    plain, flash = head(target), random_head("dflash", target)
    new = DFlash2Draft(plain.config, ends_of(target)).double().eval()
    new.load_state_dict(flash.state_dict(), strict=False)
    batch = batch_of(target, flash, TEXTS)
    for ours, theirs in zip(new.unroll(batch), flash.unroll(batch), strict=True):
        torch.testing.assert_close(ours.head(ours.hidden), theirs.head(theirs.hidden))


@pytest.mark.parametrize("taps", [1, 2, 3])
def test_a_convolution_is_the_sum_of_its_equation(taps: int) -> None:
    torch.manual_seed(0)
    width, slots, group = 8, 4, 2
    conv = BlockConvolution(width, slots, taps, group).double()
    for weight in conv.parameters():
        torch.nn.init.normal_(weight)
    x = torch.randn(2, 3 * slots, width, dtype=torch.float64)
    delta = conv.kernel_projection(x).view(2, 3 * slots, 2, taps, width // group)

    def by_hand(given: torch.Tensor, side: int) -> torch.Tensor:
        made = torch.zeros_like(given)
        for place in range(3 * slots):
            for tap in range(min(taps, place % slots + 1)):
                for channel in range(width):
                    kernel = conv.base_kernel[side, tap, channel] + delta[:, place, side, tap, channel // group]
                    made[:, place, channel] += kernel * given[:, place - tap, channel]
        return made

    torch.testing.assert_close(conv(x, lambda u: u.tanh()), by_hand(by_hand(x, 0).tanh(), 1))


def test_the_selector_scores_the_best_candidates_by_the_token_before(target: PreTrainedModel) -> None:
    """What is learned has every token; what is drafted the k of the largest logits, with the same scores."""
    draft = head(target)
    batch = batch_of(target, draft, TEXTS)
    selector = draft.candidate_selector
    for depth, step in enumerate(draft.unroll(batch)):
        for row, slot in step.valid.nonzero().tolist():
            hidden = step.hidden[row, slot]
            state, token = hidden[: draft.config.hidden_size], batch.ids.flatten()[step.target_rows[row, slot]]
            logits = draft.unbiased(state)
            best = logits.topk(CANDIDATES).indices
            match = selector.predecessor_codebook.weight[token] * selector.hidden_projection(state)
            wanted = logits[best] + selector.successor_codebook.weight[best] @ match
            drafted, learned = step.drafted(hidden), step.head(hidden)
            torch.testing.assert_close(drafted[best], wanted)
            torch.testing.assert_close(learned[best], wanted)
            others = torch.ones_like(drafted, dtype=torch.bool).index_fill(0, best, False)
            assert drafted[others].isneginf().all(), depth
            assert torch.equal(learned[others], logits[others])


def test_nothing_but_candidates_is_drafted(target: PreTrainedModel) -> None:
    draft, found = noted(head(target))
    Loop(target, draft, Request(TEXTS, 12, shape=chain(DEPTH), verifier="rejection")).run()
    assert found
    assert {count for log_q in found for count in log_q.isfinite().sum(-1).flatten().tolist()} == {CANDIDATES}


@pytest.mark.parametrize("verifier", ["block", "coupled"])
def test_where_no_candidate_is_allowed_the_text_is_still_the_targets(target: PreTrainedModel, verifier: str) -> None:
    """A distribution of nothing was NaN, and `block` then took a stop less often than it has to."""
    draft, found = noted(head(target))
    ids, allowed = torch.tensor(TEXTS[:1]), {"prefix_allowed_tokens_fn": lambda row, text: [1, 3]}
    settings: dict[str, Any] = {"max_new_tokens": 16, "eos_token_id": (), "seed": 3, "audit": True, **allowed}
    drafted = generate(target, draft, ids, num_draft_tokens=3, verifier=verifier, **settings)
    assert set(drafted.sequences[0, ids.shape[1] :].tolist()) <= {1, 3}
    assert not any(log_q.isnan().any() for log_q in found)
    if verifier == "coupled":
        assert torch.equal(drafted.sequences, generate(target, None, ids, **settings).sequences)


def test_both_parts_learn(target: PreTrainedModel) -> None:
    draft = head(target).requires_grad_(True).train()
    batch = batch_of(target, draft, TEXTS)
    losses = [step.head(step.hidden).log_softmax(-1)[..., 3].sum() for step in draft.unroll(batch)]
    torch.stack(losses).sum().backward()
    still = [name for name, weight in draft.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert not still


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"markov_rank": 0}, "markov_rank=0 leaves the selector"),
        ({"candidates": 65}, "candidates=65 .* the draft knows 64 tokens"),
        ({"candidates": 9, "draft_vocab_size": 8}, "the draft knows 8 tokens"),
        ({"conv_group": 7}, "conv_group=7 does not divide the hidden_size"),
        ({"layout": "anchor"}, "layout=anchor and confidence=False"),
        ({"confidence": True}, "confidence=True"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(target: PreTrainedModel, changes: dict[str, Any], words: str) -> None:
    config = head(target).config
    assert isinstance(config, DFlash2Config)
    with pytest.raises(ConfigError, match=words):
        replace(config, **changes)


FAULTS = [
    *noticed_by(
        partial(test_a_convolution_is_the_sum_of_its_equation, taps=2),
        (f"{LAYERS}:BlockConvolution._over", "(0, 0, tap, 0)", "(0, 0, 0, 0)"),
        (f"{LAYERS}:BlockConvolution.forward", "self._over(normed, before)", "self._over(normed, after)"),
    ),
    *noticed_by(
        test_the_selector_scores_the_best_candidates_by_the_token_before,
        ("decode.drafters.dflash2:DFlash2Draft._candidates", "logits.topk", "(-logits).topk"),
        ("decode.drafters.dflash2:DFlash2Draft.known", "_codebook(before)", "_codebook(0 * before)"),
    ),
    *noticed_by(
        partial(test_where_no_candidate_is_allowed_the_text_is_still_the_targets, verifier="block"),
        ("decode.drafters.base:Context.processed", "keepdim=True), done, logits)", "keepdim=True), done, done)"),
    ),
]


@pytest.mark.slow  # they test the tests
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_is_noticed(fault: Fault, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    check_caught(fault, request, monkeypatch)
