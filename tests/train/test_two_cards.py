"""A target over two cards, on a machine that has none: each tensor where what reads it lies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from decode import generate
from decode.drafters.lm import LMDraft
from decode.sampling.warp import Sampling
from decode.trees.tree_plans import k_ary
from distill.records.distribution_stores import Layout
from distill.records.feature_codes import CODES, FeatureLayout
from distill.records.record_shards import Record
from distill.scorer import Scorer
from distill.target_passes import ModelPasses
from eval.measure.alpha import measure_alpha
from eval.measure.continuations import Text
from tests.decode.checks import ragged_prompts
from tests.decode.heads import VARIANTS, batch_of, random_head
from tests.tiers import by_default
from tests.tiny import tiny_llama
from train.live_target import LiveTarget

FIRST, SECOND = torch.device("cpu"), torch.device("cpu:1")


def card(tensor: Tensor) -> torch.device:
    return vars(tensor).get("card", FIRST)


def noted(tensor: Tensor, where: torch.device) -> Tensor:
    vars(tensor)["card"] = where
    return tensor


class TwoCards(TorchFunctionMode):
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return card(args[0])
        name = getattr(func, "__name__", "")
        if name == "to":
            return _moved(*args, **given)
        tensors = [one for one in tree_leaves((args, given)) if isinstance(one, Tensor)]
        cards = {card(one) for one in tensors if one.dim()}
        copies = name == "copy_" or (
            name == "__setitem__" and not any(isinstance(i, Tensor) for i in tree_leaves(args[1]))
        )
        if len(cards) > 1 and not copies:
            raise RuntimeError(f"{name} of tensors on {sorted(map(str, cards))}")
        where = given.pop("device", None) or next(iter(cards), FIRST)
        before = {id(one) for one in tensors}
        made = func(*args, **given)
        for one in tree_leaves(made):
            if isinstance(one, Tensor) and id(one) not in before:
                noted(one, torch.device(where))
        return made


def _moved(tensor: Tensor, *args: Any, **given: Any) -> Tensor:
    where, dtype = card(tensor), tensor.dtype
    for one in (*args, given.get("device"), given.get("dtype")):
        if isinstance(one, Tensor):
            where, dtype = card(one), one.dtype
        elif isinstance(one, torch.dtype):
            dtype = one
        elif isinstance(one, str | torch.device):
            where = torch.device(one)
    if (where, dtype) == (card(tensor), tensor.dtype):
        return tensor
    return noted(tensor.type(dtype) if dtype != tensor.dtype else tensor.clone(), where)


def spread(model: PreTrainedModel) -> PreTrainedModel:
    """Its second half of layers, norm and output head on the second card, as `device_map=auto` lays it out."""
    base: Any = model.base_model
    layers = list(base.layers)
    head: Any = model.get_output_embeddings()
    for part in (*layers[len(layers) // 2 :], base.norm, head):
        for weight in (*part.parameters(), *part.buffers()):
            noted(weight, SECOND)
        part.register_forward_pre_hook(_to(SECOND), with_kwargs=True)
    model.register_forward_hook(lambda module, given, made: _at(made, FIRST))
    return model


def _to(where: torch.device) -> Callable[..., Any]:
    return lambda module, args, kwargs: (_at(args, where), _at(kwargs, where))


def _at(values: Any, where: torch.device) -> Any:
    return tree_map(lambda one: one.to(where) if isinstance(one, Tensor) else one, values)


@pytest.fixture(autouse=True)
def uncaptured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.forward.runner.CAPTURE_AFTER", 10**9)


def target() -> PreTrainedModel:
    """Untied, as large models are."""
    return tiny_llama(num_layers=6, dtype=torch.float64).requires_grad_(False)


FAMILIES = [*VARIANTS, "exit_adapter"]


@pytest.mark.parametrize("name", by_default(2, FAMILIES))
@pytest.mark.parametrize("reduced", by_default(1, [False, True]))
def test_a_head_drafts_for_a_target_over_two_cards(name: str, reduced: bool) -> None:
    if name == "exit_adapter" and reduced:
        pytest.skip("it drafts with all tokens")
    ids, mask = ragged_prompts(2)
    vocab = torch.arange(0, 64, 2) if reduced else None
    shapes = {"num_draft_tokens": 3} if name == "exit_adapter" else {"tree": k_ary([2, 1])}
    settings = {"max_new_tokens": 12, "eos_token_id": (), "seed": 0, "verifier": "coupled", **shapes}
    model = target()
    whole = generate(model, random_head(name, model, vocab=vocab), ids, mask, **settings)  # type: ignore[arg-type]
    model = spread(target())
    head = random_head(name, model, vocab=vocab)
    with TwoCards():
        apart = generate(model, head, ids, mask, **settings)  # type: ignore[arg-type]
    assert torch.equal(apart.sequences, whole.sequences)
    assert apart.stats.tau == whole.stats.tau


@pytest.mark.parametrize("name", by_default(6, FAMILIES))
def test_a_head_learns_from_a_target_over_two_cards(name: str) -> None:
    texts = [list(range(5, 25)), list(range(30, 40))]
    model = target()
    head = random_head(name, model)
    batch = replace(batch_of(model, head, texts), features=None)
    whole = [step.head(step.hidden) for step in head.unroll(LiveTarget(model, head.config.taps)(batch))]
    model = spread(target())
    head = random_head(name, model)
    with TwoCards():
        live = LiveTarget(model, head.config.taps)(batch)
        assert live.features is not None
        assert card(live.features) == FIRST
        for step, want in zip(head.unroll(live), whole, strict=True):
            logits = step.head(step.hidden)
            assert {card(one) for one in (step.hidden, logits, step.target_rows, step.valid)} == {FIRST}
            torch.testing.assert_close(logits.to(FIRST), want)
        assert live.target is not None
        p = live.target.chunk(torch.zeros(1, dtype=torch.long))
        assert card(p.log_p) == FIRST


def test_a_target_over_two_cards_drafts_and_is_recorded() -> None:
    ids, mask = ragged_prompts(2)
    plain = generate(target(), None, ids, mask, max_new_tokens=12, eos_token_id=(), seed=0).sequences
    layout = Layout(["head_tail"], 64, 32, "float32", 4, 2, 0, FeatureLayout([2, -1, 0], 32, "bf16", 0))
    texts = [np.arange(5, 5 + length) for length in (20, 9)]
    found = []
    for model in (target(), spread(target())):
        records = [
            Record(one, np.arange(len(one)) > 2, {"document": "", "prompt": n, "turn": 0})
            for n, one in enumerate(texts)
        ]
        with TwoCards():
            out = generate(model, LMDraft(model), ids, mask, max_new_tokens=12, eos_token_id=(), seed=0)
            assert torch.equal(out.sequences, plain)
            assert layout.features is not None
            Scorer(ModelPasses(model, [2, -1, 0], 2), layout, 0, CODES["bf16"](layout.features, {})).score(records)
        found.append([one.payload | one.features for one in records])
    for ours, theirs in zip(*found, strict=True):
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("name", ["eagle3", "exit_adapter", "lm"])
def test_alpha_is_that_of_a_target_on_one_card(name: str) -> None:
    text, found = Text(0, tuple(range(5, 12)), tuple(range(12, 30))), []
    for model in (target(), spread(target())):
        draft = LMDraft(model) if name == "lm" else random_head(name, model)
        with TwoCards():
            found.append(measure_alpha(model, {"x": draft}, [text], Sampling())["x"].by_row)
    for ours, theirs in zip(*(list(one.values()) for one in found), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
