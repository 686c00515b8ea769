"""The contract of a draft family: what training reads (Batch, Step) and what the decoder drives (Drafter)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from decode.drafters.beside.refusals import UNNAMED

if TYPE_CHECKING:
    from decode.forward.kept.lease import Lease
    from decode.forward.runner import Runner
    from decode.forward.target import CachedModel
    from decode.sampling.noise import Noise
    from decode.sampling.processors import History
    from decode.sampling.warp import Sampling
    from decode.trees.tree import Drawn, Tree
    from decode.trees.tree_plans import Shape

UNLIKELY = -1e4
"""Shown to processors as the score of what a draft does not know: it is no ban of theirs."""
Value = TypeVar("Value")


@dataclass
class Batch:
    """Packed sequences. Flat row b*T + t of `target` is p(. | ids[b, :t+1] of the same document): the distribution of
    token t+1."""

    ids: Tensor
    """(B, T) int64 token ids."""
    positions: Tensor
    """(B, T) int64 position inside the document."""
    document: Tensor
    """(B, T) int64 document number inside the row, -1 for padding."""
    loss_mask: Tensor
    """(B, T) bool: the token is to be learned."""
    features: Tensor | None = None
    """(B, T, layers, d) hidden states of the target, for families that draft from them."""
    target: Any | None = None
    """The target's distributions (distill.objectives.target_distribution.TargetDistribution over B*T rows); None when
    learning from text."""

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with its tensors on `device`; the target distribution follows the rows it is asked for."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Batch:
        """The same in memory that a GPU copies from while the CPU goes on: 400 MB of three layers' states of 16,000
        tokens would keep it waiting, some 60 ms by arithmetic."""
        return self._with(Tensor.pin_memory)

    def _with(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return replace(self, **{name: change(one) for name, one in vars(self).items() if isinstance(one, Tensor)})

    def next_token_rows(self) -> Tensor:  # (B, T) bool
        """Rows whose next token belongs to the same document and is to be learned."""
        rows = torch.zeros_like(self.loss_mask)
        same = (self.document[:, 1:] == self.document[:, :-1]) & (self.document[:, 1:] >= 0)
        rows[:, :-1] = same & self.loss_mask[:, 1:]
        return rows


@dataclass
class Step:
    """M drafted slots per row, each with the flat row of the batch whose p it is judged by."""

    hidden: Tensor
    """(B, M, d) what the head turns into logits."""
    head: Callable[[Tensor], Tensor]
    """hidden (..., d) -> logits (..., V)."""
    target_rows: Tensor
    """(B, M) int64 flat row b*T + t."""
    valid: Tensor
    """(B, M) bool: the slot counts."""
    vocab: Tensor | None = None
    """(V_draft,) target ids of a reduced draft vocabulary, None for the full one."""
    confidence: Tensor | None = None
    """(B, M) logits of the chance that the slot's token is accepted, for families that predict it."""
    head_weights: tuple[Tensor, ...] | None = None
    """The head's own, where a row of logits depends on its own row of `hidden` and of what learns on these alone: () of
    the target's head, which is frozen. None where it may depend on more."""
    drafts_by: Callable[[Tensor], Tensor] | None = None
    """As `head`, what the decoding face drafts by, where some of what is learned is never drafted; None is `head`."""
    begins_everywhere: bool = True
    """Slot m + 1 begins a round one token behind slot m; False where rounds begin at some tokens alone."""

    def drafted(self, hidden: Tensor) -> Tensor:
        """hidden (..., d) -> the logits (..., V) that the decoding face drafts by."""
        return (self.drafts_by or self.head)(hidden)


class Allowance(Protocol):
    """How many tokens are worth their passes: `autotune.budget.Budget`."""

    def takes(self, chance: Sequence[float], drafted: int) -> bool:
        """Whether to draw one more token after `drafted` ones, by the `chance` (rows,) that the draft gives it."""
        ...


@dataclass(kw_only=True)
class Context:
    """What a drafter may look at while it proposes; rows are the requests of the batch."""

    ids: Tensor
    """(B, capacity) committed tokens, left-aligned; the last one of each row is `pending`."""
    lengths: Tensor
    """(B,) int64 committed tokens per row, pending included."""
    shortest: int
    longest: int
    """Bounds of the lengths that the host knows without asking the device."""
    sampling: Sampling
    """How the target's tokens are drawn, but for the temperature."""
    temperature: Tensor
    """(1,) fp64; the sampling's own is 1 unless it is greedy."""
    noise: Noise
    """All randomness of the round; the verifier's rule says which stream a draft may read."""
    shape: Shape
    """The tree wanted in this round; a drafter may propose a smaller one."""
    drawn: Drawn = "arbitrary"
    """How the verifier wants children drawn; log_q is wanted unless `arbitrary`."""
    shares_noise: bool
    """Drafts are drawn with the very noise of the verdict (coupled), or with a stream of their own (rejection)."""
    gumbel: Tensor | None = None
    """(B, D + 1, V) noise of depths 0, 1, ... after pending where it is shared and was made; None when greedy or not
    shared."""
    history: History | None = None
    """What the target's scores are processed with (penalties, bans), so that a draft may foresee it."""
    features: Tensor | None = None
    """(B, capacity, n, d) the target's hidden states at `taps` of every committed token but pending; None without
    taps."""
    target: CachedModel | None = None
    """What the target's passes run on, for a drafter that makes passes over a part of its layers: it may write from
    pending's slot on. None for a drafter within a draft."""
    passenger_logits: Tensor | None = None
    """(B, P, V) in a call: the target's logits at the passengers of the last tree that had any (`most_passengers`)."""
    passenger_positions: Tensor | None = None
    """(B, P) int64 positions of these passengers, -1 in a row that has had none. Their hidden states are in `features`
    until a pass writes over them: N slots after the first token of that round, behind its N nodes."""
    plain_rounds: int = 0
    """Rounds without drafts since the last one with them: each made every row longer by one token."""
    left: int | None = None
    """No running row can emit more tokens; None where nobody counts."""
    is_undecided: bool = False
    """Drafts for a text that the target may yet decide otherwise: their noise is of a stream of its own, and the first
    of them, which no verdict will judge, is the likeliest."""
    lease: Lease
    """The call: what caches a drafter takes for it are its own until it ends."""
    budget: Allowance | None = None
    """Whether to go on is asked after every token of a chain; None where the length is settled beforehand."""
    running: list[int] | None = None
    """Rows whose request has not ended; None is all. The others are drafted for as well, and decide nothing."""

    def of_running(self, values: list[Value]) -> list[Value]:
        """Those of the rows that have not ended, out of one for each row."""
        return values if self.running is None else [values[row] for row in self.running]

    @property
    def drafts_chain(self) -> bool:
        """Whether tokens are drawn one after another; a sampled tree that was cut to a chain keeps its distribution."""
        return self.shape.is_chain and self.drawn != "swor"

    def processed(self, logits: Tensor, paths: Tensor) -> Tensor:
        """logits (B, W, V) of W nodes of one depth as the target's would be processed there; paths (B, W, D) are the
        drafted tokens from the first one to the node itself. Where nothing is left of the tokens that a draft knows
        they stay what they were: of a row of nothing there is no distribution, and none of them will stand."""
        if self.history is None:
            return logits
        known = logits > -torch.inf
        done = self.history.of_nodes(logits.masked_fill(~known, UNLIKELY), paths).masked_fill(~known, -torch.inf)
        return torch.where((done > -torch.inf).any(-1, keepdim=True), done, logits)

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens on the longest path that is wanted."""
        return self.shape.depth


class Drafter(ABC):
    """The decoding face; what drafts derives from it, and says by these attributes in what it differs from others.

    Nothing has to be told after a verdict: what was accepted stands in the next context's ids and features, also after
    rounds in which nothing was drafted.
    """

    family: str = UNNAMED
    """Its name in messages."""
    on_host: bool
    """Whether `propose` looks at values of tensors: rounds then run step by step, and the host waits for each."""
    taps: tuple[int, ...] = ()
    """The target's hidden states (`decode.models.hidden_states`) that it drafts from."""
    most_tokens: int | None = None
    """Longest path that can be drafted; None is any. A head has as many as it was trained with."""
    drafts_trees: bool = True
    """Whether it drafts anything but chains."""
    foresees: bool = False
    """Predicts what becomes of its tokens (`drafting.Foreseeing`)."""
    most_passengers: int = 0
    """P of every tree that it proposes."""
    begins_ahead: bool | None = None
    """Whether the round that it prepared was drafted before its time; None of one that never does that."""

    @abstractmethod
    def start(self, context: Context, capacity: int) -> None:
        """Make caches for `capacity` tokens a row."""

    @abstractmethod
    def read(self, context: Context, lengths: Mapping[int, int]) -> None:
        """Begin these rows anew: prompts of so many tokens, row by row, are read up to, without, pending."""

    @abstractmethod
    def prepare(self, context: Context) -> Hashable | None:
        """What the host does before a round: read what rounds without drafts have left unread. What the passes of
        `propose` depend on besides the context's shape, so that a captured round can be found by it; None where nothing
        can be drafted now."""

    @abstractmethod
    def propose(self, context: Context) -> Tree:
        """A tree whose node 0 is pending. A function of tensors alone, unless `on_host`: it is then called once, to be
        captured, for all rounds of which `prepare` says the same."""

    def ways(self, shape: Shape) -> int:  # noqa: ARG002 - most have one
        """Kinds of rounds of one shape, each with captures of its own; a warm-up's take them in turn."""
        return 1

    def within_depth(self, context: Context) -> Context:
        """What is asked of it, of the levels that it drafts."""
        return context if self.most_tokens is None else replace(context, shape=context.shape.cut(self.most_tokens))

    def drafted_depth(self, shape: Shape) -> int:
        """Levels of `shape` that it drafts."""
        return shape.depth if self.most_tokens is None else min(shape.depth, self.most_tokens)


@runtime_checkable
class Trained(Protocol):
    """What has a training face, and so a distribution of its own."""

    def unroll(self, batch: Batch) -> Iterator[Step]:
        """The drafted slots of a batch."""
        ...


@runtime_checkable
class OnDevice(Protocol):
    """A drafter whose rounds are captured as a whole: a module, which holds all weights that it drafts with."""

    @property
    def runner(self) -> Runner:
        """Its cache in this call, and how the weights are packed."""
        ...


def shifted(ids: Tensor, places: int) -> Tensor:
    """ids (B, T) moved to the left; what comes in at the end belongs to slots that are not valid."""
    return ids.roll(-places, 1)


def judged(batch: Batch, ahead: int) -> tuple[Tensor, Tensor]:
    """(target rows, valid) (B, T) of slots t whose token t + ahead + 1 is drafted: the row before it, and whether it is
    a token of the same document that is to be learned."""
    batch_size, length = batch.ids.shape
    place = torch.arange(length, device=batch.ids.device) + ahead
    last = length - 2  # row and token of a slot whose own lie behind the end, which is not valid
    rows = torch.arange(batch_size, device=place.device)[:, None] * length + place.clamp(max=last)
    token = (place + 1).clamp(max=length - 1)
    same = (batch.document[:, token] == batch.document) & (batch.document >= 0)
    return rows, same & batch.loss_mask[:, token] & (place <= last)
