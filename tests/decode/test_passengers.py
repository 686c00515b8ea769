"""Tokens that ride along in the target pass change nothing for the nodes, and hear what their own pass would say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode import generate
from decode.drafters.base import Context
from decode.forward.target import CachedModel
from decode.loop import Loop
from decode.requests import Request
from decode.trees.tree import Passengers, Tree, chain_parents, split_passengers, with_passengers
from decode.trees.tree_plans import chain
from tests.decode.checks import ragged_prompts, texts_of
from tests.decode.drafters import Oracle, OracleTree
from tests.tiers import by_default
from tests.tiny import IN_FLOAT64, MODELS, tiny_llama

PROMPTS = [[5, 9, 2, 7, 30, 4], [1, 8], [11, 60, 3, 3]]
SLOTS = 32
BATCH = len(PROMPTS)
SHAPES: dict[str, tuple[int, ...] | Tensor] = {
    "pending alone": (-1,),
    "chain": chain_parents(4),
    "tree": (-1, 0, 0, 1, 1, 2),
    "a tree a row": torch.tensor([[-1, 0, 1, 2], [-1, 0, 0, 0], [-1, 0, 0, 2]]),
}


def random_tree(parents: tuple[int, ...] | Tensor) -> Tree:
    count = len(parents) if isinstance(parents, tuple) else parents.shape[1]
    tokens = torch.randint(0, 64, (BATCH, count), generator=torch.Generator().manual_seed(count))
    tokens[:, 0] = torch.tensor([row[-1] for row in PROMPTS])
    return Tree(tokens, parents, depth_bound=3)


def random_riders(tree: Tree, rows: int, generator: torch.Generator) -> Passengers:
    """Two chains of two behind pending, one of which also sees node 1 in the last row of `rows`, where there is one."""
    nodes = tree.num_nodes
    sees = torch.zeros(rows, 4, nodes + 4, dtype=torch.bool)
    sees[:, :, 0] = True
    sees[:, 1, nodes] = sees[:, 3, nodes + 2] = True
    depths = torch.tensor([[1, 2, 1, 2]]).repeat(rows, 1)
    if nodes > 1:
        sees[-1, 2:, 1] = True
        depths[-1, 2:] += 1
    return Passengers(torch.randint(0, 64, (len(tree.tokens), 4), generator=generator), depths, sees)


def seen_by(tree: Tree, row: int, place: int) -> list[int]:
    """The tokens behind the committed ones that a passenger attends to, in order, its own at the end."""
    riders, batch = tree.passengers, len(tree.tokens)
    assert riders is not None
    everyone = torch.cat([tree.tokens, riders.tokens], 1)[row]
    depths = torch.cat([tree.depths.expand(batch, -1), riders.depths.expand(batch, -1)], 1)[row]
    seen = [*riders.sees.expand(batch, -1, -1)[row, place].nonzero()[:, 0].tolist(), tree.num_nodes + place]
    seen.sort(key=lambda one: depths[one].item())
    assert depths[seen].tolist() == list(range(len(seen)))
    return everyone[seen].tolist()


def logits_of(model: PreTrainedModel, tree: Tree) -> tuple[Tensor, Tensor]:
    """(B, N, V) and (B, P, V) behind the ragged prompts."""
    runner, lengths = CachedModel(model, BATCH, SLOTS), [len(row) - 1 for row in PROMPTS]
    ids = torch.tensor([row + [0] * (8 - len(row)) for row in PROMPTS])
    with torch.inference_mode():
        runner.prefill(ids, [0] * BATCH, lengths)
        runner.cache.hold(SLOTS)
        inputs = (tree.tokens, tree.depths.expand(BATCH, -1), tree.ancestors.expand(BATCH, -1, -1))
        tokens, depths, above = inputs if tree.passengers is None else with_passengers(tree)
        (logits,) = runner.node_pass(SLOTS)(tokens, torch.tensor(lengths)[:, None], depths, above)
    return split_passengers(logits, tree)


@pytest.mark.parametrize("rows", by_default(1, [1, BATCH]))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", IN_FLOAT64)
def test_nodes_say_the_same_and_passengers_what_their_own_text_says(name: str, shape: str, rows: int) -> None:
    """With windows of three tokens too: what a passenger attends to is counted by its place, not by its slot."""
    model, tree = MODELS[name](), random_tree(SHAPES[shape])
    ridden = replace(tree, passengers=random_riders(tree, rows, torch.Generator().manual_seed(9)))
    nodes, passenger_logits = logits_of(model, ridden)
    torch.testing.assert_close(nodes, logits_of(model, tree)[0], rtol=0, atol=1e-10)
    for row, prompt in enumerate(PROMPTS):
        for place in range(4):
            with torch.no_grad():
                want = model(torch.tensor([prompt[:-1] + seen_by(ridden, row, place)])).logits[0, -1]
            torch.testing.assert_close(passenger_logits[row, place], want, rtol=0, atol=1e-10)


def test_shapes_that_do_not_fit_are_named() -> None:
    tree = random_tree(chain_parents(3))
    riders = random_riders(random_tree(chain_parents(2)), 1, torch.Generator())
    with pytest.raises(
        ValueError, match=r"sees have shape \(1, 4, 6\).*3 nodes in 3 rows 4 passengers have \(3, 4, 7\)"
    ):
        with_passengers(Tree(tree.tokens, tree.parents, passengers=riders))


class Ridden(Oracle):
    """An Oracle whose trees carry random passengers; it checks what it is told of those of the round before."""

    most_passengers = 4

    def __init__(self, inner: Oracle, model: PreTrainedModel) -> None:
        super().__init__(inner.texts, inner.vocab_size)
        self.inner, self.model = inner, model
        self.before: tuple[Tree, Tensor, list[int]] | None = None
        self.fresh: set[int] = set()
        self.heard_by_row = Counter[int]()

    def start(self, context: Context, capacity: int) -> None:
        """As the inner one."""
        self.inner.start(context, capacity)

    def read(self, context: Context, lengths: Mapping[int, int]) -> None:
        """In these rows nothing was heard yet."""
        self.inner.read(context, lengths)
        self.fresh |= set(lengths)

    def propose(self, context: Context) -> Tree:
        """The inner one's tree, with passengers."""
        self._check(context)
        tree = self.inner.propose(context)
        generator = torch.Generator().manual_seed(int(context.noise.round_index))
        riders = random_riders(tree, len(tree.tokens), generator)
        self.before = replace(tree, passengers=riders), context.ids.clone(), context.lengths.tolist()
        return self.before[0]

    def _check(self, context: Context) -> None:
        assert context.passenger_logits is not None
        assert context.passenger_positions is not None
        for row in context.running or []:
            assert (context.passenger_positions[row] < 0).all() == (row in self.fresh)
            if row in self.fresh:
                continue
            assert self.before is not None
            tree, ids, lengths = self.before
            for place in range(self.most_passengers):
                text = ids[row, : lengths[row] - 1].tolist() + seen_by(tree, row, place)
                want = self.model(torch.tensor([text])).logits[0, -1]
                torch.testing.assert_close(context.passenger_logits[row, place], want, rtol=0, atol=1e-10)
                assert context.passenger_positions[row, place] == len(text) - 1
            self.heard_by_row[row] += 1
        self.fresh.clear()


@pytest.mark.parametrize("temperature", by_default(1, [0.0, 1.0]))
@pytest.mark.parametrize("kind", [Oracle, OracleTree])
def test_rounds_with_passengers_accept_and_write_what_rounds_without_do(kind: type[Oracle], temperature: float) -> None:
    """Ragged rows, two of three at a time; each passenger's logits reach the drafter in the next round of its row."""
    model, (ids, mask) = MODELS["mistral"](), ragged_prompts(3)
    call = partial(generate, model, input_ids=ids, attention_mask=mask, max_new_tokens=14, temperature=temperature)
    call = partial(call, num_draft_tokens=3, eos_token_id=(), batch_size=2, seed=3)
    texts = texts_of(call(None), ids, mask)
    without, ridden = call(kind(texts, 64)), Ridden(kind(texts, 64), model)
    found = call(ridden)
    assert torch.equal(found.sequences, without.sequences)
    assert found.stats.rounds == without.stats.rounds
    assert min(ridden.heard_by_row[row] for row in range(2)) > 3


class Echo(Oracle):
    """Without values on the host: drafts what the target said at the passengers of the round before, which are what it
    drafts now, one place further on."""

    on_host, most_passengers = False, 3

    def __init__(self) -> None:
        super().__init__([], 64)

    def read(self, context: Context, lengths: Mapping[int, int]) -> None:
        """It knows no texts."""

    def prepare(self, context: Context) -> Any:
        """Which drafter it is."""
        return "echo"

    def propose(self, context: Context) -> Tree:
        """A chain of three, and a window of three of which each sees those before."""
        assert context.passenger_logits is not None
        assert context.passenger_positions is not None
        pending = context.ids.gather(1, context.lengths[:, None] - 1)
        said = context.passenger_logits.argmax(-1)
        behind = (context.passenger_positions >= context.lengths[:, None] - 1) & (context.passenger_positions >= 0)
        drafted = torch.where(behind, said, pending)
        sees = torch.cat([torch.ones(3, 1), torch.zeros(3, 3), torch.ones(3, 3).tril()], 1)[None].bool()
        riders = Passengers(drafted.roll(-1, 1), torch.arange(1, 4)[None], sees)
        return Tree(torch.cat([pending, drafted], 1), chain_parents(4), passengers=riders)


def test_a_round_with_passengers_is_captured_and_writes_the_text_of_plain_decoding() -> None:
    """Requests take the rows of finished ones, in rounds that are replayed."""
    model = tiny_llama(dtype=torch.float64).requires_grad_(False)
    prompts = [[5, 9, 2, 7, 11, 30], [1, 8], [4, 4, 6, 3, 2], [9], [7, 7, 1]]
    request = Request(prompts, 25, shape=chain(3), batch_size=2, seed=1)
    texts, _ = Loop(model, None, request).run()
    loop = Loop(model, Echo(), request)
    assert loop.run()[0] == texts
    assert loop.runner.replayed
    assert not loop.runner.told
