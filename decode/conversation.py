"""Several calls over one growing text: what the target has read of it is kept from one call to the next."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from decode.common.typed_config import require
from decode.forward.kept.lease import Lease
from decode.forward.kept.runners import Runners
from decode.forward.packing import Packing
from decode.forward.target import CachedModel, runner_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from decode.drafters.base import Drafter


class Conversation:
    """The cache of one text, for `generate(..., conversation=it)`: the next call reads what is new in its prompt alone.

    A prompt that parts from the text so far continues from the longest beginning that both share. Text is that of a
    call without it: equal in fp64, and in fp32 but for near-ties, because tokens that were written in rounds are not
    read again. It keeps the target's keys and values; the draft, which is small, reads the whole prompt again.

    One text at a time, one model and one drafter: ConfigError for others, and where the model was changed in between
    (weights, an adapter), since what it has read would mean something else.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        """Tokens of the text so far."""
        self._pair: tuple[PreTrainedModel, Drafter | None, int] | None = None
        self._runner: CachedModel | None = None
        self._lease = Lease()
        self._is_busy = False

    def __copy__(self) -> Conversation:
        """An empty one, which reads its first prompt anew: two texts in one cache would write over each other."""
        return Conversation()

    def __deepcopy__(self, memo: dict) -> Conversation:
        return Conversation()

    def begin(
        self, model: PreTrainedModel, drafter: Drafter | None, prompt: list[int], capacity: int
    ) -> tuple[CachedModel, int]:
        """The runner for `capacity` tokens, and how many tokens of the prompt it has read; `end` follows."""
        require(not self._is_busy, "this conversation is in use by another call; give each text one of its own")
        self._check(model, drafter)
        both = zip(self.ids[:-1], prompt[:-1], strict=False)  # the last token of a text has not been read
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
        self.ids = self.ids[: shared + 1] if shared else []  # a call that fails leaves what it did not write over
        if self._runner is None or self._runner.cache.capacity < capacity:
            self._grow(model, drafter, capacity, shared)
        assert self._runner is not None
        self._is_busy = True
        return self._runner, shared

    def end(self, tokens: list[int] | None) -> None:
        """The call is over: its text, None where it failed."""
        self._is_busy = False
        self.ids = self.ids if tokens is None else list(tokens)

    def _check(self, model: PreTrainedModel, drafter: Drafter | None) -> None:
        state = Runners.of(model, lambda: Packing(model)).state
        if self._pair is None:
            self._pair = (model, drafter, state)
        known, draft, before = self._pair
        require(known is model, "this conversation was begun with another model; give each model one of its own")
        require(draft is drafter, "this conversation was begun with another drafter, or none; begin a new one")
        require(
            before == state,
            "the model was changed since this conversation began (its weights, an adapter, its modules): what it has "
            "read would mean something else. Begin a new one",
        )

    def _grow(self, model: PreTrainedModel, drafter: Drafter | None, capacity: int, shared: int) -> None:
        """Twice as large as before, so that captures, which are made for a size, seldom start anew."""
        old, lease = self._runner, Lease()
        size = capacity if old is None else max(capacity, 2 * old.cache.capacity)
        self._runner = runner_for(model, 1, size, lease, taps=drafter.taps if drafter is not None else ())
        if old is not None:
            self._runner.cache.take_over(old.cache, shared)
        self._lease.end()
        self._lease = lease
