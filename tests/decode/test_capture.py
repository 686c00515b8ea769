"""Captured passes: the same logits as the model's own, at every position; passes that look at values on the host and
captures that change a result run as they are."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import JetMoeConfig, JetMoeForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from decode import generate
from decode.drafters.base import Batch
from decode.drafters.lm import LMDraft
from decode.drafters.packed_rows import NAME
from decode.forward import capture as capture_module
from decode.forward.capture import NODE_BYTES, Trace, Uncapturable, capture, host_reads
from decode.forward.packing import Packing
from decode.forward.runner import CAPTURE_AFTER, MOST_CAPTURES, Runner
from decode.forward.target import CachedModel
from decode.trees.tree_plans import chain, k_ary
from tests.decode.checks import ragged_prompts
from tests.decode.heads import VARIANTS, random_head
from tests.tiers import by_default
from tests.tiny import IN_FLOAT64, MODELS, tiny_llama


@pytest.mark.parametrize("name", by_default(3, IN_FLOAT64))  # the other is not captured: experts are chosen by value
def test_captured_logits_are_those_of_the_model(name: str) -> None:
    model = MODELS[name]()
    ids, _ = ragged_prompts(2)
    want = model(ids).logits
    runner = CachedModel(model, 2, 64)
    with torch.inference_mode():
        runner.prefill(ids, [0, 0], [3, 3])
        for start, width in ((3, 2), (5, 1), (6, 1), (7, 2)) * CAPTURE_AFTER:
            have = runner.chain(ids[:, start : start + width], torch.full((2, 1), start), start)
            torch.testing.assert_close(have, want[:, start : start + width], rtol=0, atol=1e-10)
    assert len(runner._passes) == 2
    assert all(isinstance(one, Trace) for one in runner._passes.values())


@pytest.mark.parametrize("batch", by_default(1, [3, 1]))
def test_a_perfect_draft_is_accepted_while_its_passes_are_being_captured(batch: int) -> None:
    """Checking a capture once overwrote a cached token, and acceptance collapsed in the call that captured."""
    model = MODELS["llama"]()
    ids, mask = ragged_prompts(batch)
    out = generate(model, LMDraft(model), ids, mask, max_new_tokens=50, num_draft_tokens=4, eos_token_id=(), seed=0)
    assert out.stats.tau == 5.0
    assert out.stats.acceptance_by_position == [1.0] * 4


def captures(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """Those that are made from here on, by their keys."""
    made: dict[Any, Any] = {}
    keep = Runner._keep

    def noting(self: Runner, key: Any, one: Any, beside: Runner | None) -> None:
        made[key] = one
        keep(self, key, one, beside)

    monkeypatch.setattr(Runner, "_keep", noting)
    return made


@pytest.mark.parametrize(
    ("name", "reduced"), by_default(1, [("lm", False), ("eagle3", True), *((name, False) for name in VARIANTS)])
)
def test_drafts_over_packed_weights_are_captured(
    name: str, reduced: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the precision that is packed on a CPU: captures that did not know the packed layers, or looked for rows in the
    packed output head, fell back without changing any result."""
    model = tiny_llama(num_layers=6).requires_grad_(False)
    vocab = torch.arange(0, 64, 2) if reduced else None
    draft = LMDraft(tiny_llama(seed=1)) if name == "lm" else random_head(name, model, vocab=vocab)
    logging.getLogger("draftsmith").propagate = True
    ids, _ = ragged_prompts(1)
    made = captures(monkeypatch)
    for shape in (chain(3), k_ary([2, 1])):
        generate(model, draft, ids, max_new_tokens=6 * CAPTURE_AFTER, tree=shape, eos_token_id=(), seed=0)
    assert "uncaptured" not in caplog.text
    drafted = [one for key, one in made.items() if draft.runner.serial in key]
    assert len(drafted) >= 2
    assert all(isinstance(one, Trace) for one in drafted)
    if reduced:  # its rows were 0.1 ms of each draft token slower unpacked
        assert all(any(weight.is_mkldnn and weight.shape[0] == 32 for weight in one.weights) for one in drafted)
        assert NAME not in dict(draft.named_modules())


def test_layers_that_share_a_mask_copy_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer copied it for the queries of a group, 1 ms of a round of 30 layers: nothing that is written into a
    second time can be computed once."""
    model, kinds = tiny_llama(num_layers=4, num_key_value_heads=1), Counter[str]()
    forget = capture_module._forget_lines

    def counted(graph: Any) -> int:
        kinds.update(node.kind() for node in graph.nodes())
        return forget(graph)

    monkeypatch.setattr(capture_module, "_forget_lines", counted)
    runner, ids = CachedModel(model, 1, 64), torch.arange(1, 4)[None]
    with torch.inference_mode():
        for start in range(0, 3 * CAPTURE_AFTER, 3):
            runner.chain(ids, torch.full((1, 1), start), start)
    assert kinds["aten::scaled_dot_product_attention"] == 4
    assert kinds["aten::repeat"] == 1


def test_a_model_that_cannot_be_captured_is_run_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("data-dependent control flow")

    monkeypatch.setattr("decode.forward.capture.Trace", refuse)
    model = MODELS["llama"]()
    ids, _ = ragged_prompts(1)
    out = generate(model, LMDraft(model), ids, max_new_tokens=50, eos_token_id=(), seed=0)
    assert torch.equal(out.sequences, generate(model, None, ids, max_new_tokens=50, eos_token_id=(), seed=0).sequences)


@pytest.mark.parametrize("name", IN_FLOAT64)
def test_training_and_serving_see_the_same_logits(name: str) -> None:
    """unroll() at a position gives the logits that propose() drafts from there, in a padded and in a packed row."""
    model = MODELS[name]()
    draft = LMDraft(model)
    ids, _ = ragged_prompts(2)
    packed = torch.cat([ids[0, :6], ids[1, :3]])[None].repeat(2, 1)
    document = torch.tensor([[0] * 6 + [1] * 3, [0] * 6 + [-1] * 3])
    positions = torch.tensor([[*range(6), *range(3)], [*range(6), 0, 0, 0]])
    batch = Batch(packed, positions, document, torch.ones_like(packed, dtype=torch.bool))
    (step,) = draft.unroll(batch)
    logits = step.head(step.hidden)
    for tokens, have in ((ids[:1, :6], logits[:1, :6]), (ids[1:, :3], logits[:1, 6:]), (ids[:1, :6], logits[1:, :6])):
        runner = CachedModel(model, 1, 64)
        with torch.inference_mode():
            for t in range(tokens.shape[1]):
                served = runner.chain(tokens[:, t : t + 1], torch.tensor([[t]]), t)
                torch.testing.assert_close(have[:, t : t + 1].detach(), served, rtol=1e-6, atol=1e-9)
    assert step.valid.tolist() == [[True] * 5 + [False] + [True] * 2 + [False], [True] * 5 + [False] * 4]
    assert step.target_rows.tolist() == [list(range(9)), list(range(9, 18))]


def test_captures_are_given_up_beyond_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws are part of a draft's capture: a service that is asked for many temperatures must not keep them all."""
    monkeypatch.setitem(MOST_CAPTURES, "cpu", 2)
    runner = CachedModel(tiny_llama(), 1, 64)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with torch.inference_mode():
        for width in (1, 2, 3, 4):
            for _ in range(CAPTURE_AFTER):
                runner.chain(tokens[:, :width], torch.tensor([[3]]), 3)
    assert [key[1] for key in runner._passes] == [3, 4]


def silently(model: torch.nn.Module) -> None:
    """A write that torch's version counter does not see."""
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * -1.5)


def hooked(model: torch.nn.Module) -> None:
    model.get_output_embeddings().register_forward_hook(lambda module, inputs, logits: -logits)  # type: ignore[operator]


@pytest.mark.parametrize("change", [silently, hooked])
def test_captures_follow_changes_that_torch_does_not_count(change: Callable[[torch.nn.Module], None]) -> None:
    model = tiny_llama()
    ids, _ = ragged_prompts(1)
    generate(model, None, ids, max_new_tokens=20, temperature=0, eos_token_id=(), seed=0)
    change(model)
    ours = generate(model, None, ids, max_new_tokens=20, temperature=0, eos_token_id=(), seed=0)
    theirs = model.generate(ids, do_sample=False, max_new_tokens=20)  # type: ignore[operator]
    assert torch.equal(ours.sequences, theirs)


@pytest.mark.slow
def test_one_capture_serves_every_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service may be asked for any; each capture of a draft took 20 MB and a second."""
    model, draft = MODELS["llama"](), LMDraft(tiny_llama(num_layers=1, seed=3, dtype=torch.float64))
    ids, _ = ragged_prompts(1)
    made = captures(monkeypatch)
    for tree in ("chain", "dynamic"):
        for temperature in (0.5, 0.9, 1.0, 1.3):
            settings = {"max_new_tokens": 30, "temperature": temperature, "tree": tree, "eos_token_id": (), "seed": 0}
            out = generate(model, draft, ids, **settings)  # type: ignore[arg-type]
            assert torch.equal(out.sequences, generate(model, None, ids, **settings).sequences)  # type: ignore[arg-type]
    assert len([key for key in made if draft.runner.serial in key]) == 2


class Writes(torch.nn.Module):
    """Two caches that hold the same at first, and one that is only read: x (N,) -> (3, N)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.read = (torch.zeros(2, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        at = torch.zeros(1, dtype=torch.long)
        self.first.index_copy_(0, at, x[None])
        self.second.index_copy_(0, at, 2 * x.reshape(x.shape[0] // 2, 2).reshape(1, x.shape[0]))
        return (torch.stack([self.first[0, :], self.second[:, :][0], self.read[0] + x]),)


def test_a_capture_knows_its_sizes_and_keeps_caches_apart_that_look_alike() -> None:
    """Arithmetic of shapes is done once; tensors that are equal when a capture is made may be written later."""
    module, x = Writes(), torch.arange(4.0)
    trace = Trace(module, (x,))
    (have,) = trace(x + 1)
    assert torch.equal(have, torch.stack([x + 1, 2 * (x + 1), x + 1]))
    module.read += 5
    assert torch.equal(trace(x)[0][2], x + 5)
    assert trace.num_bytes < 30 * NODE_BYTES


class Commits(torch.nn.Module):
    """Moves what lies in a cache, which nothing in it reads afterwards: x (N,) -> (N,)."""

    def __init__(self, told: bool) -> None:
        super().__init__()
        self.cache = torch.arange(6.0)
        self.written = (self.cache,) if told else ()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        at = x.long()
        self.cache[:][at] = self.cache[at + 1]
        return (x + 1,)


def test_a_capture_writes_what_nothing_in_it_reads() -> None:
    """Accepted nodes of a tree are moved at the end of a round. TorchScript drops writes to a constant that is not read
    again: a captured tree left its rejected nodes in the text's slots, and only the next rounds showed it."""
    module, x = Commits(told=True), torch.arange(2.0)
    made = capture(module, (x,), (x + 1,), Packing(module))
    module.cache.copy_(torch.tensor([9.0, 8, 7, 6, 5, 4]))
    made(x)
    assert module.cache.tolist() == [8, 7, 7, 6, 5, 4]


def test_a_capture_that_leaves_a_cache_as_it_was_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Commits(told=True), torch.arange(2.0)
    monkeypatch.setattr(Trace, "__call__", lambda self, x: (x + 1,))
    with pytest.raises(Uncapturable, match="changes"):
        capture(module, (x,), (x + 1,), Packing(module))


class Reads(nn.Module):
    """x (N,) -> a tensor made in one of the ways below."""

    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.way(x),)


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "tolist": lambda x: x + len(x.tolist()),
    "numpy": lambda x: x + int(x.numpy().sum()),
    "_local_scalar_dense": lambda x: x * 2 if x.sum() > 0 else x,
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(x > 1),
    "index": lambda x: x[x > 1],
    "repeat_interleave": lambda x: x.repeat_interleave(x),
    "_unique2": lambda x: x.unique(),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_of_values_is_named_and_never_captured(name: str) -> None:
    x = torch.arange(1, 4)
    assert name in host_reads(Reads(READS[name]), (x,))
    with pytest.raises(Uncapturable, match=name):
        capture(Reads(READS[name]), (x,), (x + 1,), Packing(nn.Module()))


def test_passes_of_shapes_alone_read_nothing() -> None:
    def way(x: Tensor) -> Tensor:
        return x.repeat_interleave(2)[: x.shape[0]].scatter(0, x - 1, x)[torch.arange(len(x))] + x.topk(1).values

    assert host_reads(Reads(way), (torch.arange(1, 4),)) == []


def jetmoe() -> PreTrainedModel:
    torch.manual_seed(0)
    config = JetMoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, kv_channels=8, num_key_value_heads=2,
        num_local_experts=3, num_experts_per_tok=2, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    return JetMoeForCausalLM(config).double().eval().requires_grad_(False)


def mixtral(experts: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    model = MixtralForCausalLM(config).eval().requires_grad_(False)
    model.set_experts_implementation(experts)
    return model


def uncached(model: PreTrainedModel, ids: Tensor, new: int) -> Tensor:
    for _ in range(new):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids


def runner_of(model: PreTrainedModel) -> Runner:
    (runner,) = vars(model)["_draftsmith_runners"]._kept.values()
    return runner


@pytest.mark.parametrize("make", [jetmoe, lambda: mixtral("eager")])
def test_experts_that_are_sorted_on_the_host_are_run_as_they_are(
    make: Callable[[], PreTrainedModel], caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    logging.getLogger("draftsmith").propagate = True
    ids = torch.tensor([[5, 9, 2], [33, 7, 60]])
    out = generate(model, None, ids, max_new_tokens=3 * CAPTURE_AFTER, temperature=0, eos_token_id=(), seed=0)
    assert torch.equal(out.sequences, uncached(model, ids, 3 * CAPTURE_AFTER))
    assert not any(isinstance(one, Trace) for one in runner_of(model)._passes.values())
    assert caplog.text.count("passes run uncaptured, which is slower: the model reads values") == 1


def test_grouped_experts_are_captured() -> None:
    model = mixtral("grouped_mm")
    ids = torch.tensor([[5, 9, 2]])
    out = generate(model, None, ids, max_new_tokens=3 * CAPTURE_AFTER, temperature=0, eos_token_id=(), seed=0)
    assert torch.equal(out.sequences, uncached(model, ids, 3 * CAPTURE_AFTER))
    assert any(isinstance(one, Trace) for one in runner_of(model)._passes.values())


def test_a_capture_that_has_baked_tokens_in_is_found_by_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a read goes unnoticed: the same tokens again would agree."""
    monkeypatch.setattr("decode.forward.capture.host_reads", lambda module, inputs: [])
    bakes = Reads(lambda x: x + sum(x.tolist()))
    with pytest.raises(Uncapturable, match="changes the result"):
        capture(bakes, (torch.arange(3),), (torch.arange(3) + 1,), Packing(nn.Module()))


@pytest.mark.parametrize("error", [RuntimeError, TypeError, IndexError])
def test_a_capture_that_breaks_when_it_is_used_is_not(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    class Breaks:
        def __init__(self, *args: object) -> None: ...

        def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
            raise error("Expected 3 elements in a list but found 2")

    monkeypatch.setattr("decode.forward.capture.Trace", Breaks)
    model = tiny_llama().requires_grad_(False)
    ids = torch.tensor([[5, 9, 2]])
    out = generate(model, None, ids, max_new_tokens=3 * CAPTURE_AFTER, temperature=0, eos_token_id=(), seed=0)
    assert torch.equal(out.sequences, uncached(model, ids, 3 * CAPTURE_AFTER))


def test_nothing_is_collected_while_a_graph_is_captured() -> None:
    """A graph in a cycle that is freed meanwhile ends the capture."""
    with capture_module._nothing_collected():
        assert not gc.isenabled()
    assert gc.isenabled()
