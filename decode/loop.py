"""The decoding loop: propose, forward, verify, commit, stop.

Invariant: the cache holds exactly the committed tokens but the last one, `pending`; node 0 of every tree is pending;
one target forward a round runs over [pending | draft nodes]; the token after the accepted ones is the next pending.
One host sync a round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from decode.drafters.base import Context, Drafter
from decode.house.errors import InputError
from decode.models import longest_context
from decode.noise import Noise
from decode.processors import process_nodes
from decode.sampling import Sampling, warp
from decode.shapes import Shape, chain
from decode.stats import Round, Stats
from decode.stopping import StopStrings
from decode.target import CachedModel
from decode.tree import Drawn, Tree
from decode.verify import VERIFIERS, Question, Verdict


@dataclass(frozen=True)
class Request:
    """What one call asks for; prompts are token ids, without padding."""

    prompts: list[list[int]]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    verifier: str = "coupled"
    shape: Shape = chain(5)
    """The tree of a round; cut to what its rows can still emit."""
    replacement: bool = False
    """Where a rule draws siblings from q: independently, duplicates included, rather than without replacement."""
    seed: int = 0
    rows: list[int] | None = None
    """The requests' own indices, which key the noise; 0, 1, ... by default."""
    eos_ids: frozenset[int] = frozenset()
    processors: LogitsProcessorList | None = None
    """Processors that look at the prefix (penalties, bans); each node is given its own."""
    stop: StopStrings | None = None
    audit: bool = False
    """Raise when a random number outside the coupled stream is read twice."""


@dataclass(frozen=True)
class Event:
    """One row's share of a round, as it reaches the host: `accepted` draft tokens, then the correction or bonus."""

    row: int
    tokens: list[int]
    accepted: int
    drafted: int


Observer = Callable[[Event], None]


class Loop:
    """One generation call: a batch of requests from prompt to end."""

    def __init__(self, model: PreTrainedModel, drafter: Drafter | None, request: Request) -> None:
        self.request, self.drafter = request, drafter
        self.verifier = VERIFIERS[request.verifier]
        self.verifier.check(request.sampling)
        self.drawn: Drawn = self.verifier.drawn(request.shape, request.replacement)
        self.lengths = [len(prompt) for prompt in request.prompts]
        self.ends = [length + request.max_new_tokens for length in self.lengths]
        _check_context(model, self.lengths, request.max_new_tokens)
        self.tokens = [list(prompt) for prompt in request.prompts]
        self.reasons: list[str | None] = [None] * len(self.tokens)
        self.capacity = max(self.ends) + request.shape.num_nodes
        self.runner = CachedModel(model, self.capacity)
        self.device = self.runner.device
        self.ids = _left_aligned(self.tokens, self.capacity, self.device)
        rows = request.rows if request.rows is not None else list(range(len(self.tokens)))
        vocab_size = model.config.get_text_config().vocab_size
        self.noise = Noise(request.seed, rows, vocab_size, self.device, request.audit)
        self.stats = Stats(request.shape.depth if drafter is not None else 0)
        self.round_index = 0

    @torch.inference_mode()
    def run(self, observer: Observer | None = None) -> tuple[list[list[int]], Stats]:
        """All rows' tokens, prompts included, and what the call counted."""
        with self.stats.phase("prefill"):
            if max(self.lengths) > 1:
                self.runner.prefill(self.ids, [length - 1 for length in self.lengths])
            if self.drafter is not None:
                self.drafter.start(self._context(self.request.shape, None), self.capacity)
        while None in self.reasons:
            for event in self.step():
                if observer is not None:
                    observer(event)
        if self.drafter is not None:
            self.drafter.reset(list(range(len(self.tokens))))
        self.stats.finish([reason or "" for reason in self.reasons], self.device)
        return self.tokens, self.stats

    def step(self) -> list[Event]:
        """One round of every row that is not finished."""
        shape = self._shape()
        gumbel = self._gumbel(shape.depth)
        with self.stats.phase("draft"):
            tree = self._propose(shape, gumbel)
        starts = [length - 1 for length in self.lengths]
        with self.stats.phase("target"):
            logits = self.runner.forward(tree.tokens, starts, tree.parents)
        with self.stats.phase("verify"):
            verdict = self._verify(tree, logits, gumbel)
        with self.stats.phase("commit"):
            self.runner.commit(starts, verdict.path, tree.is_chain)
            if self.drafter is not None and shape.depth:
                self.drafter.commit(verdict, None)
            events = self._commit(verdict, tree.max_depth)
        self.round_index += 1
        return events

    def _shape(self) -> Shape:
        """This round's tree: nothing deeper than the longest unfinished row could emit."""
        if self.drafter is None:
            return chain(0)
        left = max(end - length for end, length, why in self._state() if why is None)
        return self.request.shape.cut(left - 1)

    def _state(self) -> zip[tuple[int, int, str | None]]:
        return zip(self.ends, self.lengths, self.reasons, strict=True)

    def _gumbel(self, depth: int) -> Tensor | None:
        if self.request.sampling.is_greedy or not self.verifier.shares_noise:
            return None
        return self.noise.coupled(self._positions(depth))

    def _positions(self, depth: int) -> list[list[int]]:
        return [list(range(length, length + depth + 1)) for length in self.lengths]

    def _context(self, shape: Shape, gumbel: Tensor | None) -> Context:
        return Context(
            self.ids,
            self.lengths,
            self.request.sampling,
            self.noise,
            shape,
            self.drawn,
            self.verifier.shares_noise,
            gumbel,
            self.round_index,
        )

    def _propose(self, shape: Shape, gumbel: Tensor | None) -> Tree:
        if self.drafter is not None and shape.depth:
            return self.drafter.propose(self._context(shape, gumbel))
        last = torch.tensor([[row[-1]] for row in self.tokens], device=self.device)
        return Tree(last, (-1,))

    def _verify(self, tree: Tree, logits: Tensor, gumbel: Tensor | None) -> Verdict:
        if self.request.processors:
            logits = process_nodes(self.request.processors, self.tokens, tree, logits)
        scores = warp(logits, self.request.sampling)
        depth = tree.max_depth
        gumbel = gumbel if gumbel is None else gumbel[:, : depth + 1]
        return self.verifier(
            Question(tree, scores, self.request.sampling, self.noise, self._positions(depth), gumbel, self.round_index)
        )

    def _commit(self, verdict: Verdict, drafted: int) -> list[Event]:
        """Write the emitted tokens, cut rows that end, count. The only host sync of the round is here."""
        ends = torch.tensor(self.lengths, device=self.device)[:, None]
        columns = ends + torch.arange(verdict.tokens.shape[1], device=self.device)
        self.ids.scatter_(1, columns.clamp_(max=self.capacity - 1), verdict.tokens)
        both = torch.cat([verdict.num_accepted[:, None], verdict.tokens], dim=1).tolist()
        self.stats.arrive()
        return [self._extend(row, both[row], drafted) for row, why in enumerate(self.reasons) if why is None]

    def _extend(self, row: int, verdict: list[int], drafted: int) -> Event:
        accepted, tokens = verdict[0], verdict[1:]
        kept = []
        for token in tokens[: accepted + 1]:
            kept.append(token)
            self.tokens[row].append(token)
            self.reasons[row] = self._reason(row, token)
            if self.reasons[row] is not None:
                break
        self.lengths[row] += len(kept)
        if len(kept) <= accepted:  # cut: what lies behind the end was neither refused nor emitted
            accepted = drafted = len(kept)
        self.stats.rounds.append(Round(row, drafted, accepted, len(kept)))
        return Event(row, kept, accepted, drafted)

    def _reason(self, row: int, token: int) -> str | None:
        if token in self.request.eos_ids:
            return "eos"
        if self.request.stop is not None and self.request.stop.ends(self.tokens[row], len(self.request.prompts[row])):
            return "stop"
        return "length" if len(self.tokens[row]) >= self.ends[row] else None


def _left_aligned(rows: list[list[int]], width: int, device: torch.device) -> Tensor:
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    for slot, row in enumerate(rows):
        ids[slot, : len(row)] = torch.tensor(row)
    return ids.to(device)


def _check_context(model: PreTrainedModel, lengths: list[int], max_new_tokens: int) -> None:
    if min(lengths) < 1:
        raise InputError("a prompt is empty; decoding starts from at least one token (a BOS or newline token, say)")
    limit = longest_context(model.config)
    if limit is not None and max(lengths) + max_new_tokens > limit:
        raise InputError(
            f"the longest prompt has {max(lengths)} tokens and max_new_tokens={max_new_tokens}, together "
            f"{max(lengths) + max_new_tokens}, but the model's context is {limit} tokens; past it positions are "
            "undefined. "
            "Shorten the prompt or ask for fewer tokens"
        )
