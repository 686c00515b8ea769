"""A draft language model: a small causal LM over the target's tokens that proposes chains and trees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from decode.common.progress import get_logger
from decode.config import ModelConfig, Precision
from decode.drafters.base import Batch, Context, Drafter, Step
from decode.drafters.drafting import Steps, places_behind, visible_slots
from decode.drafters.lm_steps import LMSteps, Passes, lm_round
from decode.drafters.tree_drafting import propose
from decode.forward.attention import layer_masks, packed_visibility
from decode.forward.runner import whole
from decode.forward.target import CachedModel, runner_for
from decode.forward.window import Window, own_window
from decode.models.compatibility import attention_of, longest_context, rotates
from decode.models.few_rows import FewRows, own_vocab
from decode.models.load import load_model
from decode.models.output_head import head_of
from decode.models.structure import decoder_of
from decode.trees.tree import Tree

log = get_logger("decode")


class LMDraft(nn.Module, Drafter):
    """Both faces of the family `lm` on one transformers model of any architecture."""

    family = "lm"
    on_host = False
    vocab: Tensor | None
    """(V_draft,) of a reduced vocabulary, ascending, while it is trained; what is loaded has a head of those rows."""

    def __init__(self, model: PreTrainedModel, tokens: int | None = None) -> None:
        """It drafts the first `tokens` ids, where rows behind them were cut or added; None is all."""
        super().__init__()
        self.model, self.tokens = model, tokens
        self.head = head_of(model)
        knows = isinstance(model.get_output_embeddings(), FewRows)  # which tokens are drafted
        vocab = None if knows else own_vocab(model.config)
        self.register_buffer("vocab", vocab, persistent=False)
        self._runner: CachedModel | None = None
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
    def window(self) -> Window | None:
        """That it was trained with here, which only our own passes heed."""
        return own_window(self.model.config)

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
        hidden = self.hidden_states(batch).to(batch.ids.device)  # the last layer of a spread model lies elsewhere
        rows = torch.arange(batch.ids.numel(), device=batch.ids.device).view_as(batch.ids)
        head, weights = self.drafting_head()
        yield Step(hidden, head, rows, batch.next_token_rows(), self.vocab, head_weights=weights)

    def drafting_head(self) -> tuple[Callable[[Tensor], Tensor], tuple[Tensor, ...] | None]:
        """hidden (..., d) -> logits (..., V), or (..., V_draft) of a reduced vocabulary, by rows that are looked up
        once a batch; where an engine has spread them over processes, by all of them. And `Step.head_weights`."""
        if self.vocab is None:
            return self.head, tuple(self.head.module.parameters())
        vocab, weight = self.vocab, self.head.weight
        if type(weight) not in (Tensor, nn.Parameter) or len(weight) != self.model.config.get_text_config().vocab_size:
            return lambda hidden: self.head(hidden).index_select(-1, vocab), None
        rows = weight[vocab]
        return lambda hidden: self.head.of_rows(hidden, rows), (rows,)

    def hidden_states(self, batch: Batch) -> Tensor:  # (B, T, d)
        """Final hidden states; documents of a packed row do not see each other."""
        visible = packed_visibility(batch.document)
        masks = layer_masks(self.model.config, visible, batch.positions, batch.positions, self.model.dtype)
        out = decoder_of(self.model)(
            input_ids=batch.ids, attention_mask=masks, position_ids=batch.positions, use_cache=False
        )
        return out.last_hidden_state

    # decoding face

    def start(self, context: Context, capacity: int) -> None:
        """Captures are kept from one call to the next."""
        self._runner = None  # where memory ends, the last call's may be given up
        self._runner = runner_for(self.model, len(context.lengths), capacity, context.lease, "draft")
        self.runner.unread = 2
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

    def read(self, context: Context, lengths: Mapping[int, int]) -> None:
        """Prompts but for their last two tokens."""
        ends = [max(0, lengths.get(row, 0) - 2) for row in range(len(context.lengths))]
        self.runner.prefill(context.ids, [0] * len(ends), [min(end, self._last_length) for end in ends])

    def prepare(self, context: Context) -> tuple[int, int] | None:
        """Read what the round's first pass will not; nothing is drafted where every row is past the draft's context, or
        any row where positions are looked up in a table."""
        reaches = context.shortest if rotates(self.model.config) else context.longest + context.shape.num_nodes
        if reaches >= self._last_length:
            return None
        width = self.width(context)
        with self.runner.passes(), whole():  # of a width that comes once: captured, it would stop a call for nothing
            for places in places_behind(context, width, self.runner.unread + context.plain_rounds - width):
                last_start = max(0, context.longest - places.shape[1])
                self.runner.chain(context.ids.gather(1, places), places[:, :1], last_start)
        self.runner.unread = width
        return width, visible_slots(self.runner, context, self.reach(context))

    def propose(self, context: Context) -> Tree:
        made = lm_round(self.runner, context, self.width(context), make=self.steps(context), reach=self.reach(context))
        return propose(made, context)

    def steps(self, context: Context) -> Callable[[Passes, Tensor, Tensor], Steps]:
        """What makes the steps of a round (`lm_round`)."""
        return partial(LMSteps, tokens=self.tokens)

    def width(self, context: Context) -> int:
        """Committed tokens that a round's first pass reads.

        In a chain the last draft token is still unread after a round that accepted everything, and reading a token
        again writes the same keys and values. Of a tree as many tokens are read as a verdict can have accepted, always,
        so that one capture serves.
        """
        return 2 if context.drafts_chain else context.shape.depth + 1

    def reach(self, context: Context) -> int:
        """Slots behind the committed tokens that its passes look at."""
        return context.shape.num_read + 1
