"""A draft language model: a small causal LM over the target's tokens that proposes chains and trees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from decode.common.progress import get_logger
from decode.config import ModelConfig, Precision
from decode.drafters.base import Batch, Context, Step
from decode.drafters.drafting import Above, DraftRound, Unit, pending_tokens, visible_slots
from decode.drafters.tree_drafting import propose
from decode.forward.attention import layer_masks, packed_visibility
from decode.forward.target import CachedModel, NodePass, runner_for
from decode.models.compatibility import attention_of, longest_context
from decode.models.load import load_model
from decode.models.output_head import head_of
from decode.trees.tree import Tree

log = get_logger("decode")


class LMDraft(nn.Module):
    """Both faces of the family `lm` on one transformers model of any architecture."""

    taps: tuple[int, ...] = ()

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.head = head_of(model)
        self._runner: CachedModel | None = None
        self._known: list[int] = []  # per row: committed tokens whose keys and values are in the cache
        self._ahead: list[int] = []  # per row: draft tokens behind them, read in round `_round`
        self._round = -1
        self._last_length = 0  # tokens at which a row is too long for the draft
        self._warned = False

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> LMDraft:
        """Random weights, drawn from torch's global generator."""
        return cls(AutoModelForCausalLM.from_config(config, attn_implementation=attention_of(config)))

    @classmethod
    def from_pretrained(
        cls, path: str | Path, dtype: Precision = "auto", revision: str | None = None, role: str = "draft"
    ) -> LMDraft:
        """A transformers folder or hub id, on the CPU, to be trained; raises InputError as
        `decode.models.load.load_model` does, which speaks of `role`."""
        source = ModelConfig(path=str(path), revision=revision, dtype=dtype, device="cpu")
        return cls(load_model(source, role).requires_grad_(True))

    @property
    def source(self) -> str:
        """Folder or hub id that it was loaded from."""
        return self.model.config.name_or_path or ""

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """Of its first weights."""
        return self.model.device

    # training face

    def unroll(self, batch: Batch) -> Iterator[Step]:
        """One step: row t drafts token t + 1 and is judged by p(. | ids[:t+1])."""
        hidden = self.hidden_states(batch)
        rows = torch.arange(batch.ids.numel(), device=batch.ids.device).view_as(batch.ids)
        yield Step(hidden, self.head, target_rows=rows, valid=batch.next_token_rows())

    def hidden_states(self, batch: Batch) -> Tensor:  # (B, T, d)
        """Final hidden states; documents of a packed row do not see each other."""
        visible = packed_visibility(batch.document)
        masks = layer_masks(self.model.config, visible, batch.positions, batch.positions, self.model.dtype)
        out = self.model.base_model(
            input_ids=batch.ids, attention_mask=masks, position_ids=batch.positions, use_cache=False
        )
        return out.last_hidden_state

    # decoding face

    def start(self, context: Context, capacity: int) -> None:
        """Read the prompts but for their last two tokens; captures are kept from one call to the next."""
        self._runner = None  # where memory ends, the last call's may be given up
        self._runner = runner_for(self.model, len(context.lengths), capacity, context.lease, "draft")
        self._known, self._ahead = [0] * len(context.lengths), [0] * len(context.lengths)
        self._catch_up(context.ids, [length - 2 for length in context.lengths])
        self._last_length = longest_context(self.model.config) or capacity
        wanted = capacity - context.shape.num_nodes
        if self._last_length < wanted and not self._warned:
            self._warned = True
            log.warning(
                "the draft knows contexts of %d tokens, and %d may be reached: nothing is drafted beyond",
                self._last_length, wanted,
            )  # fmt: skip

    @property
    def runner(self) -> CachedModel:
        """The draft's own cache, from `start` on."""
        assert self._runner is not None
        return self._runner

    def propose(self, context: Context) -> Tree:
        """A chain or a tree, drawn as the verifier wants it; nothing where every row is past the draft's context."""
        if min(context.of_running(context.lengths)) >= self._last_length:
            return Tree(pending_tokens(context), (-1,))
        self._count_accepted(context)
        # In a chain the last draft token is still unread after a round that accepted everything, and reading a token
        # again writes the same keys and values. Of a tree as many tokens are read as a verdict can have accepted,
        # always, so that one capture serves.
        width = 2 if context.drafts_chain else context.shape.depth + 1
        self._catch_up(context.ids, [length - width for length in context.lengths])
        tree = propose(lm_round(self.runner, context, width), context)
        if context.drafts_chain:
            self._ahead = [tree.num_nodes - 2] * len(context.lengths)  # the last draft token is not read
        self._known, self._round = list(context.lengths), context.round_index
        return tree

    def _count_accepted(self, context: Context) -> None:
        """Draft tokens read in the round just before count as read where they were accepted; after rounds without
        drafts nobody knows which tokens those were."""
        if context.round_index == self._round + 1:
            read = (known + ahead for known, ahead in zip(self._known, self._ahead, strict=True))
            self._known = [min(have, length - 1) for have, length in zip(read, context.lengths, strict=True)]
        self._ahead = [0] * len(context.lengths)

    def _catch_up(self, ids: Tensor, wanted: list[int]) -> None:
        """Read what rounds without drafts, trees and new rows have left unread."""
        behind = [max(known, want) for known, want in zip(self._known, wanted, strict=True)]
        self.runner.prefill(ids, self._known, behind)
        self._known = behind

    def reset(self, rows: list[int]) -> None:
        """These rows begin anew; what is not read again is not seen again."""
        for row in rows:
            self._known[row] = self._ahead[row] = 0


def lm_round(runner: CachedModel, context: Context, width: int) -> DraftRound:
    """One round of a draft LM whose cache holds all but the last `width` committed tokens.

    The first pass reads those, and of a row that has fewer all of them and whatever stands behind: the keys and values
    of that lie where nodes will be, and nobody sees them. So the pass is as wide whatever rows there are, ended ones
    among them. Nodes lie behind the committed tokens, pending among them, until the verdict.
    """
    reach = context.shape.num_read + 1  # slots behind the committed tokens that passes look at
    visible = visible_slots(runner, context, reach)
    ends = torch.tensor(context.lengths, device=context.ids.device)[:, None]
    places = (ends - width).clamp(min=0) + torch.arange(width, device=ends.device)
    read = context.ids.gather(1, places)

    def unit() -> Unit:
        node_pass = runner.node_pass(visible)
        return Unit(lambda read, ends: LMSteps(CapturedPasses(node_pass, ends), read, ends), node_pass)

    return DraftRound(
        runner,
        (width, visible),
        (read, ends),
        moved=lambda: (runner.other(read), (ends + 1).clamp(max=visible - reach)),
        unit=unit,
        steps=lambda: LMSteps(PassByPass(runner, context.lengths), read, ends),
    )


@dataclass(frozen=True)
class LMSteps:
    """A round over passes of either kind."""

    passes: CapturedPasses | PassByPass
    read: Tensor
    """(B, width) the last committed tokens."""
    ends: Tensor
    """(B, 1) number of committed tokens."""

    def first(self) -> Tensor:
        """Of the pass over `read`, what is at the last committed token."""
        width = self.read.shape[1]
        logits = self.passes.chain(self.read, -width)
        rows = torch.arange(len(logits), device=logits.device)
        begin = (self.ends - width).clamp(min=0)
        return logits[rows, (self.ends - 1 - begin)[:, 0]][:, None]

    def step(self, tokens: Tensor, depth: int, above: Above | None = None) -> Tensor:
        """A pass over these nodes."""
        if above is None:
            return self.passes.chain(tokens, depth - 1)
        return self.passes.nodes(tokens, depth - 1, above.visible)


@dataclass(frozen=True)
class CapturedPasses:
    """Passes inside a unit that is captured as a whole; `place` counts from the first slot behind committed tokens."""

    node_pass: NodePass
    ends: Tensor

    def chain(self, tokens: Tensor, place: int) -> Tensor:
        """(B, W, V) of tokens (B, W) that follow one another."""
        begin = self.ends + place
        return self.node_pass.chain(tokens, begin.clamp(min=0) if place < 0 else begin)[0]

    def nodes(self, tokens: Tensor, place: int, visible: Tensor) -> Tensor:
        """(B, W, V) of the last W of M nodes, tokens (B, W), visible (1 or B, W, M)."""
        depths = torch.full_like(tokens, place)
        return self.node_pass(tokens, self.ends, depths, visible.expand(len(tokens), -1, -1))[0]


@dataclass(frozen=True)
class PassByPass:
    """The same passes, each captured by itself, where something looks in between."""

    runner: CachedModel
    lengths: list[int]

    def chain(self, tokens: Tensor, place: int) -> Tensor:
        """(B, W, V) of tokens (B, W) that follow one another."""
        return self.runner.chain(tokens, [max(0, length + place) for length in self.lengths])

    def nodes(self, tokens: Tensor, place: int, visible: Tensor) -> Tensor:
        """(B, W, V) of the last W of M nodes, tokens (B, W), visible (1 or B, W, M)."""
        depths = torch.full((1, tokens.shape[1]), place, device=tokens.device)
        return self.runner.forward(tokens, self.lengths, depths, visible)
