"""Drafters whose acceptance is scripted, so that tests reach every branch of accepting and rolling back."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from decode.drafters.base import Context, Drafter
from decode.trees.tree import Tree, chain_parents


class Oracle(Drafter):
    """Knows the text that will come and drafts it, wrong from the token that a script says: 0, 1, ... k accepted in
    turn."""

    on_host = True

    def __init__(self, texts: list[list[int]], vocab_size: int) -> None:
        self.texts, self.vocab_size = texts, vocab_size
        self._waiting: list[list[int]] = []
        self._of_row: dict[int, list[int]] = {}

    def start(self, context: Context, capacity: int) -> None:
        """No row has its text yet."""
        self._waiting, self._of_row = list(self.texts), {}

    def read(self, context: Context, lengths: Mapping[int, int]) -> None:
        """The rows take the texts that begin with their prompts."""
        for row, length in lengths.items():
            prompt = context.ids[row, :length].tolist()
            self._of_row[row] = next(text for text in self._waiting if text[:length] == prompt)
            self._waiting.remove(self._of_row[row])

    def prepare(self, context: Context) -> tuple[()]:
        """Nothing to prepare."""
        return ()

    def propose(self, context: Context) -> Tree:
        """A chain that is right for (round mod k + 1) tokens."""
        k = context.num_draft_tokens
        right = int(context.noise.round_index) % (k + 1)
        rows = [self._row(context, row, right) for row in range(len(context.lengths))]
        return Tree(torch.tensor(rows, device=context.ids.device), chain_parents(k + 1))

    def _row(self, context: Context, row: int, right: int) -> list[int]:
        start = int(context.lengths[row])
        known = self._of_row[row] + [0] * (context.num_draft_tokens + 1)
        drafted = known[start : start + context.num_draft_tokens]
        wrong = [token if i < right else (token + 1) % self.vocab_size for i, token in enumerate(drafted)]
        return [
            int(context.ids[row, start - 1]),
            *wrong,
        ]  # a rule that keeps the distribution only may have left the text


class OracleTree(Oracle):
    """The same, with a wrong sibling before every right node, so that paths have gaps and must be compacted."""

    def propose(self, context: Context) -> Tree:
        """Nodes 1, 3, 5 ... are wrong siblings of the right nodes 2, 4, 6 ..."""
        chain = super().propose(context).tokens
        tokens, parents = [chain[:, :1]], [-1]
        for depth in range(1, chain.shape[1]):
            right = chain[:, depth : depth + 1]
            above = 2 * (depth - 1)
            tokens += [(right + 7) % self.vocab_size, right]
            parents += [above, above]
        return Tree(torch.cat(tokens, 1), tuple(parents))
