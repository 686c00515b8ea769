"""early_exit: the first layers draft, no layer reads a token twice, adapters draft what they learn, the text stays."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from decode import generate, load_drafter
from decode.__main__ import main
from decode.common.errors import ConfigError, InputError
from decode.config import DecodeConfig, DrafterConfig, ModelConfig
from decode.drafters.base import Context
from decode.drafters.exit_adapter import ExitAdapter
from decode.drafters.lm import LMDraft
from decode.drafters.untrained.cascade import CascadeDrafter
from decode.drafters.untrained.early_exit import EarlyExitDrafter
from decode.forward.capture import capture
from decode.forward.resume import layers_of
from decode.loop import Loop
from decode.requests import Request
from decode.sampling.config import SamplingConfig
from decode.stage import run
from decode.trees.tree import Tree
from decode.trees.tree_plans import chain
from tests.decode.heads import batch_of, random_head
from tests.tiers import by_default
from tests.tiny import save_tiny_target, tiny_llama

LAYERS, EXIT, DRAFTED = 4, 2, 3


@cache
def target() -> PreTrainedModel:
    return tiny_llama(num_layers=LAYERS, dtype=torch.float64)


def prompts(batch: int) -> torch.Tensor:
    return torch.randint(0, 64, (batch, 6), generator=torch.Generator().manual_seed(0))


def tokens_per_pass(model: PreTrainedModel, batch: int = 3, **settings: Any) -> float:
    """Of a call whose text is that of plain decoding."""
    asked: dict[str, Any] = {"max_new_tokens": 40, "temperature": 1, "seed": 3, "eos_token_id": ()}
    asked |= {"num_draft_tokens": DRAFTED, **settings}
    plain = generate(model, None, prompts(batch), **asked)
    out = generate(model, EarlyExitDrafter(model, EXIT), prompts(batch), **asked)
    assert torch.equal(out.sequences, plain.sequences)
    return out.stats.tau


def check_text() -> None:
    """The text is that of plain decoding."""
    tokens_per_pass(target(), audit=True)


@pytest.mark.parametrize(
    "settings",
    by_default(
        2,
        [
            {"batch": 1, "num_draft_tokens": 1},
            {"tree": "1x1x1"},
            {"strict": True},
            {"adaptive": True},
        ],
    ),
    ids=str,
)
@pytest.mark.usefixtures("uncaptured")
def test_the_text_is_that_of_plain_decoding(settings: dict[str, Any]) -> None:
    """Other settings are those of the matrix."""
    tau = tokens_per_pass(target(), **settings)
    assert tau > 1.1 or "adaptive" in settings


@pytest.mark.slow
def test_captured_rounds_write_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a second drafter that equals the first too, which makes no captures of its own."""
    model, captured = tiny_llama(num_layers=LAYERS, dtype=torch.float64), []

    def spy(module: nn.Module, *rest: Any) -> Any:
        made = capture(module, *rest)
        captured.append(getattr(module, "drafter", None))
        return made

    monkeypatch.setattr("decode.forward.runner.capture", spy)
    tokens_per_pass(model, max_new_tokens=120)
    assert EarlyExitDrafter(model, EXIT) in captured
    before = len(captured)
    assert tokens_per_pass(model, max_new_tokens=120) > 1.1
    assert len(captured) == before


def check_each_layer_reads_each_token_once() -> None:
    """Pass by pass: the first layers read node after node, and the others all of them at once."""
    model, read = tiny_llama(num_layers=LAYERS, dtype=torch.float64), [[] for _ in range(LAYERS)]
    for index, layer in enumerate(cast(Any, layers_of(model))):
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, given, i=index: read[i].append(given["hidden_states"].shape[1]), with_kwargs=True
        )
    drafter = EarlyExitDrafter(model, EXIT)
    for one in read:
        one.clear()
    with pytest.MonkeyPatch.context() as patch:  # replayed captures call no hooks
        patch.setattr("decode.forward.runner.CAPTURE_AFTER", 10**9)
        generate(model, drafter, prompts(1), max_new_tokens=30, num_draft_tokens=DRAFTED, seed=3, eos_token_id=())
    rounds = read[-1].count(DRAFTED + 1)
    assert rounds > 5
    for index, widths in enumerate(read):
        wide, single = widths.count(DRAFTED + 1), widths.count(1)
        is_lower = index < EXIT
        assert wide == (0 if is_lower else rounds), index
        assert single - read[-1].count(1) == (rounds * (DRAFTED + 1) if is_lower else 0), index
        assert sum(widths) == sum(read[-1]), index


def test_no_layer_reads_a_token_twice() -> None:
    check_each_layer_reads_each_token_once()


@pytest.mark.parametrize(
    ("path", "settings", "message"),
    [
        ("early_exit", {}, "exit_layer=null.*give exit_layer=2"),
        ("early_exit", {"exit_layer": 0}, "exit_layer=0.*at least 1"),
        ("early_exit", {"exit": 1}, "exit"),
        ("cascade", {"draft": "d", "helper": "early_exit"}, "helper=early_exit.*ngram"),
        ("mixture", {"members": ["ngram", "early_exit"]}, "early_exit.*Leave it out"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(path: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DrafterConfig(path=path, settings=settings)


@pytest.mark.parametrize("tree", ["2x2", "dynamic"])
def test_trees_are_refused(tree: str) -> None:
    """Before a model is loaded, and for one in memory."""
    draft = DrafterConfig("early_exit", settings={"exit_layer": 1})
    with pytest.raises(ConfigError, match=rf"decode\.tree={tree}.*chains.*tree=chain"):
        DecodeConfig(ModelConfig("t"), draft, SamplingConfig(tree=tree), prompt="a")
    for drafter in (EarlyExitDrafter(target(), EXIT), adapter(target())):
        with pytest.raises(ConfigError, match=rf"tree={tree}.*chains"):
            generate(target(), drafter, prompts(1), tree=tree)


def test_the_command_drafts_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(save_tiny_target(tmp_path / "target"))
    draft = DrafterConfig(path="early_exit", settings={"exit_layer": 1})
    run(DecodeConfig(ModelConfig(folder), draft, SamplingConfig(max_new_tokens=8), prompt="a b a b", color="never"))
    assert "tokens per pass" in capsys.readouterr().out


def test_more_layers_than_the_target_can_spare_are_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny_target(tmp_path / "target")
    monkeypatch.setattr("decode.stage.load_model", lambda *_, **__: pytest.fail("loaded"))
    given = [f"target.path={folder}", "draft=early_exit", "draft.settings.exit_layer=2", "prompt=a b"]
    monkeypatch.setattr(sys, "argv", ["decode", *given])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "exit_layer=2, and" in (said := capsys.readouterr().err)
    assert "has 2 layers" in said
    assert "Choose 1 to 1" in said


def test_another_target_is_refused() -> None:
    drafter = load_drafter("early_exit", target=tiny_llama(num_layers=3), exit_layer=2)
    with pytest.raises(InputError, match="made of another LlamaForCausalLM.*exit_layer=2"):
        generate(target(), drafter, prompts(1), max_new_tokens=4)


def test_it_drafts_for_no_other_draft() -> None:
    draft = cast(Any, tiny_llama(num_layers=LAYERS, dtype=torch.float64))
    helped = CascadeDrafter(LMDraft(draft), EarlyExitDrafter(draft, EXIT))
    with pytest.raises(AssertionError, match="never within another drafter"):
        generate(target(), helped, prompts(1), max_new_tokens=4)


K = 3
SETTINGS: dict[str, Any] = {"max_new_tokens": 40, "seed": 3, "eos_token_id": (), "num_draft_tokens": K}


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
    Loop(model, drafter, Request([[5, 9, 2, 7], [1, 8]], 20, shape=chain(K), verifier="rejection")).run()
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
        torch.testing.assert_close(rows[begin : begin + K], log_q[:K].exp(), rtol=1e-6, atol=1e-12)
        assert step.target_rows[0, begin] == begin  # judged by p(. | text)


@pytest.mark.usefixtures("uncaptured")
def test_it_drafts_what_it_is_trained_as() -> None:
    check_parity()


def check_text_of_adapter(**settings: Any) -> None:
    """The text is that of plain decoding."""
    model, asked = target(), SETTINGS | settings
    plain = generate(model, None, prompts(3), **asked)
    drafted = generate(model, adapter(model), prompts(3), **asked, audit=True)
    assert torch.equal(drafted.sequences, plain.sequences)


@pytest.mark.parametrize(
    "settings",
    [
        {"strict": True},
        {"adaptive": True},
    ],
    ids=str,
)
@pytest.mark.usefixtures("uncaptured")
def test_the_text_of_an_adapter_is_that_of_plain_decoding(settings: dict[str, Any]) -> None:
    check_text_of_adapter(**settings)


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
