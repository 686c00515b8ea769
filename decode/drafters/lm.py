"""A draft language model: a small causal LM over the target's tokens that proposes a chain, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from decode.capture import CapturedModel
from decode.drafters.base import Batch, Context, Step
from decode.head import head_of
from decode.masks import layer_masks, packed_visibility
from decode.noise import Stream
from decode.sampling import warp
from decode.target import PREFILL_CHUNK
from decode.tree import Tree, chain_parents
from decode.verify import Verdict


class LMDraft(nn.Module):
    """Both faces of the family `lm` on one transformers model of any architecture."""

    taps: tuple[int, ...] = ()

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.head = head_of(model)
        self._runner: CapturedModel | None = None

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> LMDraft:
        """Random weights, drawn from torch's global generator."""
        return cls(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"))

    @classmethod
    def from_pretrained(cls, path: str | Path, dtype: torch.dtype | str = "auto") -> LMDraft:
        """A transformers folder or hub id."""
        return cls(AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa"))

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
        """Read the prompts up to, without, pending. Captures are kept from one call to the next."""
        runner = self.runner(len(context.lengths), capacity)
        lengths = [length - 1 for length in context.lengths]
        if max(lengths) > 0:
            runner.prefill(context.ids, lengths, PREFILL_CHUNK)

    def runner(self, batch_size: int, capacity: int) -> CapturedModel:
        """The cached model for this many rows of this many tokens."""
        if self._runner is None or not self._runner.fits(batch_size, capacity):
            self._runner = CapturedModel(self.model, batch_size, capacity)
        return self._runner

    def propose(self, context: Context) -> Tree:
        """Draw k tokens from the warped q, with the verdict's own noise where the rule shares it.

        The first pass reads the last two committed tokens: after a round that accepted everything the last draft
        token has not been read yet, and reading a token again writes the same keys and values.
        """
        assert self._runner is not None
        ends = torch.tensor(context.lengths, device=context.ids.device)[:, None]
        width = 2 if min(context.lengths) > 1 else 1
        positions = ends - torch.arange(width, 0, -1, device=context.ids.device)
        read = context.ids.gather(1, positions)
        tokens, laws = [read[:, -1:]], []
        for i in range(context.num_draft_tokens):
            logits = self._runner.forward(read, positions)[:, -1]
            read, law = draw(warp(logits, context.sampling), context, i)
            positions = ends + i
            tokens.append(read)
            laws.append(law)
        chain = chain_parents(len(tokens))
        if context.shares_noise:
            return Tree(torch.cat(tokens, 1), chain)
        laws.append(laws[-1])  # row k has no children; a law is there so that the tensor has a row per node
        return Tree(torch.cat(tokens, 1), chain, "iid", torch.stack(laws, 1))

    def commit(self, verdict: Verdict, features: Tensor | None) -> None:
        """Nothing to do: rejected tokens become invisible, and `propose` re-reads the last two."""

    def reset(self, rows: list[int]) -> None:
        """Nothing to do: what is not read again is not seen again."""


def draw(scores: Tensor, context: Context, depth: int) -> tuple[Tensor, Tensor]:
    """One token per row (B, 1) from warped scores (B, V), and the log of the very law it was drawn from (B, V)."""
    if context.shares_noise:
        noisy = scores if context.gumbel is None else scores + context.gumbel[:, depth]
        return noisy.argmax(-1, keepdim=True), scores
    if context.sampling.is_greedy:
        best = scores.argmax(-1, keepdim=True)
        return best, torch.full_like(scores, -torch.inf).scatter_(-1, best, 0.0)
    log_q = scores.log_softmax(-1)
    positions = [[length + depth] for length in context.lengths]
    gumbel = context.noise.fresh_gumbel(Stream.DRAFT, positions, context.round_index)
    return (log_q + gumbel[:, 0]).argmax(-1, keepdim=True), log_q
