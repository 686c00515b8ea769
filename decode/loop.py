"""One generation call: the host launches rounds over a state on the device, and reads what came of them `lag` rounds
later, in one copy each.

What it does with them is refill rows, find stop strings, stream, and choose how much is drafted. A text that the host
ends later than the device could know of runs on for `lag` rounds; what they add is cut, so the text is the same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable
from functools import cached_property, partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.autotune.budget import Budget
from decode.common.environment import device_of
from decode.common.errors import RunError
from decode.drafters.base import Context, Drafter, OnDevice
from decode.drafters.beside.ahead import AheadDrafter
from decode.drafters.beside.other_device import at
from decode.forward.kept.lease import Lease
from decode.forward.runner import least_room, whole
from decode.forward.target import runner_for
from decode.requests import Event, Observer, Request, check_context, drawn
from decode.rounds.flights import Bounds, Flight, Reading, bounds_of
from decode.rounds.round import BROKEN, Outcome, Round, Rule, outcome
from decode.rounds.rows import RequestState, Rows
from decode.rounds.state import State
from decode.sampling.noise import Ledger, Noise, row_keys, token_table
from decode.sampling.processors import History
from decode.stats import Round as CountedRound
from decode.stats import Stats
from decode.trees.tree import Drawn
from decode.trees.tree_plans import Shape, chain
from decode.verify import VERIFIERS

LAG = 1
"""Rounds that an accelerator has ahead while the host reads; a CPU has nobody to wait for."""


class Loop:
    """One generation call: requests from prompt to end, `batch_size` of them at a time."""

    def __init__(self, model: PreTrainedModel, drafter: Drafter | None, request: Request) -> None:
        self.request, self.lease = request, Lease()
        owned = None if drafter is None else self.lease.own(drafter)
        placed = at(owned, device_of(model))
        self.drafter = AheadDrafter(placed) if request.overlap and placed is not None else placed
        self.verifier = VERIFIERS[request.verifier]
        self.drawn: Drawn = drawn(request)
        lengths = [len(prompt) for prompt in request.prompts]
        check_context(model, lengths, request.max_new_tokens)
        in_round = max(request.shape.num_nodes, 2 + request.shape.num_read)  # a draft may read more than it proposes
        self.num_passengers = 0 if drafter is None else drafter.most_passengers
        room = 0 if request.strict else least_room()  # strict passes look at all of it
        longest = max(room, max(lengths) + request.max_new_tokens)
        self.capacity = longest + in_round + self.num_passengers
        requests = [RequestState(len(x), list(x), len(x) + request.max_new_tokens) for x in request.prompts]
        self.rows = Rows(requests, request.batch_size or len(requests))
        self.num_read = [0] * self.rows.size
        if request.conversation is None:
            self.runner = runner_for(model, self.rows.size, self.capacity, self.lease, taps=self._taps)
        else:
            (prompt,) = request.prompts
            self.runner, self.num_read[0] = request.conversation.begin(model, drafter, prompt, self.capacity)
        self.vocab_size = model.config.get_text_config().vocab_size
        self.table = token_table(self.vocab_size, self.runner.device)
        self.ledger = Ledger() if request.audit else None
        self.sampling = request.sampling.apart()
        slots = self.runner.cache.capacity  # rather than `capacity`, so that calls share captures
        self.state = State.of(self.rows.size, slots, request.sampling.temperature, request.eos_ids, self.runner.device)
        if self.num_passengers:
            assert not request.strict, "rounds without drafts have no passengers, and their passes fewer rows"
            self.state = self.state.listening(self.num_passengers, self.vocab_size, model.dtype)
        self.stats = Stats(request.shape.depth if drafter is not None else 0)
        self.budget = None
        if request.adaptive and drafter is not None:
            self.budget = Budget.of(drafter, model, request, self.rows.size, self.capacity)
        self.lag = 0 if self._waits or self.runner.device.type == "cpu" else LAG
        self.flights: deque[Flight] = deque()
        self._settled_at, self._plain_rounds, self._idled = 0.0, 0, 0

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
        finally:
            self.lease.end()
            if self.request.conversation is not None:
                self.request.conversation.end(None if self.rows.running else self.rows.at(0).tokens)
        self.stats.finish([one.reason or "" for one in self.rows.requests], self.runner.device)
        return [one.tokens for one in self.rows.requests], self.stats

    def step(self) -> list[Event]:
        """Launch one round, where any row can have a token left, and read the one that is due."""
        bounds = self._bounds()
        if bounds.left > 0:
            with self.stats.phase("round"):
                self.flights.append(self._launched(bounds))
        if bounds.left > 0 and len(self.flights) <= self.lag:
            return []
        with self.stats.phase("host"):
            return self._settled(self.flights.popleft())

    @property
    def _waits(self) -> bool:
        """Whether the host has a say inside rounds, so that they run step by step."""
        on_host = self.drafter is not None and self.drafter.on_host
        return on_host or bool(self.request.processors) or self.request.confidence or self.ledger is not None

    @cached_property
    def _taps(self) -> tuple[int, ...]:
        """Hidden states that passes keep: those that the drafter reads, then what else is asked for."""
        own = () if self.drafter is None else self.drafter.taps
        asked = () if self.request.endings is None else self.request.endings.layers
        return tuple(dict.fromkeys((*own, *asked)))

    @cached_property
    def _on_device(self) -> OnDevice | None:
        """The drafter where it has a cache of its own; asked once, since the answer goes through all its attributes."""
        return self.drafter if isinstance(self.drafter, OnDevice) else None

    def _bounds(self) -> Bounds:
        return bounds_of(self.rows, self.flights)

    def _start(self) -> None:
        with self.stats.phase("prefill"):
            if self.drafter is not None:
                self.drafter.start(self._context(self.request.shape, self._bounds()), self.capacity)
            self._seat(list(range(self.rows.size)))

    def _refill(self) -> None:
        """Waiting requests take the place of finished ones: together, once free rows have idled for as many tokens as a
        round of all rows makes, because a pass over one prompt takes as long as that."""
        ended = self.rows.ended
        self._idled += len(ended)
        if not ended or (self.rows.running and self._idled < self.rows.size):
            return
        self._idled = 0
        with self.stats.phase("prefill"):
            self._tell_endings(ended)
            changed = self.rows.refill()
            if changed:
                self.num_read = [0] * self.rows.size
                self._seat(changed)

    def _tell_endings(self, rows: list[int]) -> None:
        """Hand over what these rows hold, before others take them."""
        endings = self.request.endings
        if endings is None:
            return
        if endings.layers:
            self._read_pending()
        features, at = self.runner.features, [self._taps.index(layer) for layer in endings.layers]
        for row in rows:
            one = self.rows.at(row)
            states = features[row, : len(one.tokens)][:, at] if at and features is not None else None
            endings.take(self.rows.seated[row], one, states)

    def _read_pending(self) -> None:
        """No round has read the last token of a text that has ended."""
        pending = self.state.ids.gather(1, self.state.starts)
        with self.runner.passes(), whole():
            self.runner.chain(pending, self.state.starts, self._bounds().longest - 1)

    def _seat(self, rows: list[int]) -> None:
        """Write and read the prompts of new requests."""
        seated = [self.rows.at(row) for row in rows]
        lengths = {row: len(one.tokens) for row, one in zip(rows, seated, strict=True)}
        keys = row_keys(self.request.seed, [self._key(self.rows.seated[row]) for row in rows], self.runner.device)
        self.state.seat(rows, [one.tokens for one in seated], [one.end for one in seated], keys)
        self._prefill(lengths)
        if self.drafter is not None:
            self.drafter.read(self._context(self.request.shape, self._bounds()), lengths)

    def _prefill(self, lengths: dict[int, int]) -> None:
        """Read the prompts up to pending; strict ones one by one, since who comes along depends on the draft."""
        for group in ([row] for row in lengths) if self.request.strict else (list(lengths),):
            end = [0] * self.rows.size
            for row in group:
                end[row] = lengths[row] - 1
            begin = [min(read, last) for read, last in zip(self.num_read, end, strict=True)]
            self.runner.prefill(self.state.ids, begin, end)
            self.stats.num_prefilled += sum(end) - sum(begin)

    def _key(self, index: int) -> int:
        """What keys the noise of a request: its own index, never its row in the batch."""
        return index if self.request.rows is None else self.request.rows[index]

    def _shape(self, left: int) -> Shape:
        """The coming round's tree; the whole plan even where less could be emitted, because its passes are captured and
        those of a shorter one are not (10 ms against 6), but nothing where a single token is left."""
        if self.drafter is None:
            return chain(0)
        wanted = self.request.shape if left > 1 else self.request.shape.cut(0)
        if self.budget is None:
            return wanted
        return self.budget.next_shape(wanted, left)

    def _context(self, shape: Shape, bounds: Bounds) -> Context:
        """Of a round over the rows as they are now; rounds make their own noise."""
        return Context(
            ids=self.state.ids,
            lengths=self.state.lengths,
            shortest=bounds.shortest,
            longest=bounds.longest,
            left=bounds.left,
            running=self.rows.running,
            sampling=self.sampling,
            temperature=self.state.temperature,
            history=self._history(),
            passenger_logits=self.state.passenger_logits,
            passenger_positions=self.state.passenger_positions,
            shape=shape,
            drawn=self.drawn,
            noise=Noise(self.state.keys, self.table, self.state.round_index),
            shares_noise=self.verifier.shares_noise,
            features=self._features,
            target=self.runner,
            plain_rounds=self._plain_rounds,
            budget=self.budget if self.request.confidence else None,
            lease=self.lease,
        )

    @property
    def _features(self) -> Tensor | None:
        """Those that the drafter reads."""
        found = self.runner.features
        return found if found is None or self.drafter is None else found[:, :, : len(self.drafter.taps)]

    def _history(self) -> History | None:
        if not self.request.processors:
            return None
        prompts = [one.prompt_length for one in self.rows.current]
        return History(self.request.processors, self.state.ids, self.rows.lengths, prompts, self.rows.seated)

    def _launched(self, bounds: Bounds) -> Flight:
        began, shape = time.perf_counter(), self._shape(bounds.left)
        wanted = self._context(shape, bounds)
        prepared = self.drafter.prepare(wanted) if self.drafter is not None and shape.depth else None
        drafter = None if prepared is None else self.drafter
        self._plain_rounds = 0 if drafter is not None else self._plain_rounds + 1
        strict = self.request.shape.num_nodes if self.request.strict else None
        rule = Rule(self.sampling, self.verifier, self.drawn, strict)
        made = self._run(drafter, rule, wanted, prepared)
        self.state = made.state
        depth = shape.depth if drafter is not None else 0
        distance = None if made.distance is None else Reading(made.distance)
        ahead = self.drafter.begins_ahead if self.drafter is not None and depth else None
        return Flight(Reading(made.report), distance, list(self.rows.seated), depth, began, self.runner.replayed, ahead)

    def _run(self, drafter: Drafter | None, rule: Rule, wanted: Context, prepared: Hashable) -> Outcome:
        """As one captured unit, unless the host has a say in it."""

        def make() -> Round:
            return Round(self.runner, drafter, rule, wanted, self.ledger)

        if self._waits:
            return make().decided(self.state)
        beside = self._on_device.runner if drafter is not None and self._on_device is not None else None
        draft = drafter if beside is None else beside.serial
        shape = wanted.shape if drafter is not None else None
        nodes = 1 if shape is None else max(shape.num_nodes + self.num_passengers, shape.num_read + 2)
        visible = self.runner.visible_to(wanted.longest - 1 + nodes, self.request.strict)
        key = ("round", rule, shape, visible, prepared, self.state.end_ids.shape, draft)
        moved = partial(self.state.moved, self.vocab_size)
        return outcome(self.runner.run(key, make, self.state, moved, self.request.strict, beside))

    def _settled(self, flight: Flight) -> list[Event]:
        """Extend the rows, cut those that end, count."""
        reports = flight.reading.values()
        self.stats.arrive()
        rows = [row for row in self.rows.running if flight.seated[row] == self.rows.seated[row]]
        events = [self._extend(row, reports[row], flight.ahead) for row in rows]
        if flight.distance is not None:
            distances = flight.distance.values()
            for row, event in zip(rows, events, strict=True):
                self.stats.distances += distances[row][: len(event.tokens)]
        now = time.perf_counter()
        took, self._settled_at = now - max(flight.began, self._settled_at), now
        if self.budget is not None:
            rounds = self.stats.rounds[len(self.stats.rounds) - len(events) :]
            self.budget.learn(rounds, took if flight.replayed else None, reports[0][1])
        return events

    def _extend(self, row: int, report: list[int], ahead: bool | None) -> Event:
        accepted, drafted, *tokens = report
        if accepted == BROKEN:
            raise RunError(
                f"the target's scores are NaN behind token {len(self.rows.at(row).tokens)} of sequence "
                f"{self.rows.seated[row]}, and no token follows from them. Load it in a wider precision "
                "(dtype=float32), or check its weights"
            )
        one, index = self.rows.at(row), self.rows.seated[row]
        context = len(one.tokens)
        one.passes += 1
        taken = one.extend(tokens[: accepted + 1], partial(self._reason, row))
        if taken <= accepted:  # cut: what lies behind the end was neither refused nor emitted
            accepted = drafted = taken
        if one.reason == "stop":
            self.state.stop(row, len(one.tokens))
        self.stats.rounds.append(CountedRound(index, drafted, accepted, taken, context, ahead))
        return Event(index, tokens[:taken], accepted, drafted)

    def _reason(self, row: int, one: RequestState) -> str | None:
        if one.tokens[-1] in self.request.eos_ids:
            return "eos"
        if self.request.stop is not None and self.request.stop.ends(one.tokens, one.prompt_length):
            return "stop"
        if self.request.criteria is not None and self.request.criteria.end(self.state.ids[[row], : len(one.tokens)]):
            return "stop"
        return "length" if len(one.tokens) >= one.end else None
