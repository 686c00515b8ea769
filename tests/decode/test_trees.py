"""Trees of a draft LM: every node is what a plain pass over its own prefix says, and coupled output stays exact."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.common.errors import ConfigError
from decode.drafters import tree_drafting
from decode.drafters.base import Context
from decode.drafters.drafting import DraftRound
from decode.drafters.lm import LMDraft
from decode.drafters.lm_steps import lm_round
from decode.forward.kept.lease import Lease
from decode.forward.target import CachedModel
from decode.loop import Loop
from decode.requests import Request
from decode.sampling.noise import Ledger, Noise, Stream
from decode.sampling.warp import Sampling, warp
from decode.trees.tree import Drawn, Tree
from decode.trees.tree_plans import Dynamic, Shape, Static, k_ary
from decode.verify.rejection import node_plan
from decode.verify.verdict import Question, Verdict, Verifier
from tests.decode import checks
from tests.tiers import by_default
from tests.tiny import MODELS, tiny_llama

VOCAB = 64
RAGGED = [[5, 9, 2, 7], [1, 8], [4, 4, 6, 3, 2]]
SEQUOIA = Static((-1, 0, 0, 0, 1, 1, 2, 4, 4, 6))
SHAPES: dict[str, Shape] = {
    "binary": k_ary([2, 2, 2]),
    "3x2x1": k_ary([3, 2, 1]),
    "sequoia": SEQUOIA,
    "dynamic": Dynamic(depth=4, beam=3, num_nodes=10),
    "dynamic-one-level": Dynamic(depth=1, beam=4, num_nodes=4),
}


class PlainRunner:
    """The runner's contract met by plain passes over each node's whole prefix, without any cache."""

    def __init__(self, model: PreTrainedModel, rows: list[list[int]]) -> None:
        self.model, self.rows = model, rows
        self.nodes: list[list[int]] = [[] for _ in rows]

    def logits(self, prefix: list[int]) -> Tensor:  # (V,)
        return self.model(torch.tensor([prefix])).logits[0, -1]

    def chain(self, tokens: Tensor, starts: Tensor, last_start: int = 0, part: object = None) -> Tensor:  # (B, W, V)
        """A shorter row is read beside a longer one to the longer one's end: what lies behind its own is not asked."""
        begins = starts[:, 0].tolist()
        out = torch.zeros(*tokens.shape, VOCAB, dtype=torch.float64)
        for row, begin, read, made in zip(self.rows, begins, tokens.tolist(), out, strict=True):
            mine = row[begin : begin + len(read)]
            assert read[: len(mine)] == mine  # the draft knows those before
            assert len(row) - begin <= len(read)
            for at in range(len(mine)):
                made[at] = self.logits(row[: begin + at + 1])
        return out

    def passes(self) -> AbstractContextManager[None]:
        return nullcontext()

    def visible(self, end: int) -> int:
        return end

    def node_pass(self, visible: int, part: object = None) -> PlainPass:
        return PlainPass(self)

    def run(self, key: object, make: Callable[[], nn.Module], inputs: tuple[Tensor, ...], moved: object) -> Tensor:
        return make()(*inputs)

    def forward(
        self,
        tokens: Tensor,
        starts: Tensor,
        depths: Tensor,
        ancestors: Tensor,
        last_start: int = 0,
        part: object = None,
    ) -> Tensor:
        batch, width = tokens.shape
        depths, ancestors = depths.expand(batch, -1), ancestors.expand(batch, -1, -1)
        out = []
        for row in range(batch):
            self.nodes[row] += tokens[row].tolist()
            assert ancestors.shape[1:] == (width, len(self.nodes[row]))
            for node in range(width):
                seen = [self.nodes[row][m] for m in ancestors[row, node].nonzero()[:, 0].tolist()]
                assert starts[row, 0] + depths[row, node] == len(self.rows[row]) + len(seen) - 1  # its position
                out.append(self.logits(self.rows[row] + seen))
        return torch.stack(out).view(batch, width, -1)


class PlainPass(nn.Module):
    """`NodePass` by the plain runner."""

    def __init__(self, runner: PlainRunner) -> None:
        super().__init__()
        self.runner = runner

    written: tuple[Tensor, ...] = ()

    def chain(self, tokens: Tensor, starts: Tensor) -> tuple[Tensor]:
        return (self.runner.chain(tokens, starts),)

    def forward(self, tokens: Tensor, starts: Tensor, depths: Tensor, above: Tensor) -> tuple[Tensor]:
        return (self.runner.forward(tokens, starts, depths, above),)


def draft_model() -> PreTrainedModel:
    return tiny_llama(VOCAB, num_layers=1, seed=3, dtype=torch.float64).requires_grad_(False)


def context_of(rows: list[list[int]], shape: Shape, sampling: Sampling, drawn: Drawn, shared: bool) -> Context:
    ids = torch.zeros(len(rows), 64, dtype=torch.long)
    for slot, row in enumerate(rows):
        ids[slot, : len(row)] = torch.tensor(row)
    lengths = torch.tensor([len(row) for row in rows])
    noise = replace(Noise.of(7, list(range(len(rows))), VOCAB, torch.device("cpu"), round_index=5), ledger=Ledger())
    positions = lengths[:, None] + torch.arange(shape.depth + 1)
    gumbel = noise.coupled(positions) if shared and not sampling.is_greedy else None
    return Context(
        ids=ids,
        lengths=lengths,
        shortest=int(lengths.min()),
        longest=int(lengths.max()),
        sampling=sampling.apart(),
        temperature=torch.tensor([sampling.temperature]).double(),
        noise=noise,
        shape=shape,
        drawn=drawn,
        shares_noise=shared,
        gumbel=gumbel,
        lease=Lease(),
    )


def grow(
    shape: Shape, sampling: Sampling, drawn: Drawn = "arbitrary", shared: bool = True
) -> tuple[Tree, Context, PlainRunner]:
    context = context_of(RAGGED, shape, sampling, drawn, shared)
    runner = PlainRunner(draft_model(), RAGGED)
    drafting = lm_round(cast(CachedModel, runner), context, 2)
    return tree_drafting.propose_tree(drafting, context), context, runner


def children_by_node(tree: Tree) -> list[list[tuple[list[int], list[int], list[int]]]]:
    """Of each row: (path of tokens from the root, child ids, child tokens) for every inner node."""
    rows = []
    for row, parents in enumerate(tree.parents_of_rows()):
        tokens = tree.tokens[row].tolist()
        paths = [[]]
        for node in range(1, len(tokens)):
            paths.append([*paths[parents[node]], tokens[node]])
        found = []
        for node, path in enumerate(paths):
            children = [child for child, parent in enumerate(parents) if parent == node]
            if children:
                found.append((path, children, [tokens[child] for child in children]))
        rows.append(found)
    return rows


@pytest.mark.parametrize("sampling", [Sampling(0), Sampling(1), Sampling(0.7, top_k=5)], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_children_are_the_best_of_their_own_prefix_under_the_shared_noise(name: str, sampling: Sampling) -> None:
    tree, context, runner = grow(SHAPES[name], sampling)
    assert tree.tokens[:, 0].tolist() == [row[-1] for row in RAGGED]
    for row, nodes in enumerate(children_by_node(tree)):
        for path, _, tokens in nodes:
            scores = warp(runner.logits(RAGGED[row] + path), sampling)
            noisy = scores if context.gumbel is None else scores + context.gumbel[row, len(path)]
            assert tokens == noisy.topk(len(tokens)).indices.tolist()


@pytest.mark.parametrize("name", ["binary", "3x2x1", "sequoia"])
def test_static_trees_have_the_planned_shape(name: str) -> None:
    tree, _, _ = grow(SHAPES[name], Sampling())
    assert tree.parents == cast(Static, SHAPES[name]).parents
    assert tree.num_nodes == SHAPES[name].num_nodes


@pytest.mark.parametrize(
    ("temperature", "shared", "scale"),
    [(0.0, True, tree_drafting.DISAGREEMENT), (1.0, True, tree_drafting.DISAGREEMENT), (1.0, False, 1.0)],
)
def test_a_dynamic_tree_keeps_the_best_of_all_nodes(temperature: float, shared: bool, scale: float) -> None:
    """Against an exhaustive search over the tree in which every node has `beam` children, beam wide enough for all:
    by how far ahead a candidate lies where the target's choice is settled, by q where it is yet to be drawn."""
    shape = Dynamic(depth=3, beam=4, num_nodes=4)
    tree, context, runner = grow(shape, Sampling(temperature), shared=shared)
    for row in range(len(RAGGED)):
        values = {}

        def search(path: tuple[int, ...], value: float, row: int = row, values: dict = values) -> None:
            if len(path) == shape.depth:
                return
            scores = runner.logits([*RAGGED[row], *path])
            noisy = scores if context.gumbel is None else scores + context.gumbel[row, len(path)]
            best = (noisy / scale).log_softmax(-1).topk(shape.beam)
            for more, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                values[(*path, token)] = value + more
                search((*path, token), value + more)

        search((), 0.0)
        best = set(sorted(values, key=values.__getitem__, reverse=True)[: shape.num_nodes - 1])
        kept = {(*path, token) for path, _, tokens in children_by_node(tree)[row] for token in tokens}
        assert kept == best


def test_rows_of_a_dynamic_tree_differ_and_are_numbered_level_by_level() -> None:
    tree, _, _ = grow(SHAPES["dynamic"], Sampling())
    rows = tree.parents_of_rows()
    assert len({tuple(row) for row in rows}) > 1
    assert all(parent < node for row in rows for node, parent in enumerate(row))
    assert (tree.depths.diff() >= 0).all()
    assert tree.max_depth == 4


def test_children_without_replacement_are_the_best_of_log_q_and_noise_of_their_own() -> None:
    sampling = Sampling(0.7, top_k=9)
    tree, context, runner = grow(SEQUOIA, sampling, "swor", shared=False)
    fresh = Noise.of(7, [0, 1, 2], VOCAB, torch.device("cpu"), round_index=5)
    assert tree.drawn == "swor"
    assert tree.log_q is not None
    for row, nodes in enumerate(children_by_node(tree)):
        for path, children, tokens in nodes:
            node = SEQUOIA.parents[children[0]]
            log_q = warp(runner.logits(RAGGED[row] + path), sampling).log_softmax(-1)
            positions = context.lengths[:, None] + len(path)
            gumbel = fresh.fresh_gumbel(Stream.DRAFT, positions, torch.tensor([node]))[row, 0]
            assert torch.allclose(tree.log_q[row, node], log_q, atol=1e-12)
            assert tokens == (tree.log_q[row, node] + gumbel).topk(len(tokens)).indices.tolist()


def test_children_with_replacement_are_drawn_each_with_a_number_of_its_own() -> None:
    tree, context, _ = grow(SEQUOIA, Sampling(), "iid", shared=False)
    fresh = Noise.of(7, [0, 1, 2], VOCAB, torch.device("cpu"), round_index=5)
    assert tree.drawn == "iid"
    assert tree.log_q is not None
    for row, nodes in enumerate(children_by_node(tree)):
        for path, children, tokens in nodes:
            node = SEQUOIA.parents[children[0]]
            positions = (context.lengths[:, None] + len(path)).expand(-1, len(children))
            gumbel = fresh.fresh_gumbel(Stream.DRAFT, positions, torch.tensor(children))[row]
            assert tokens == (tree.log_q[row, node] + gumbel).argmax(-1).tolist()


def test_siblings_beyond_the_support_are_told_to_the_rule_and_never_stand() -> None:
    """Their q is 0: `u * q < p` alone would let them pass whenever p > 0."""
    tree, _, _ = grow(k_ary([4, 3]), Sampling(1, top_k=2), "swor", shared=False)
    assert tree.log_q is not None
    for row, nodes in enumerate(children_by_node(tree)):
        for _, children, tokens in nodes:
            log_q = tree.log_q[row, cast(tuple, tree.parents)[children[0]]]
            assert (log_q[tokens] > -torch.inf).tolist() == [True, True] + [False] * (len(tokens) - 2)
            p, present = torch.full((VOCAB,), 1 / VOCAB, dtype=torch.float64), torch.ones(len(tokens)).bool()
            plan = node_plan(p, log_q.exp(), torch.tensor(tokens), present, without_replacement=True)
            assert (plan.accept[2:] == 0).all()
            assert plan.residual.sum() == pytest.approx(1)


def test_at_temperature_zero_siblings_are_the_best_ones_whatever_the_rule_draws() -> None:
    tree, _, _ = grow(k_ary([3, 2]), Sampling(0), "swor", shared=False)
    same, _, _ = grow(k_ary([3, 2]), Sampling(0))
    assert tree.drawn == "arbitrary"
    assert torch.equal(tree.tokens, same.tokens)


def test_a_vocabulary_narrower_than_the_tree() -> None:
    shape = k_ary([70])
    for drawn in ("arbitrary", "swor", "iid"):
        tree, _, _ = grow(shape, Sampling(), cast(Drawn, drawn), shared=drawn == "arbitrary")
        assert tree.tokens.shape == (3, 71)
    tree, _, _ = grow(Dynamic(2, 70, 80), Sampling())
    assert tree.tokens.shape == (3, 80)


def test_the_draft_reads_inner_nodes_only() -> None:
    for shape in SHAPES.values():
        _, _, runner = grow(shape, Sampling())
        assert {len(nodes) for nodes in runner.nodes} == {shape.num_read}


def test_plans_are_numbered_level_by_level() -> None:
    with pytest.raises(ConfigError, match="level by level"):
        Static((-1, 0, 1, 0))


def test_a_plan_without_branches_draws_what_a_chain_draws() -> None:
    """Coupled and independent drafts of a 1x1x1 tree follow the same noise as the chain's own loop would."""
    tree, context, runner = grow(k_ary([1, 1, 1]), Sampling())
    assert tree.is_chain
    for row, prefix in enumerate(RAGGED):
        text = list(prefix)
        for depth in range(3):
            assert context.gumbel is not None
            text.append(int((runner.logits(text) + context.gumbel[row, depth]).argmax()))
        assert tree.tokens[row].tolist() == text[-4:]


def test_cut_plans_are_cut_by_level() -> None:
    assert SEQUOIA.cut(1) == Static((-1, 0, 0, 0))
    assert replace(SEQUOIA).num_read == 4


WORDS = checks.VOCAB
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
    model = tiny_llama(WORDS)
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
    model = tiny_llama(WORDS, dtype=torch.float64, max_position_embeddings=256)
    prompt = torch.randint(0, WORDS, (1, 246), generator=torch.Generator().manual_seed(2))
    settings = {"max_new_tokens": 10, "eos_token_id": (), "seed": 0}
    plain = checks.generate(model, None, prompt, **settings)  # type: ignore[arg-type]
    drafted = checks.generate(model, near(model), prompt, tree=shape, **settings)  # type: ignore[arg-type]
    assert torch.equal(plain.sequences, drafted.sequences)
