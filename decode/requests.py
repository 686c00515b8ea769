"""What a call asks for, and what it hears of while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from decode.common.errors import InputError
from decode.models.compatibility import longest_context
from decode.rounds.rows import RequestState
from decode.sampling.stopping import Criteria, StopStrings
from decode.sampling.warp import Sampling
from decode.trees.tree import Drawn
from decode.trees.tree_plans import Shape, chain
from decode.verify import VERIFIERS

if TYPE_CHECKING:
    from decode.conversation import Conversation


@dataclass(frozen=True)
class Endings:
    """Who is told of each text as it ends, and what of."""

    take: Callable[[int, RequestState, Tensor | None], None]
    """Index of the request, the text, and the target's hidden states (L, n, d) of all its tokens at `layers`, None
    without any."""
    layers: tuple[int, ...] = ()
    """As in `decode.models.hidden_states`."""


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
    endings: Endings | None = None
    overlap: bool = False
    """The next round is drafted while the target verifies this one."""
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


def drawn(request: Request) -> Drawn:
    """How the rule wants children drawn. `SamplingConfig` has refused what is not exact, by name."""
    drawn = VERIFIERS[request.verifier].drawn(request.shape, request.replacement)
    assert drawn is not None, (request.verifier, request.shape, request.replacement)
    assert request.verifier != "greedy" or request.sampling.is_greedy, request.sampling
    assert not request.strict or request.shape.is_chain, request.shape
    assert not request.confidence or (request.adaptive and request.shape.is_chain), request.shape
    return drawn


def check_context(model: PreTrainedModel, lengths: list[int], max_new_tokens: int) -> None:
    if min(lengths) < 1:
        raise InputError("a prompt is empty; decoding starts from at least one token (a BOS or newline token, say)")
    limit = longest_context(model.config)
    if limit is not None:
        check_fits(max(lengths), max_new_tokens, limit, "max_new_tokens")


def check_fits(prompt_tokens: int, new_tokens: int, context: int, where: str) -> None:
    """Raise InputError where prompt and completion do not fit the model's context, past which positions are
    undefined."""
    together = prompt_tokens + new_tokens
    if together > context:
        raise InputError(
            f"the longest prompt has {prompt_tokens} tokens and {where}={new_tokens}, together {together}, but the "
            f"model's context is {context} tokens. Shorten the prompt or lower {where}"
        )
