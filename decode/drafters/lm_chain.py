"""Drafting a chain with a language model: k passes and k draws as one unit, or step by step where something looks in.

One unit, because Python between the passes costs as much as they do: six tokens of the quickstart's draft took 5.0 ms
step by step and 3.4 ms as one capture (2 cores).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from decode.drafters.base import Context
from decode.noise import Stream
from decode.sampling import Sampling, warp
from decode.target import CachedModel, NodePass
from decode.tree import Drawn, Tree, chain_parents


def propose_chain(runner: CachedModel, context: Context, width: int) -> Tree:
    """k tokens from the warped q, with the verdict's own noise where the rule shares it.

    The first pass reads the last `width` committed tokens, two where there are: after a round that accepted everything
    the last draft token has not been read yet, and reading a token again writes the same keys and values.
    """
    if context.history is not None or context.budget is not None:
        return _propose_steps(runner, context, width)
    k = context.num_draft_tokens
    ends = torch.tensor(context.lengths, device=context.ids.device)[:, None]
    read = context.ids.gather(1, ends - torch.arange(width, 0, -1, device=context.ids.device))
    visible = runner.visible(max(context.lengths) + k)
    assert max(context.lengths) + k <= visible, (context.lengths, k, visible)
    noise = draft_noise(context)
    sampling, temperature = context.sampling.apart(read.device)
    inputs = (read, ends, temperature) if noise is None else (read, ends, temperature, noise)

    def make() -> ChainPass:
        return ChainPass(runner.node_pass(visible), k, sampling, context.drawn)

    def moved() -> tuple[Tensor, ...]:
        return (read, (ends + 1).clamp(max=visible - k), *inputs[2:])

    key = ("chain", k, width, visible, sampling, context.drawn, noise is None)
    tokens, log_q = runner.run(key, make, inputs, moved)
    proposed = torch.cat([read[:, -1:], tokens], 1)
    return Tree(proposed, chain_parents(k + 1), context.drawn, log_q if context.drawn == "iid" else None)


def _propose_steps(runner: CachedModel, context: Context, width: int) -> Tree:
    """The same tokens pass by pass, with processors that look at the prefix, to where the budget does not go on."""
    lengths, noise = context.lengths, draft_noise(context)
    ends = torch.tensor(lengths, device=context.ids.device)[:, None]
    read = context.ids.gather(1, ends - torch.arange(width, 0, -1, device=context.ids.device))
    starts, tokens, laws = [length - width for length in lengths], [read[:, -1:]], []
    for step in range(context.num_draft_tokens):
        logits = runner.chain(read, starts)[:, -1:]
        logits = context.processed(logits, torch.cat(tokens, 1)[:, None, 1:])[:, 0]
        read, law = draw(warp(logits, context.sampling), None if noise is None else noise[:, step], context.drawn)
        starts = [length + step for length in lengths]
        tokens.append(read)
        laws.append(law)
        if context.budget is not None:
            confidence = law.log_softmax(-1).gather(1, read)[:, 0].exp()
            if not context.budget.goes_on(confidence, step + 1):
                break
    log_q = torch.stack([*laws, laws[-1]], 1) if context.drawn == "iid" else None
    return Tree(torch.cat(tokens, 1), chain_parents(len(tokens)), context.drawn, log_q)


class ChainPass(nn.Module):
    """(B, k) draft tokens and (B, k + 1, V) log q, whose last row repeats the one before it (node k has no children);
    log q is empty where children are drawn in any way."""

    def __init__(self, node_pass: NodePass, k: int, sampling: Sampling, drawn: Drawn) -> None:
        super().__init__()
        self.node_pass, self.k, self.sampling = node_pass, k, sampling
        self.drawn: Drawn = drawn

    def forward(
        self, read: Tensor, ends: Tensor, temperature: Tensor, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """read (B, 1 or 2) the last committed tokens, ends (B, 1) their number, temperature (1,), noise (B, k, V)."""
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        starts = ends - read.shape[1]
        for step in range(self.k):
            logits = self.node_pass.chain(read, starts)[0][:, -1]
            scores = warp(logits, self.sampling, temperature)
            read, law = draw(scores, None if noise is None else noise[:, step], self.drawn)
            starts = ends + step
            tokens.append(read)
            laws.append(law)
        none = laws[-1].new_zeros(0)
        return torch.cat(tokens, 1), torch.stack([*laws, laws[-1]], 1) if self.drawn == "iid" else none


def draft_noise(context: Context) -> Tensor | None:
    """(B, k, V) Gumbel noise of the k draws; None where they are argmaxes."""
    if context.sampling.is_greedy or (context.drawn == "arbitrary" and not context.shares_noise):
        return None
    k = context.num_draft_tokens
    if context.shares_noise:
        assert context.gumbel is not None
        return context.gumbel[:, :k]
    positions = [list(range(length, length + k)) for length in context.lengths]
    return context.noise.fresh_gumbel(Stream.DRAFT, positions, context.round_index)


def draw(scores: Tensor, noise: Tensor | None, drawn: Drawn) -> tuple[Tensor, Tensor]:
    """One token per row (B, 1) from warped scores (B, V), and the log of the very law it was drawn from (B, V)."""
    if drawn != "iid":
        return (scores if noise is None else scores + noise).argmax(-1, keepdim=True), scores
    if noise is None:
        best = scores.argmax(-1, keepdim=True)
        return best, torch.full_like(scores, -torch.inf).scatter_(-1, best, 0.0)
    log_q = scores.log_softmax(-1)
    return (log_q + noise).argmax(-1, keepdim=True), log_q
