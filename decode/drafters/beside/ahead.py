"""Drafting the next round while the target verifies this one (`decode.overlap`): in a thread of its own, on a device of
its own where there is one.

A round's drafts x1 ... xk stand in the tree. While the target reads them, the draft goes on as if all of them were
accepted: it guesses the bonus token b, and drafts y1 ... yk behind it. Where the verdict says just that, the next round
is [b | y1 ... yk] and takes no time to draft; else it is drafted as ever, and what was drafted ahead is forgotten.
Parallel speculation is older: PEARL (Liu et al. 2024, arXiv:2408.11850), DSI (Timor et al. 2024, arXiv:2405.14105).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from decode.drafters.base import Context, Drafter
from decode.trees.tree import Tree, chain_parents
from decode.trees.tree_plans import chain

T = TypeVar("T")


class WorkerThread:
    """A thread beside the caller's, which does one thing at a time, on a GPU in streams of its own. Made for the
    devices that its work is on; the thread is there from the first work to `end`."""

    def __init__(self, *devices: torch.device) -> None:
        self._pool = ThreadPoolExecutor(1, "draft-ahead")
        self._streams = [torch.cuda.Stream(one) for one in set(devices) if one.type == "cuda"]

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """Do it beside what the caller does next: it finds what the caller's streams hold by now, and the caller's
        context variables. Nothing may be begun before `result` was asked for the work before it."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        return self._pool.submit(copy_context().run, self._done, work, _precisions())

    def _done(self, work: Callable[[], T], precisions: Mapping[str, torch.dtype]) -> T:
        with torch.inference_mode(), ExitStack() as stack:  # modes are a thread's own
            for device, dtype in precisions.items():
                stack.enter_context(torch.autocast(device, dtype))
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            return work()

    def result(self, begun: Future[T]) -> T:
        """Wait for it, and raise what it raised. The caller's streams go on behind it."""
        try:
            return begun.result()
        finally:
            self._join()

    def end(self) -> None:
        """Wait for what is under way, and end the thread. Caches that it wrote into are the caller's streams' again."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._join()

    def _join(self) -> None:
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)


def _precisions() -> dict[str, torch.dtype]:
    """Device type -> what this thread's autocast computes in there; none where it is off."""
    return {one: torch.get_autocast_dtype(one) for one in ("cpu", "cuda") if torch.is_autocast_enabled(one)}


def handed_over(tensor: Tensor) -> Tensor:
    """A tensor of another stream, whose memory is not given away while the caller's stream reads it."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


@dataclass(frozen=True)
class Guess:
    """What is drafted ahead of a verdict."""

    beyond: Context
    """The context that all of the round's drafts have become a part of."""
    since: int
    """Drafts of the round, k."""
    drafting: Future[Tree | None]
    """The chain behind it, of k + 1 tokens; None where the draft cannot go on from there."""

    def came_true(self, drafted: Tree, context: Context) -> bool:
        """Whether every running row's text is what was assumed, the guessed bonus token included."""
        ends = self.beyond.lengths[:, None]
        places = ends - self.since + torch.arange(self.since + 1, device=ends.device)
        want = self.beyond.ids.scatter(1, ends, drafted.tokens[:, 1:2]).gather(1, places)
        same = (context.ids.gather(1, places) == want).all(-1) & (context.lengths == ends[:, 0] + 1)
        return all(context.of_running(same.tolist()))


class AheadDrafter(Drafter):
    """Chains of `inner`, a drafter whose `propose` depends on the context alone, drafted in turn or ahead.

    With several rows, all that run must have been guessed: else all are drafted anew.
    """

    on_host = True

    def __init__(self, inner: Drafter) -> None:
        assert not inner.taps, "hidden states of tokens that the target has not read yet"
        self.inner = inner
        self.begins_ahead: bool = False
        """Whether the round that was prepared last begins with tokens drafted ahead."""
        self._aside: WorkerThread | None = None
        self._guess: Guess | None = None
        self._drafted: Tree | None = None

    def start(self, context: Context, capacity: int) -> None:
        """With room for a round, a bonus token and the round behind it."""
        k = context.shape.depth
        self.inner.start(replace(context, shape=chain(2 * k + 1)), capacity + k + 1)
        self._aside = WorkerThread(context.ids.device, getattr(self.inner, "device", context.ids.device))
        context.lease.then(self._aside.end)

    def read(self, context: Context, lengths: Mapping[int, int]) -> None:
        """New rows were not foreseen."""
        self._outcome(context)
        self.inner.read(context, lengths)

    def prepare(self, context: Context) -> Hashable | None:
        """Find out whether the round is drafted already; the draft waits for its own thread even where it is not."""
        self._drafted = self._outcome(context)
        self.begins_ahead = self._drafted is not None
        return ("ahead",) if self.begins_ahead else self.inner.prepare(context)

    def propose(self, context: Context) -> Tree:
        """The round's chain; the next one is begun."""
        tree = self.inner.propose(context) if self._drafted is None else self._drafted
        k = tree.num_nodes - 1
        if k and (context.left is None or context.left > k + 2):  # a next round would have drafts
            self._go_on(context, tree, k)
        return tree

    def _go_on(self, context: Context, tree: Tree, k: int) -> None:
        assert self._aside is not None
        beyond = _beyond(context, tree.tokens[:, 1:])

        def work() -> Tree | None:
            return None if self.inner.prepare(beyond) is None else self.inner.propose(beyond)

        self._guess = Guess(beyond, k, self._aside.begin(work))

    def _outcome(self, context: Context) -> Tree | None:
        """The round that was drafted ahead, where it is the one to come. What the thread raised is raised here."""
        guess, self._guess = self._guess, None
        if guess is None:
            return None
        assert self._aside is not None
        drafted = self._aside.result(guess.drafting)
        if drafted is None or not guess.came_true(drafted, context):
            return None
        return _behind_the_first(drafted)


def _beyond(context: Context, drafts: Tensor) -> Context:
    """`context` as it is if all of drafts (B, k) are accepted; of tensors that nobody writes to meanwhile.

    Penalties and grammars are not foreseen: they may be asked by one thread alone, and any drafts are exact.
    """
    k = drafts.shape[1]
    places = context.lengths[:, None] + torch.arange(k, device=drafts.device)
    return replace(
        context,
        ids=context.ids.scatter(1, places, drafts),
        lengths=context.lengths + k,
        shortest=context.shortest + k,
        longest=context.longest + k,
        shape=chain(k + 1),
        noise=replace(context.noise, keys=context.noise.keys.clone()),
        gumbel=None,
        history=None,
        features=None,
        target=None,
        plain_rounds=0,
        is_undecided=True,
    )


def _behind_the_first(drafted: Tree) -> Tree:
    """The tree whose pending token is the first draft, with the distributions of its own nodes."""
    log_q = None if drafted.log_q is None else handed_over(drafted.log_q)[:, 1:]
    tokens = handed_over(drafted.tokens)[:, 1:]
    return Tree(tokens, chain_parents(tokens.shape[1]), drafted.drawn, log_q)
