"""What all heads on a target share: the target's frozen ends, and the decoding face around a family's passes.

Slot t of a head holds what it makes of the target's hidden states after token t, and of token t + 1: its logits there
are about token t + 2. With n committed tokens the slots 0 ... n - 2 are true, and the last of them drafts the first
token after pending. Drafted nodes lie in the slots behind until the verdict; what was accepted is made anew from true
hidden states in the next round's first pass, so nothing has to be moved.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from decode.common.progress import get_logger
from decode.drafters.base import Batch, Context, Drafter, Step
from decode.drafters.drafting import DraftRound, Steps, Unit, places_behind, visible_slots
from decode.drafters.head_config import HeadConfig
from decode.drafters.layers import Extend, Slots, into
from decode.drafters.packed_rows import NAME, PackedRows
from decode.drafters.tree_drafting import propose
from decode.forward.cache import SlotCache
from decode.forward.kept.lease import Lease
from decode.forward.kept.runners import Runners
from decode.forward.packed_linear import Together
from decode.forward.packing import Packing
from decode.forward.runner import Runner, chunks, rounded
from decode.trees.tree import Tree

if TYPE_CHECKING:
    from decode.models.output_head import Ends

log = get_logger("decode")


class HeadDraft(nn.Module, Drafter):
    """Both faces of a head, but for a family's own passes."""

    source: str = ""
    """Folder that it was loaded from."""
    on_host = False
    num_cached: int = 0
    """Layers that keep keys and values of the slots."""
    round_steps: ClassVar[type[HeadSteps[Any]]]
    """What `steps` makes where a family does not make them itself."""
    vocab: Tensor | None
    recomputes = False
    """Whether training keeps what layers are given alone, and makes the rest of their activations again in backward."""

    def __init__(self, config: HeadConfig, ends: Ends, vocab: Tensor | None = None) -> None:
        """`vocab` (V_draft,) int64: ascending target ids of a reduced draft vocabulary."""
        super().__init__()
        assert (vocab is None) == (config.draft_vocab_size is None), (vocab, config.draft_vocab_size)
        self.config, self.ends = config, ends
        self.taps = config.taps
        self.register_buffer("vocab", vocab)
        self._rows: tuple[tuple[object, ...], Tensor] | None = None  # of the output head, for a reduced vocabulary
        self._runner: Runner | None = None
        self._runners: Runners | None = None
        self._warned = False

    @property
    def family(self) -> str:
        """That of its configuration."""
        return self.config.family

    @property
    def foresees(self) -> bool:
        """Asked of the configuration, which may be replaced while a head lives."""
        return self.config.foresees

    # training face

    def layered(self, run: Callable[..., Any], *given: Any) -> Any:
        """run(*given), a part of the training face; `recomputes` is about these."""
        if not (self.recomputes and torch.is_grad_enabled()):
            return run(*given)
        return checkpoint(run, *given, use_reentrant=False, preserve_rng_state=False)

    @abstractmethod
    def unroll(self, batch: Batch) -> Iterator[Step]:
        """The steps of every anchor; step s drafts its s-th token."""

    def head(self, hidden: Tensor) -> Tensor:
        """hidden (..., d) -> logits (..., V_draft), by the target's own frozen rows, where hidden is: of a target over
        several cards the output head lies on another one than embedding and draft."""
        head = self.ends.head
        if self.vocab is None:
            return head(hidden.to(head.dtype)).to(hidden.device)
        packed = self._modules.get(NAME)
        if packed is not None:
            return head.rescaled(packed(hidden.to(head.dtype)))
        return head.of_rows(hidden, self._head_rows(self.vocab)).to(hidden.device)

    def embed(self, ids: Tensor) -> Tensor:
        """ids (...) -> (..., d), by the target's own frozen embedding, where ids are."""
        return self.ends.embed(ids).to(ids.device, self.dtype)

    @property
    def head_is_frozen(self) -> bool:
        """Whether it drafts with the target's output head, which is not trained."""
        return not self.config.has_own_head

    @property
    def head_weights(self) -> tuple[Tensor, ...] | None:
        """`Step.head_weights` of `head`; a family with an output head of its own names them."""
        return () if self.head_is_frozen else None

    @property
    def dtype(self) -> torch.dtype:
        """Of the head's weights."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Of its weights, where its slots are too: that at which the target takes token ids (`load_drafter`)."""
        return next(self.parameters()).device

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (..., d) -> (..., V); -inf outside of a reduced draft vocabulary."""
        return self.widened(self.head(hidden))

    def widened(self, drafted: Tensor) -> Tensor:
        """drafted (..., V_draft) -> (..., V)."""
        if self.vocab is None:
            return drafted
        every = drafted.new_full((*drafted.shape[:-1], self.config.vocab_size), -torch.inf)
        return every.index_copy(-1, self.vocab, drafted)

    def _head_rows(self, vocab: Tensor) -> Tensor:
        """The target's rows of the draft's tokens, taken once. A captured unit finds them taken: the matrix is packed
        there, and has no rows."""
        weight = self.ends.head.weight
        if self._rows is None or not weight.is_mkldnn:
            state = (weight.data_ptr(), weight.dtype, 0 if weight.is_inference() else weight._version)
            if self._rows is None or self._rows[0] != state:
                with torch.inference_mode(mode=False), torch.no_grad():  # training may use them after decoding has
                    self._rows = (state, weight[vocab.to(weight.device)])
        return self._rows[1]

    # decoding face

    def read_slots(self, tokens: Tensor, features: Tensor, positions: Tensor, extends: list[Extend]) -> None:
        """Bring true slots into the caches: tokens (B, T) are those after the features (B, T, n, d); by itself
        nothing is kept of them."""

    def steps(self, slots: Slots, read: Tensor, ends: Tensor, features: Tensor) -> Steps:
        """The passes of one round: read (B, W) the last committed tokens, pending among them, ends (B, 1) the number of
        committed tokens, features (B, W, n, d) of the tokens before those."""
        return self.round_steps(self, slots, read, ends, features)

    def num_slots(self, num_read: int) -> int:
        """Slots behind the true ones that a round writes which reads so many nodes."""
        return num_read

    def start(self, context: Context, capacity: int) -> None:
        """Captures are kept from one call to the next."""
        if self.most_tokens is not None and context.shape.depth > self.most_tokens and not self._warned:
            self._warned = True
            log.warning(
                "the draft drafts %d tokens a round, and %d are asked for: the rest is left out",
                self.most_tokens, context.shape.depth,
            )  # fmt: skip
        self._runner = None  # where memory ends, the last call's may be given up
        self._runner = self._runner_for(len(context.lengths), capacity, context.lease)
        self.runner.unread = 1

    @property
    def runner(self) -> Runner:
        """The head's own cache, from `start` on."""
        assert self._runner is not None
        return self._runner

    def read(self, context: Context, lengths: Mapping[int, int]) -> None:
        """The true slots of prompts, but for the last one."""
        assert context.features is not None
        size = len(context.lengths)
        ends = [max(0, lengths.get(row, 0) - 2) for row in range(size)]
        for rows, start, end in chunks([0] * size, ends, context.ids.device.type) if self.num_cached else ():
            index = torch.tensor(rows, device=context.ids.device)
            positions = torch.arange(start, end, device=index.device).expand(len(rows), -1)
            slots = torch.arange(end, device=index.device)
            visible = slots <= positions[..., None]
            if self.config.attends is not None:
                visible &= self.config.attends.sees(positions, slots[None])
            cache = self.runner.cache
            cache.hold(end)
            cache.place(slice(start, end), end, index)
            with self.runner.passes():
                self.read_slots(
                    context.ids[index, start + 1 : end + 1],
                    context.features[index, start:end],
                    positions,
                    [into(cache, layer, visible) for layer in range(self.num_cached)],
                )

    def prepare(self, context: Context) -> tuple[int, int] | None:
        """Read the true slots that the round's first pass will not. Nothing is drafted while a row is a single token,
        after which the target has not been asked yet (a new one: those that have ended are longer)."""
        if context.shortest < 2:
            return None
        context = self.within_depth(context)
        if self.vocab is not None:
            self._head_rows(self.vocab)
        width = context.shape.depth + 1  # as many tokens as a verdict can have accepted, so that one capture serves
        if self.num_cached:
            for places in places_behind(context, width + 1, self.runner.unread + context.plain_rounds - width):
                self._read_places(context, places)
        self.runner.unread = width
        return width, visible_slots(self.runner, context, self.num_slots(context.shape.num_read) + 1)

    def propose(self, context: Context) -> Tree:
        context = self.within_depth(context)
        return propose(head_round(self, context, context.shape.depth + 1), context)

    def slots(self, visible: int) -> Slots:
        """The first `visible` slots of its cache, for a pass."""
        return Slots(self.runner.cache, visible, self.runner.device, self.config.attends)

    def _read_places(self, context: Context, places: Tensor) -> None:
        """True slots at places (B, W), one after another."""
        assert context.features is not None
        slots = self.slots(visible_slots(self.runner, context, 0))
        own, extends = slots.straight(places[:, :1], places.shape[1], self.num_cached)
        rows = torch.arange(len(own), device=own.device)[:, None]
        with self.runner.passes():
            self.read_slots(context.ids.gather(1, own + 1), context.features[rows, own], own, extends)

    def _runner_for(self, batch_size: int, capacity: int, lease: Lease) -> Runner:
        target = self.ends.head.model

        slots = rounded(capacity + self.num_slots(0) + 1)

        def make(packing: Any) -> Runner:
            return Runner(self._cache(batch_size, slots), self.device, packing)

        def packing_of_both() -> Together:  # it runs the target's output head
            parts = (Packing(self), Runners.of(target, lambda: Packing(target)).packing)
            if self.vocab is None or not self.head_is_frozen:
                return Together(parts)
            self._rows = None  # of weights that have changed since, perhaps
            return Together((*parts, PackedRows(self, self._head_rows(self.vocab))))

        runners = Runners.of(self, packing_of_both, target)
        if self._runners is not runners:  # the target's weights may have changed without a trace but in their values
            self._rows, self._runners = None, runners
        return runners.get((batch_size, slots), make, lease)

    def _cache(self, batch_size: int, slots: int) -> SlotCache:
        cache = SlotCache(max(1, self.num_cached), batch_size, slots)
        shape = (batch_size, self.config.kv_heads, 1, self.config.head_dim)
        with torch.inference_mode(mode=False):
            for layer in cache.slot_layers[: self.num_cached]:
                none = torch.zeros(shape, dtype=self.dtype, device=self.device)
                layer.lazy_initialization(none, none)
            cache.allocate()
        return cache


Draft = TypeVar("Draft", bound=HeadDraft)


@dataclass
class HeadSteps(Steps, Generic[Draft]):
    """Those of a family whose passes depend on one another; the fields are what `HeadDraft.steps` is given."""

    draft: Draft
    slots: Slots
    read: Tensor
    ends: Tensor
    features: Tensor

    def unread(self) -> tuple[Tensor, list[Extend]]:
        """Positions of the true slots that are not in the caches yet, and the caches."""
        width = self.read.shape[1]
        return self.slots.straight(self.ends - 1 - width, width, self.draft.num_cached)


def head_round(draft: HeadDraft, context: Context, width: int) -> DraftRound:
    """One round of a head whose true slots are in the cache but for the last `width`.

    Its inputs are the last committed tokens (B, width), the number of all (B, 1), and the features (B, width, n, d) of
    the tokens before each of them. A row that has fewer gives its second token several times, which `Slots.straight`
    puts into its first slot.
    """
    assert context.features is not None
    runner, device = draft.runner, context.ids.device
    reach = draft.num_slots(context.shape.num_read) + 1
    visible = visible_slots(runner, context, reach)
    ends = context.lengths[:, None]
    places = (ends - torch.arange(width, 0, -1, device=device)).clamp(min=1)
    rows = torch.arange(len(ends), device=device)[:, None]
    read, features = context.ids.gather(1, places), context.features[rows, places - 1]

    def moved() -> tuple[Tensor, ...]:
        others = (read + 1) % draft.config.vocab_size
        return others, (ends + 1).clamp(max=visible - reach), features.flip(-1)

    def unit() -> Unit:
        return Unit(partial(draft.steps, draft.slots(visible)), draft, draft.ends.head.model)

    inputs = (read, ends, features)
    return DraftRound(runner, (width, visible), inputs, moved, unit, lambda: unit()(*inputs), draft.foresees)
