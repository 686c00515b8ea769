"""The decoding loop: propose, forward, verify, commit, stop.

Invariant: the cache holds exactly the committed tokens but the last one, `pending`; node 0 of every tree is pending;
one target forward a round runs over [pending | draft nodes]; the token after the accepted ones is the next pending.
One host sync a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from decode.autotune.budget import Budget
from decode.common.environment import device_of
from decode.common.errors import InputError
from decode.drafters.base import Context, Drafter, drafted_depth
from decode.forward.runner import Lease
from decode.forward.target import runner_for
from decode.models.compatibility import longest_context
from decode.requests import RequestState, Rows
from decode.sampling.noise import Noise
from decode.sampling.processors import History
from decode.sampling.stopping import Criteria, StopStrings
from decode.sampling.warp import Sampling, warp
from decode.stats import Round, Stats
from decode.trees.tree import Drawn, Tree
from decode.trees.tree_plans import Shape, chain
from decode.verify import VERIFIERS
from decode.verify.verdict import Question, Verdict

if TYPE_CHECKING:
    from decode.conversation import Conversation


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
    conversation: Conversation | None = None
    """What calls before have read of the one prompt."""
    stop: StopStrings | None = None
    criteria: Criteria | None = None
    """Stopping criteria of the caller."""
    batch_size: int | None = None
    """Requests decoded at once; the others wait and take the rows of finished ones. None decodes all at once."""
    adaptive: bool = False
    """Draft what pays: `shape` cut in every round by what the rounds before accepted and cost."""
    confidence: bool = False
    """With `adaptive`: chains end where the draft is unsure of going on."""
    strict: bool = False
    """Every target pass has the rows of the whole shape, with or without drafts, so that rounding is the same."""
    audit: bool = False
    """Raise when a random number outside the coupled stream is read twice."""


@dataclass(frozen=True)
class Event:
    """One row's share of a round, as it reaches the host: `accepted` draft tokens, then the correction or bonus."""

    row: int
    """Index of the request."""
    tokens: list[int]
    accepted: int
    drafted: int


Observer = Callable[[Event], None]


class Loop:
    """One generation call: requests from prompt to end, `batch_size` of them at a time."""

    def __init__(self, model: PreTrainedModel, drafter: Drafter | None, request: Request) -> None:
        self.request, self.lease = request, Lease()
        self.drafter = drafter if drafter is None else self.lease.own(drafter)
        self.verifier = VERIFIERS[request.verifier]
        self.drawn: Drawn = _drawn(request)
        lengths = [len(prompt) for prompt in request.prompts]
        _check_context(model, lengths, request.max_new_tokens)
        in_round = max(request.shape.num_nodes, 1 + request.shape.num_read)  # a draft may read more than it proposes
        capacity = max(lengths) + request.max_new_tokens + in_round
        requests = [RequestState(len(x), list(x), len(x) + request.max_new_tokens) for x in request.prompts]
        self.rows = Rows(requests, request.batch_size or len(requests), capacity, device_of(model))
        self.num_read = [0] * self.rows.size
        if request.conversation is None:
            taps = drafter.taps if drafter is not None else ()
            self.runner = runner_for(model, self.rows.size, capacity, self.lease, taps=taps)
        else:
            (prompt,) = request.prompts
            self.runner, self.num_read[0] = request.conversation.begin(model, drafter, prompt, capacity)
        vocab_size = model.config.get_text_config().vocab_size
        keys = [self._key(index) for index in self.rows.seated]
        self.noise = Noise(request.seed, keys, vocab_size, self.runner.device, request.audit)
        self.stats = Stats(request.shape.depth if drafter is not None else 0)
        self.budget = None
        if request.adaptive and drafter is not None:
            self.budget = Budget(drafted_depth(drafter, request.shape), request.confidence)
        self.round_index = 0

    @torch.inference_mode()
    def run(self, observer: Observer | None = None) -> tuple[list[list[int]], Stats]:
        """All requests' tokens, prompts included, and what the call counted."""
        try:
            self._start()
            while self.rows.running:
                for event in self.step():
                    if observer is not None:
                        observer(event)
                self._refill()
            if self.drafter is not None:
                self.drafter.reset(list(range(self.rows.size)))
        finally:
            self.lease.end()
            if self.request.conversation is not None:
                self.request.conversation.end(None if self.rows.running else self.rows.current[0].tokens)
        self.stats.finish([one.reason or "" for one in self.rows.requests], self.runner.device)
        return [one.tokens for one in self.rows.requests], self.stats

    def step(self) -> list[Event]:
        """One round of every row that is not finished."""
        began = time.perf_counter()
        shape = self._shape()
        gumbel = self._gumbel(shape.depth)
        with self.stats.phase("draft"):
            tree = self._propose(shape, gumbel)
        lengths = self.rows.lengths
        starts = [length - 1 for length in lengths]
        with self.stats.phase("target"):
            logits = self._forward(tree, starts)
        with self.stats.phase("verify"):
            verdict = self._verify(tree, logits, gumbel)
        with self.stats.phase("commit"):
            self.runner.commit(starts, verdict.path, tree.is_chain)
            self.rows.write(verdict.tokens, lengths)
            events = self._commit(verdict, tree.max_depth)
        if self.budget is not None:
            took = time.perf_counter() - began
            rounds = self.stats.rounds[-len(events) :]
            self.budget.learn(rounds, took if self.runner.replayed else None, tree.max_depth)
        self.round_index += 1
        return events

    def _start(self) -> None:
        with self.stats.phase("prefill"):
            self._prefill(range(self.rows.size))
            if self.drafter is not None:
                self.drafter.start(self._context(self.request.shape, None), self.rows.capacity)

    def _prefill(self, rows: Iterable[int]) -> None:
        """Read the prompts up to pending; strict ones one by one, since who comes along depends on the draft."""
        for group in ([row] for row in rows) if self.request.strict else (rows,):
            end = [0] * self.rows.size
            for row in group:
                end[row] = self.rows.lengths[row] - 1
            begin = [min(read, last) for read, last in zip(self.num_read, end, strict=True)]
            self.runner.prefill(self.rows.ids, begin, end)
            self.stats.num_prefilled += sum(end) - sum(begin)

    def _refill(self) -> None:
        """Waiting requests take the place of finished ones, so that no row idles while there is work."""
        with self.stats.phase("prefill"):
            changed = self.rows.refill()
            self._prefill(changed)
            for row in changed:
                self.noise.seat(row, self._key(self.rows.seated[row]))
            if changed and self.drafter is not None:
                self.drafter.reset(changed)

    def _key(self, index: int) -> int:
        """What keys the noise of a request: its own index, never its row in the batch."""
        return index if self.request.rows is None else self.request.rows[index]

    def _shape(self) -> Shape:
        """This round's tree; the whole plan even where less could be emitted, because its passes are captured and those
        of a shorter one are not (10 ms against 6), but nothing where a single token is left."""
        if self.drafter is None:
            return chain(0)
        left = max(self.rows.current[row].end - self.rows.lengths[row] for row in self.rows.running)
        wanted = self.request.shape
        wanted = wanted if left > 1 else wanted.cut(0)
        return wanted if self.budget is None else self.budget.next_shape(wanted, left)

    def _gumbel(self, depth: int) -> Tensor | None:
        if self.request.sampling.is_greedy or not self.verifier.shares_noise:
            return None
        return self.noise.coupled(self._positions(depth))

    def _positions(self, depth: int) -> list[list[int]]:
        return [list(range(length, length + depth + 1)) for length in self.rows.lengths]

    def _context(self, shape: Shape, gumbel: Tensor | None) -> Context:
        return Context(
            ids=self.rows.ids,
            lengths=self.rows.lengths,
            running=self.rows.running,
            sampling=self.request.sampling,
            history=self._history(),
            shape=shape,
            drawn=self.drawn,
            noise=self.noise,
            shares_noise=self.verifier.shares_noise,
            gumbel=gumbel,
            round_index=self.round_index,
            features=self.runner.features,
            budget=self.budget if self.request.confidence else None,
            lease=self.lease,
        )

    def _propose(self, shape: Shape, gumbel: Tensor | None) -> Tree:
        if self.drafter is not None and shape.depth:
            return self.drafter.propose(self._context(shape, gumbel))
        ends = torch.tensor(self.rows.lengths, device=self.runner.device)[:, None]
        return Tree(self.rows.ids.gather(1, ends - 1), (-1,))

    def _forward(self, tree: Tree, starts: list[int]) -> Tensor:
        """Logits at the nodes. Strict passes have the same rows whatever was drafted: kernels round by shape."""
        if not tree.is_chain:
            return self.runner.forward(tree.tokens, starts, tree.depths, tree.ancestors)
        if not self.request.strict:
            return self.runner.chain(tree.tokens, starts)
        missing = self.request.shape.num_nodes - tree.num_nodes
        padded = torch.cat([tree.tokens, tree.tokens[:, -1:].expand(-1, missing)], 1)
        return self.runner.chain(padded, starts, strict=True)[:, : tree.num_nodes]

    def _verify(self, tree: Tree, logits: Tensor, gumbel: Tensor | None) -> Verdict:
        history = self._history()
        scores = warp(logits if history is None else history.of_tree(tree, logits), self.request.sampling)
        depth = tree.max_depth
        gumbel = gumbel if gumbel is None else gumbel[:, : depth + 1]
        return self.verifier(
            Question(tree, scores, self.request.sampling, self.noise, self._positions(depth), gumbel, self.round_index)
        )

    def _history(self) -> History | None:
        if not self.request.processors:
            return None
        prompts = [one.prompt_length for one in self.rows.current]
        return History(self.request.processors, self.rows.ids, self.rows.lengths, prompts, self.rows.seated)

    def _commit(self, verdict: Verdict, drafted: int) -> list[Event]:
        """Extend the rows, cut those that end, count. The only host sync of the round is here."""
        both = torch.cat([verdict.num_accepted[:, None], verdict.tokens], dim=1).tolist()
        self.stats.arrive()
        rows = self.rows.running
        events = [self._extend(row, both[row], drafted) for row in rows]
        if verdict.distance is not None:
            for row, event in zip(rows, events, strict=True):
                self.stats.distances += verdict.distance[row, : len(event.tokens)].tolist()
        return events

    def _extend(self, row: int, verdict: list[int], drafted: int) -> Event:
        accepted, one, index = verdict[0], self.rows.current[row], self.rows.seated[row]
        tokens = verdict[1 : accepted + 2]
        taken = one.extend(tokens, partial(self._reason, row))
        if taken <= accepted:  # cut: what lies behind the end was neither refused nor emitted
            accepted = drafted = taken
        self.stats.rounds.append(Round(index, drafted, accepted, taken))
        return Event(index, tokens[:taken], accepted, drafted)

    def _reason(self, row: int, one: RequestState) -> str | None:
        if one.tokens[-1] in self.request.eos_ids:
            return "eos"
        if self.request.stop is not None and self.request.stop.ends(one.tokens, one.prompt_length):
            return "stop"
        if self.request.criteria is not None and self.request.criteria.end(self.rows.ids[[row], : len(one.tokens)]):
            return "stop"
        return "length" if len(one.tokens) >= one.end else None


def _drawn(request: Request) -> Drawn:
    """How the rule wants children drawn. `SamplingConfig` has refused what is not exact, by name."""
    drawn = VERIFIERS[request.verifier].drawn(request.shape, request.replacement)
    assert drawn is not None, (request.verifier, request.shape, request.replacement)
    assert request.verifier != "greedy" or request.sampling.is_greedy, request.sampling
    assert not request.strict or request.shape.is_chain, request.shape
    assert not request.confidence or (request.adaptive and request.shape.is_chain), request.shape
    return drawn


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
