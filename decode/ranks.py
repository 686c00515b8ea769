"""Which of a node's candidates stands: the acceptance profile by rank, seen on text that the target writes itself."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from decode.drafters.base import Drafter
from decode.house.errors import ConfigError
from decode.loop import Loop, Request
from decode.shapes import k_ary
from decode.tree import Tree
from decode.verdict import Question, Verdict


def acceptance_profile(model: PreTrainedModel, drafter: Drafter, request: Request, num_ranks: int) -> list[float]:
    """a[b] = P(the b-th candidate of a node is the one that stands), over every position that `request` generates.

    Drafter, rule and noise are those of decoding; the text grows by one token a round, so that positions which are easy
    to draft count no less than others. Raises ConfigError for a drafter that does not draft the trees it is asked for.
    """
    loop = Loop(model, drafter, replace(request, shape=k_ary([num_ranks]), adaptive=False))
    meter = RankMeter(loop, num_ranks)
    loop.verifier = meter
    loop.run()
    return [count / max(1, meter.positions) for count in meter.counts]


class RankMeter:
    """A rule that notes which child of pending stands, and lets the text grow by that one token."""

    def __init__(self, loop: Loop, num_ranks: int) -> None:
        self._loop, self._rule = loop, loop.verifier
        self.shares_noise = loop.verifier.shares_noise
        self.check, self.drawn = loop.verifier.check, loop.verifier.drawn
        self.counts = [0] * num_ranks
        self.positions = 0

    def __call__(self, question: Question) -> Verdict:
        verdict = self._rule(question)
        if question.tree.num_nodes == 1:  # the last token of a text is not drafted
            return verdict
        self._check(question.tree)
        stands = torch.where(verdict.num_accepted > 0, verdict.path[:, -1], 0).tolist()
        for row in self._loop.rows.running:
            self.positions += 1
            if stands[row]:
                self.counts[stands[row] - 1] += 1
        return Verdict(torch.zeros_like(verdict.path), torch.zeros_like(verdict.num_accepted), verdict.tokens)

    def _check(self, tree: Tree) -> None:
        wanted = k_ary([len(self.counts)]).parents
        if tree.parents != wanted:
            raise ConfigError(
                f"decode.tree=auto and sequoia compare trees, but {type(self._loop.drafter).__name__} drafts parents "
                f"{tree.parents} where {wanted} are asked for. Name the plan yourself: decode.tree=chain and "
                "decode.num_draft_tokens"
            )
