"""Adapters behind the target's first layers: what they draft is what they learn, and the text stays the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from decode import generate
from decode.common.errors import ConfigError
from decode.drafters.base import Context
from decode.drafters.exit_adapter import ExitAdapter
from decode.drafters.untrained.early_exit import EarlyExitDrafter
from decode.forward.capture import capture
from decode.loop import Loop
from decode.requests import Request
from decode.trees.tree import Tree
from decode.trees.tree_plans import chain
from tests.decode.heads import batch_of, random_head
from tests.decode.untrained.test_early_exit import prompts, target
from tests.tiny import tiny_llama

DRAFTED = 3
SETTINGS: dict[str, Any] = {"max_new_tokens": 40, "seed": 3, "eos_token_id": (), "num_draft_tokens": DRAFTED}


def adapter(model: PreTrainedModel) -> ExitAdapter:
    """Behind the first layer, with wide random weights."""
    head = random_head("exit_adapter", model)
    assert isinstance(head, ExitAdapter)
    return head


def without_output(model: PreTrainedModel) -> ExitAdapter:
    """As training begins it."""
    head = adapter(model)
    nn.init.zeros_(head.adapter.down.weight)
    return head


def accepted(out: Any) -> list[int]:
    """Of each round."""
    return [one.accepted for one in out.stats.rounds]


def proposed(model: PreTrainedModel, drafter: Any, **settings: Any) -> list[tuple[list[int], list[int], torch.Tensor]]:
    """(text, drafted, log q) of every row and round of a call whose drafts are sampled."""
    found, propose = [], drafter.propose

    def noted(context: Context) -> Tree:
        tree = propose(context)
        assert tree.log_q is not None
        for row, length in enumerate(context.lengths.tolist()):
            found.append((context.ids[row, :length].tolist(), tree.tokens[row, 1:].tolist(), tree.log_q[row].clone()))
        return tree

    object.__setattr__(drafter, "propose", noted)
    Loop(model, drafter, Request([[5, 9, 2, 7], [1, 8]], 20, shape=chain(DRAFTED), verifier="rejection")).run()
    return found


@pytest.mark.usefixtures("uncaptured")
def test_without_output_it_drafts_what_the_plain_early_exit_drafts() -> None:
    model = target()
    plain = proposed(model, EarlyExitDrafter(model, 1))
    ours = proposed(model, without_output(model))
    assert [one[:2] for one in ours] == [one[:2] for one in plain]
    assert len(plain) > 10
    other = proposed(model, adapter(model))
    assert [one[1] for one in other] != [one[1] for one in plain]


def check_parity() -> None:
    """At every position, in ragged batches and after partial acceptance: unroll's q is propose's."""
    model = target()
    head = adapter(model)
    for text, drafted, log_q in proposed(model, head)[:40]:
        batch = batch_of(model, head, [text + drafted])
        (step,) = head.unroll(batch)
        rows = step.head(step.hidden)[0].softmax(-1)
        begin = len(text) - 1
        torch.testing.assert_close(rows[begin : begin + DRAFTED], log_q[:DRAFTED].exp(), rtol=1e-6, atol=1e-12)
        assert step.target_rows[0, begin] == begin  # judged by p(. | text)


@pytest.mark.usefixtures("uncaptured")
def test_it_drafts_what_it_is_trained_as() -> None:
    check_parity()


def check_text(**settings: Any) -> None:
    """The text is that of plain decoding."""
    model, asked = target(), SETTINGS | settings
    plain = generate(model, None, prompts(3), **asked)
    drafted = generate(model, adapter(model), prompts(3), **asked, audit=True)
    assert torch.equal(drafted.sequences, plain.sequences)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0},
        {"batch_size": 2},
        {"top_k": 20},
        {"strict": True},
        {"adaptive": True},
    ],
    ids=str,
)
@pytest.mark.usefixtures("uncaptured")
def test_the_text_is_that_of_plain_decoding(settings: dict[str, Any]) -> None:
    check_text(**settings)


@pytest.mark.slow
def test_captured_rounds_follow_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture holds copies of weights: after training goes on, the same drafter drafts by the new ones."""
    model, captured = tiny_llama(num_layers=4, dtype=torch.float64), []

    def spy(module: nn.Module, *rest: Any) -> Any:
        made = capture(module, *rest)
        captured.append(getattr(module, "drafter", None))
        return made

    monkeypatch.setattr("decode.forward.runner.capture", spy)
    asked: dict[str, Any] = SETTINGS | {"max_new_tokens": 120}
    head = without_output(model)
    plain = generate(model, None, prompts(1), **asked).sequences
    before = generate(model, head, prompts(1), **asked)
    assert head in captured
    with torch.no_grad():
        head.adapter.down.weight.add_(torch.randn(head.adapter.down.weight.shape, dtype=torch.float64))
    after = generate(model, head, prompts(1), **asked)
    assert torch.equal(before.sequences, plain)
    assert torch.equal(after.sequences, plain)
    assert accepted(before) != accepted(after)
    monkeypatch.setattr("decode.forward.runner.CAPTURE_AFTER", 10**9)
    anew = tiny_llama(num_layers=4, dtype=torch.float64)
    fresh = adapter(anew)
    fresh.load_state_dict(head.state_dict())
    assert accepted(generate(anew, fresh, prompts(1), **asked)) == accepted(after)


def test_trees_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tree=2x2.*chains"):
        generate(target(), adapter(target()), prompts(1), tree="2x2")
