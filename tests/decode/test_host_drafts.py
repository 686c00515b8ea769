"""Drafts made by host code, from lists of Python integers: the text is that of plain decoding."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from decode.drafters.base import Context, Drafter
from decode.loop import Loop
from decode.requests import Request
from decode.sampling.warp import Sampling
from decode.trees.tree import Tree, chain_parents
from decode.trees.tree_plans import chain, k_ary
from tests.tiers import by_default
from tests.tiny import tiny_llama

PROMPTS = [[5, 9, 2, 5, 9, 2, 5, 9], [1, 8], [4, 4, 6, 3, 2], [9], [7, 7, 1, 7], [2, 3, 2]]


class Lookup(Drafter):
    """Each row drafts what stands in known texts behind its last two tokens, or its last one: the first such place as a
    chain, or several as branches, which make another tree in every row."""

    on_host = True

    def __init__(self, known: list[list[int]], branches: bool) -> None:
        self.known, self.branches = known, branches
        self.texts: list[list[int]] = []
        self.read_rows: list[int] = []

    def start(self, context: Context, capacity: int) -> None:
        """Nothing to make."""

    def read(self, context: Context, lengths: Mapping[int, int]) -> None:
        """Which rows begin anew."""
        self.read_rows += lengths

    def prepare(self, context: Context) -> tuple[()]:
        """Nothing to prepare."""
        return ()

    def propose(self, context: Context) -> Tree:
        """A tree of as many nodes as are wanted."""
        rows = zip(context.ids.tolist(), context.lengths.tolist(), strict=True)
        self.texts = [ids[:length] for ids, length in rows]
        drafts = [self._drafted(text, context.shape.num_nodes, context.shape.depth) for text in self.texts]
        tokens = torch.tensor([tokens for tokens, _ in drafts])
        if not self.branches:
            return Tree(tokens, chain_parents(tokens.shape[1]))
        return Tree(tokens, torch.tensor([parents for _, parents in drafts]), depth_bound=context.shape.depth)

    def _drafted(self, text: list[int], num_nodes: int, depth: int) -> tuple[list[int], list[int]]:
        tokens, parents = [text[-1]], [-1]
        for follows in self._places(text[-2:]) + self._places(text[-1:]):
            above = 0
            for token in follows[:depth]:
                if len(tokens) < num_nodes:
                    tokens.append(token)
                    parents.append(above)
                    above = len(tokens) - 1
            if not self.branches:
                break
        missing = num_nodes - len(tokens)
        return tokens + [0] * missing, parents + [0] * missing

    def _places(self, last: list[int]) -> list[list[int]]:
        """What follows `last` wherever it stands."""
        size = len(last)
        return [text[i + size :] for text in self.known for i in range(len(text) - size) if text[i : i + size] == last]


@pytest.mark.parametrize("temperature", by_default(1, [0.0, 0.6]))
@pytest.mark.parametrize("branches", [False, True], ids=["chains", "a tree a row"])
def test_the_text_is_that_of_plain_decoding(branches: bool, temperature: float) -> None:
    """Ragged rows that are taken over by waiting requests; longer than passes take to be captured."""
    model = tiny_llama(dtype=torch.float64).requires_grad_(False)
    shape = k_ary([2, 2, 1]) if branches else chain(3)
    request = Request(PROMPTS, 40, Sampling(temperature), shape=shape, batch_size=2, eos_ids=frozenset({3}), seed=1)
    texts, _ = Loop(model, None, request).run()
    drafter = Lookup(texts[:4], branches)
    loop = Loop(model, drafter, request)
    found, stats = loop.run()
    assert found == texts
    assert not loop.runner.told, "nobody tries to capture what the host does"
    assert sorted(drafter.read_rows) != sorted(set(drafter.read_rows)), "rows were taken over"
    assert {one.accepted for one in stats.rounds} >= {0, 3}


def test_it_sees_all_that_was_written_before_it_is_asked() -> None:
    """As a device would have it whose host reads a round behind: `propose` is called in every round, and every text is
    as long as the events of the rounds before have made it."""
    model = tiny_llama(dtype=torch.float64).requires_grad_(False)
    drafter = Lookup(PROMPTS, branches=False)
    loop = Loop(model, drafter, Request(PROMPTS[:3], 30, shape=chain(3), seed=1))
    written = [list(prompt) for prompt in PROMPTS[:3]]
    with torch.inference_mode():
        loop._start()
        while loop.rows.running:
            asked, before = drafter.texts, [list(text) for text in written]
            running = list(loop.rows.running)
            for event in loop.step():
                written[event.row] += event.tokens
            if loop.rows.running:
                assert drafter.texts is not asked
                assert all(drafter.texts[row] == before[row] for row in running)
