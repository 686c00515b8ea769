"""Decoding on a device: every drafter, rule and architecture writes there what it writes on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode import Conversation, generate, load_drafter
from decode.drafters.base import Drafter
from decode.drafters.beside.other_device import OtherDeviceDrafter
from decode.drafters.lm import LMDraft
from decode.loop import Loop
from decode.requests import Request
from decode.sampling.warp import Sampling
from decode.trees.tree_plans import Dynamic, Shape, chain, k_ary
from tests.decode import matrix_drafters
from tests.decode.checks import ragged_prompts, unpadded
from tests.decode.heads import DEPTH, VARIANTS, random_head
from tests.decode.matrix_drafters import MAKERS
from tests.decode.matrix_drafters import SHAPES as TREES
from tests.gpu import DEVICE, MODELS, ON_A_DEVICE, deep_target, tiny_llama
from tests.tiny import IN_FLOAT64, tiny_tokenizer

pytestmark = [*ON_A_DEVICE, pytest.mark.usefixtures("uncaptured")]  # test_captures.py is about those

NEW_TOKENS = 16
CPU = torch.device("cpu")
MODULES = ("target", "draft", "random_draft", "foreign_draft")
RULES = {"coupled": 1.0, "greedy": 0.0, "rejection": 0.8, "block": 0.8, "typical": 0.8}
"""With a temperature of each."""


@cache
def _moved(name: str, place: torch.device, dtype: torch.dtype, *given: Any) -> Any:
    made = copy.deepcopy(ORIGINALS[name](*given))
    if isinstance(made, LMDraft):
        return LMDraft(cast(Any, made.model).to(place, dtype))
    return made.to(place, dtype)


ORIGINALS: dict[str, Callable[..., Any]] = {name: getattr(matrix_drafters, name) for name in MODULES}


@pytest.fixture
def lie_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.device, torch.dtype], None]:
    """The models of `matrix_drafters` lie there from then on."""

    def move(place: torch.device, dtype: torch.dtype = torch.float64) -> None:
        for name in MODULES:
            made = lambda *given, name=name: _moved(name, place, dtype, *given)  # noqa: E731
            monkeypatch.setattr(matrix_drafters, name, made)

    return move


def request_of(rule: str, batch: int, shape: Shape, **more: Any) -> Request:
    ids, mask = ragged_prompts(batch)
    given = {"shape": shape, "seed": 5} | more
    return Request(unpadded(ids, mask), NEW_TOKENS, Sampling(RULES[rule]), rule, **given)


def written(model: PreTrainedModel, drafter: Drafter | None, request: Request) -> list[list[int]]:
    if drafter is None:
        request = replace(request, verifier="coupled", shape=chain(0))
    tokens, stats = Loop(model, drafter, request).run()
    assert stats.num_tokens == request.max_new_tokens * len(request.prompts)
    return tokens


def known(texts: list[list[int]], rule: str) -> list[list[int]]:
    """What is the same on every device. A GPU's host is a round behind, and so a draft is made for the last token too,
    where a CPU draws it alone: by rules that keep the distribution and not the text, another draw."""
    return texts if rule in ("coupled", "greedy") else [text[:-1] for text in texts]


CASES = [
    (name, rule, batch)
    for name in MAKERS
    for rule in ("coupled", "greedy", "rejection", "block")
    for batch in (1, 3)
    if rule != "block" or (name not in TREES and name != "oracle tree")
]


@pytest.mark.parametrize(("name", "rule", "batch"), CASES)
def test_drafters_write_what_they_write_on_the_cpu(name: str, rule: str, batch: int, lie_on: Any) -> None:
    request = request_of(rule, batch, TREES.get(name, chain(3)))
    found = {}
    for place in (CPU, DEVICE):
        lie_on(place)
        model = matrix_drafters.target("llama")
        plain = written(model, None, request)
        found[place.type, "plain"] = plain
        found[place.type, "drafted"] = written(model, MAKERS[name]("llama", plain), request)
        if rule in ("coupled", "greedy"):
            assert found[place.type, "drafted"] == plain, f"on {place}"
    assert found[DEVICE.type, "plain"] == found["cpu", "plain"]
    assert known(found[DEVICE.type, "drafted"], rule) == known(found["cpu", "drafted"], rule)


@pytest.mark.parametrize("name", MAKERS)
def test_drafters_change_nothing_in_single_precision(name: str, lie_on: Any) -> None:
    lie_on(DEVICE, torch.float32)
    model, request = matrix_drafters.target("llama"), request_of("coupled", 3, TREES.get(name, chain(3)), batch_size=2)
    plain = written(model, None, request)
    assert written(model, MAKERS[name]("llama", plain), request) == plain


@pytest.mark.parametrize("name", ["random", "tree", "ngram tree", "jacobi tree", "early_exit", "ahead"])
@pytest.mark.parametrize("architecture", IN_FLOAT64)
def test_architectures_write_what_they_write_on_the_cpu(architecture: str, name: str, lie_on: Any) -> None:
    """Windows, grouped heads, learned positions; rows are refilled."""
    request = request_of("coupled", 3, TREES.get(name, chain(3)), batch_size=2)
    found = []
    for place in (CPU, DEVICE):
        lie_on(place)
        model = matrix_drafters.target(architecture)
        plain = written(model, None, request)
        assert written(model, MAKERS[name](architecture, plain), request) == plain, f"on {place}"
        found.append(plain)
    assert found[0] == found[1]


def test_experts_that_round_to_float32_are_not_changed_by_drafts() -> None:
    model = MODELS["exaone_moe"]().to(DEVICE)
    request = request_of("coupled", 3, chain(3))
    assert written(model, LMDraft(MODELS["exaone_moe"]().to(DEVICE)), request) == written(model, None, request)


SHAPES: dict[str, Shape] = {"chain": chain(DEPTH), "tree": k_ary([3, 2, 1]), "dynamic": Dynamic(DEPTH, 3, 9)}
HEADS = [
    (name, rule, shape)
    for name in VARIANTS
    for rule in RULES
    for shape in SHAPES
    if shape == "chain" or (rule, shape) in (("coupled", "tree"), ("coupled", "dynamic"), ("rejection", "tree"))
]


def head_on(name: str, model: PreTrainedModel, vocab: Tensor | None = None) -> Any:
    return random_head(name, model, vocab=vocab).to(model.device)


@pytest.mark.parametrize(("name", "rule", "shape"), HEADS)
def test_heads_write_what_they_write_on_the_cpu(name: str, rule: str, shape: str) -> None:
    for batch in (1, 3) if shape == "chain" else (3,):
        request = request_of(rule, batch, SHAPES[shape])
        found = []
        for place in (CPU, DEVICE):
            model = deep_target(place)
            found.append(written(model, head_on(name, model), request))
            if rule in ("coupled", "greedy"):
                assert found[-1] == written(model, None, request), f"on {place}, batch {batch}"
        assert known(found[0], rule) == known(found[1], rule), f"batch {batch}"


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("name", [*VARIANTS, "exit_adapter"])
def test_heads_change_nothing_in_single_precision(name: str, reduced: bool) -> None:
    if reduced and name == "exit_adapter":
        pytest.skip("it drafts by the target's own head")
    model, request = deep_target(DEVICE, torch.float32), request_of("coupled", 3, chain(DEPTH), batch_size=2)
    head = head_on(name, model, torch.arange(0, 64, 2) if reduced else None)
    assert written(model, head, request) == written(model, None, request)


TRAITS = {"forbid": lambda number, ids: [*range(8, 40)], "shift": lambda ids, scores: scores.roll(3, -1)}
SETTINGS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "top_k and top_p": {"top_k": 9, "top_p": 0.8, "temperature": 0.7},
    "min_p": {"min_p": 0.1},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "biases": {"logit_bias": {3: 2.0, 9: -4.0}, "banned_words": [5, 7]},
    "allowed": {"prefix_allowed_tokens_fn": TRAITS["forbid"]},
    "processor": {"logits_processor": [TRAITS["shift"]]},
    "criterion": {"stopping_criteria": [lambda ids, scores: ids[:, -1] % 7 == 0]},
    "ends": {"eos_token_id": [3, 9, 11]},
    "several": {"num_return_sequences": 2},
    "adaptive": {"adaptive": True},
    "adaptive tree": {"adaptive": True, "tree": "2x2"},
    "dynamic": {"tree": "dynamic"},
    "overlap": {"overlap": True},
    "strict": {"strict": True},
    "audit": {"audit": True},
    "rejection without replacement": {"verifier": "rejection", "tree": "2x2"},
    "rejection with replacement": {"verifier": "rejection", "tree": "2x2", "replacement": True},
    "typical": {"verifier": "typical", "lossy": True},
    "rows in turn": {"batch_size": 2},
}


@pytest.mark.parametrize("told", SETTINGS)
@pytest.mark.parametrize("drafter", ["lm", "eagle3", "ngram"])
def test_settings_of_generate_mean_the_same(told: str, drafter: str) -> None:
    settings, (ids, mask) = SETTINGS[told], ragged_prompts(3)
    if drafter != "lm" and settings.get("overlap"):
        pytest.skip("a draft language model alone drafts ahead")
    if drafter == "ngram" and settings.get("replacement"):
        pytest.skip("it samples nothing")
    found = []
    for place in (CPU, DEVICE):
        model = deep_target(place)
        draft: Any = LMDraft(tiny_llama(num_layers=1, seed=3, dtype=torch.float64).to(place))
        if drafter != "lm":
            draft = head_on("eagle3", model) if drafter == "eagle3" else load_drafter("ngram", target=model)
        given: dict[str, Any] = {"max_new_tokens": 16, "eos_token_id": (), "num_draft_tokens": 3, "seed": 1}
        out = generate(model, draft, ids.to(place), mask.to(place), **given | settings)
        assert out.sequences.device.type == place.type
        found.append(out.sequences.tolist())
    rule = settings.get("verifier", "coupled")
    assert known(found[0], rule) == known(found[1], rule)


def test_prompts_may_lie_on_the_cpu() -> None:
    model, (ids, mask) = deep_target(DEVICE), ragged_prompts(2)
    outputs = [
        generate(model, None, ids.to(a), mask.to(b), max_new_tokens=8, eos_token_id=(), seed=1).sequences.cpu()
        for a, b in ((CPU, CPU), (DEVICE, DEVICE), (CPU, DEVICE))
    ]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_draft_on_the_cpu_drafts_for_a_target_on_the_device(rule: str, overlap: bool) -> None:
    """`draft.device=cpu`."""
    model = tiny_llama(dtype=torch.float64).to(DEVICE)
    near = tiny_llama(num_layers=1, seed=3, dtype=torch.float64)
    request = request_of(rule, 3, chain(3), overlap=overlap)
    here, there = LMDraft(copy.deepcopy(near).to(DEVICE)), OtherDeviceDrafter(LMDraft(near))
    assert written(model, there, request) == written(model, here, request)


def test_a_conversation_goes_on() -> None:
    ids, _ = ragged_prompts(1)
    found = []
    for place in (CPU, DEVICE):
        model, told, text = deep_target(place), Conversation(), ids.to(place)
        head = head_on("mtp", model)
        for _ in range(3):
            text = generate(model, head, text, max_new_tokens=8, eos_token_id=(), seed=1, conversation=told).sequences
        found.append(text.cpu())
    assert torch.equal(*found)


def test_a_grammar_is_kept(tmp_path: Path) -> None:
    pytest.importorskip("xgrammar")
    tokenizer, file = tiny_tokenizer(), tmp_path / "asked.regex"
    file.write_text("(yes|no|note) [0-3](,[45])?")
    ids, found = torch.tensor([[5, 9, 2, 7]]), []
    for place in (CPU, DEVICE):
        model = tiny_llama(300, dtype=torch.float64, eos_token_id=tokenizer.eos_token_id).to(place)
        draft = LMDraft(tiny_llama(300, seed=3, dtype=torch.float64).to(place))
        given: dict[str, Any] = {"grammar": str(file), "tokenizer": tokenizer, "max_new_tokens": 16, "seed": 1}
        found.append(generate(model, draft, ids.to(place), **given).sequences.cpu())
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["lm", *VARIANTS])
def test_half_precision_runs_and_near_ties_alone_differ(name: str, dtype: torch.dtype) -> None:
    """Most tokens are those of plain decoding; a text goes its own way from the first flip on."""
    model, request = deep_target(DEVICE, dtype), request_of("coupled", 3, chain(DEPTH))
    lm = LMDraft(tiny_llama(num_layers=1, seed=3, dtype=dtype).to(DEVICE))
    head = lm if name == "lm" else head_on(name, model)
    pairs = zip(written(model, head, request), written(model, None, request), strict=True)
    same = [sum(a == b for a, b in zip(ours, plain, strict=True)) / len(plain) for ours, plain in pairs]
    assert sum(same) / len(same) > 0.6, same
