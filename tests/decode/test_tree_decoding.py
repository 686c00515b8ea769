"""Trees of a draft LM inside the decoder: its own cache tells the same as plain passes, and the output stays exact."""

from __future__ import annotations

import copy
from typing import cast

import pytest
import torch
from transformers import PreTrainedModel

from decode.drafters import tree_drafting
from decode.drafters.base import Context
from decode.drafters.drafting import DraftRound
from decode.drafters.lm import LMDraft, lm_round
from decode.forward.target import CachedModel
from decode.loop import Loop
from decode.requests import Request
from decode.sampling.warp import Sampling
from decode.trees.tree import Tree
from decode.trees.tree_plans import Dynamic, Shape, Static
from decode.verify.verdict import Question, Verdict, Verifier
from tests.decode import checks
from tests.decode.test_trees import SHAPES, PlainRunner
from tests.tiers import by_default
from tests.tiny import MODELS, tiny_llama

VOCAB = checks.VOCAB
TARGETS = {name: MODELS[name] for name in ("llama", "gemma3")}


def near(model: PreTrainedModel, strength: float = 0.02) -> LMDraft:
    """A draft that often agrees: the target with a little noise on its weights."""
    generator = torch.Generator().manual_seed(5)
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += strength * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    return LMDraft(draft)


@pytest.mark.parametrize("sampling", by_default(1, [{"temperature": 1.0}, {"temperature": 0.0}, {"top_k": 2}]), ids=str)
@pytest.mark.parametrize("name", ["3x2x1", "sequoia", "dynamic"])
@pytest.mark.parametrize("arch", by_default(1, TARGETS))
def test_coupled_output_equals_autoregressive_output(arch: str, name: str, sampling: dict[str, float]) -> None:
    model = TARGETS[arch]()
    out = checks.check_pathwise_equality(model, near(model), 3, max_new_tokens=16, tree=SHAPES[name], **sampling)
    assert out.stats.tau > 1.3  # a tree that nobody can accept would be exact too


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", ["3x2x1", "dynamic"])
def test_trees_by_name_at_batch_size_one(tree: str, temperature: float) -> None:
    model = TARGETS["llama"]()
    checks.check_pathwise_equality(
        model, near(model), 1, max_new_tokens=24, tree=tree, tree_nodes=12, num_draft_tokens=4, temperature=temperature
    )


@pytest.mark.parametrize("name", by_default(1, ["sequoia", "dynamic"]))
@pytest.mark.parametrize("arch", by_default(1, TARGETS))
def test_every_tree_is_the_one_that_plain_passes_grow(arch: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Round after round, so that what earlier trees left in the draft's cache would show; captures included."""
    model = TARGETS[arch]()
    draft = near(model)
    request = Request([[5, 9, 2, 7], [1, 8], [4, 4, 6, 3, 2]], 60, shape=SHAPES[name])
    loop = Loop(model, draft, request)
    real, rounds = tree_drafting.propose_tree, []

    def propose(drafting: DraftRound, context: Context) -> Tree:
        tree = real(drafting, context)
        plain = PlainRunner(draft.model, [list(one.tokens) for one in loop.rows.current])
        want = real(lm_round(cast(CachedModel, plain), context, cast(int, drafting.key[0])), context)
        assert torch.equal(tree.tokens, want.tokens)
        assert torch.equal(tree.parent_ids, want.parent_ids)
        rounds.append(drafting.runner.replayed)
        return tree

    monkeypatch.setattr("decode.drafters.lm.propose", propose)
    monkeypatch.setattr(Loop, "_waits", property(lambda self: True))  # so that it is asked in every round
    loop.run()
    assert any(rounds)


@pytest.mark.parametrize(
    ("shape", "replacement"),
    by_default(1, [(SHAPES["sequoia"], False), (SHAPES["sequoia"], True), (SHAPES["dynamic"], False)]),
    ids=["without replacement", "with replacement", "dynamic"],
)
@pytest.mark.parametrize("sampling", by_default(1, [Sampling(1, top_k=2), Sampling(), Sampling(0)]), ids=str)
def test_rejection_reads_no_number_twice_and_emits_what_the_filter_keeps(
    shape: Shape, replacement: bool, sampling: Sampling
) -> None:
    model = TARGETS["llama"]()
    prompts = [[5, 9, 2, 7], [1, 8]]
    request = Request(
        prompts, 20, sampling, verifier="rejection", shape=shape, replacement=replacement, audit=True
    )  # fmt: skip
    rows, stats = Loop(model, near(model), request).run()
    assert stats.tau > 1.3
    if 0 < sampling.top_k:
        for prompt, row in zip(prompts, rows, strict=True):
            best = model(torch.tensor([row])).logits[0].topk(sampling.top_k).indices
            assert all(row[t] in best[t - 1] for t in range(len(prompt), len(row)))


def test_a_sampled_tree_that_is_cut_to_a_chain_keeps_its_distribution() -> None:
    """Without q the rule would fall back to the delta rule, which is exact and accepts less."""
    model = tiny_llama(VOCAB)
    request = Request([[5, 9, 2, 7]], 8, verifier="rejection", shape=Static((-1, 0, 1, 1)), audit=True)
    loop = Loop(model, LMDraft(model), request)
    loop._shape = lambda left: request.shape.cut(1)  # as an adaptive budget cuts it
    trees, rule = [], loop.verifier

    class Seen:
        shares_noise = False
        on_host = True

        def __call__(self, question: Question) -> Verdict:
            trees.append(question.tree)
            return rule(question)

    loop.verifier = cast(Verifier, Seen())
    loop.run()
    assert trees
    assert all(tree.is_chain and tree.drawn == "swor" and tree.log_q is not None for tree in trees)


@pytest.mark.parametrize("shape", [Static((-1, 0, 0, 1)), Dynamic(6, 8, 9)], ids=str)
def test_trees_fit_at_the_very_end_of_the_context(shape: Shape) -> None:
    """A dynamic tree reads more nodes than it keeps: slots behind the longest text, positions behind the table."""
    model = tiny_llama(VOCAB, dtype=torch.float64, max_position_embeddings=256)
    prompt = torch.randint(0, VOCAB, (1, 246), generator=torch.Generator().manual_seed(2))
    settings = {"max_new_tokens": 10, "eos_token_id": (), "seed": 0}
    plain = checks.generate(model, None, prompt, **settings)  # type: ignore[arg-type]
    drafted = checks.generate(model, near(model), prompt, tree=shape, **settings)  # type: ignore[arg-type]
    assert torch.equal(plain.sequences, drafted.sequences)
