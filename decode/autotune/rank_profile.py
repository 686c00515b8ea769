"""Which of a node's candidates stands: the acceptance profile by depth and rank, seen on text that the target writes
itself."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from decode.common.errors import ConfigError
from decode.drafters.base import Drafter
from decode.loop import Loop, Request
from decode.trees.tree import Tree
from decode.trees.tree_plans import comb
from decode.verify.verdict import Question, Verdict


def acceptance_profile(
    model: PreTrainedModel, drafter: Drafter, request: Request, widths: list[int]
) -> list[list[float]]:
    """a[d][b] = P(the b-th candidate of a node at depth d is the one that stands, if the node does), of widths[d]
    candidates, over every position that `request` generates; 0 at depths that are never reached or not drafted.

    Drafter, rule and noise are those of decoding; the text grows by one token a round, so that positions which are easy
    to draft count no less than others. Of a depth, the candidates after the best one of the depth before are looked at
    where that one stands: the product of a along a chain is what the chain is accepted with, however its tokens hang
    together. Raises ConfigError for a drafter that does not draft the trees it is asked for.
    """
    loop = Loop(model, drafter, replace(request, shape=comb(widths), adaptive=False))
    meter = RankMeter(loop, widths)
    loop.verifier = meter
    loop.run()
    return [[count / max(1, asked) for count in row] for row, asked in zip(meter.stood, meter.asked, strict=True)]


class RankMeter:
    """A rule that notes which candidates stand, and lets the text grow by one token."""

    def __init__(self, loop: Loop, widths: list[int]) -> None:
        self._loop, self._rule = loop, loop.verifier
        self.shares_noise = loop.verifier.shares_noise
        self.drawn = loop.verifier.drawn
        self._wanted = comb(widths)
        self._ranks = [0, *(rank for width in widths for rank in range(width))]  # of each node
        self.stood = [[0] * width for width in widths]
        self.asked = [0] * len(widths)

    def __call__(self, question: Question) -> Verdict:
        verdict, tree = self._rule(question), question.tree
        if tree.num_nodes > 1:  # the last token of a text is not drafted
            self._check(tree)
            accepted, paths = verdict.num_accepted.tolist(), verdict.path.tolist()
            for row in self._loop.rows.running:
                self._note([self._ranks[node] for node in paths[row][1 : accepted[row] + 1]], tree.max_depth)
        return Verdict(torch.zeros_like(verdict.path), torch.zeros_like(verdict.num_accepted), verdict.tokens)

    def _note(self, accepted: list[int], depth: int) -> None:
        """Ranks of one row's accepted nodes in a tree of this depth."""
        for at in range(depth):
            self.asked[at] += 1
            if at == len(accepted):  # none stood
                return
            self.stood[at][accepted[at]] += 1
            if accepted[at]:  # only the first one has candidates after it
                return

    def _check(self, tree: Tree) -> None:
        wanted = self._wanted.cut(tree.max_depth).parents  # heads draft as many tokens as they are
        if tree.parents != wanted:
            raise ConfigError(
                f"decode.tree=sequoia compares trees, but {type(self._loop.drafter).__name__} drafts parents "
                f"{tree.parents} where {wanted} are asked for. Name the plan yourself: decode.tree=chain and "
                "decode.num_draft_tokens"
            )
