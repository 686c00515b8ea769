"""Drafts that are language models of their own: a small Llama, or any pretrained model with the target's tokens."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from decode.common.typed_config import require
from decode.config import ModelConfig
from decode.drafters.base import Batch
from decode.drafters.lm import LMDraft
from decode.drafters.pard import Masks, PardDraft, lm_draft, masks_in, set_masks
from decode.forward.window import Window, own_window, set_window
from decode.models.compatibility import longest_context
from decode.models.describe import ModelDescription, describe_model
from decode.models.few_rows import own_vocab, set_vocab, why_not_few
from decode.models.mask_token import usual_mask
from decode.models.output_head import Ends
from decode.models.padded_rows import with_rows
from decode.models.same_tokens import check_same_tokens, tokens_padded_otherwise
from decode.models.structure import layers_of
from decode.models.weight_counts import WeightCounts, count_weights, empty_model
from train.config import TrainConfig
from train.drafts.adapters import merged, num_trained, require_peft, with_adapters
from train.drafts.blueprint import Blueprint, TrainableDraft, asked_window
from train.drafts.draft_config import DraftConfig
from train.drafts.pruning.kept_parts import without_parts
from train.drafts.pruning.lasting_zeros import fix_zeros, has_zeros, put_zeros, zero_share
from train.drafts.pruning.pruned_shape import pruned_config
from train.drafts.rope import rope_of
from train.export.draft_folder import Export, export_lm

if TYPE_CHECKING:
    from peft import PeftModel

TASK = "CAUSAL_LM"
"""As peft calls what a language model does."""


class TrainableLM(TrainableDraft):
    """A draft model, and the adapters inside it where it is trained through those."""

    def __init__(self, module: LMDraft, adapters: PeftModel | None = None) -> None:
        super().__init__(module)
        self.model, self.adapters, self.base = module.model, adapters, module.source

    def token_tables(self) -> list[nn.Parameter]:
        head = self.model.get_output_embeddings()
        return [*super().token_tables(), *([] if head is None else head.parameters())]

    def blocks(self) -> list[nn.Module]:
        return layers_of(self.model)

    def calibrate(self, validation: Iterable[Batch], chunk_rows: int) -> dict[str, float]:
        """Nothing is fitted; the zeros that a pruned one holds are counted."""
        return {"zero_share": zero_share(self.model)} if has_zeros(self.model) else {}

    def recompute(self) -> None:
        require(
            self.model.supports_gradient_checkpointing,
            f"engine.recompute=true makes the activations of layers again, and transformers cannot for "
            f"{type(self.model).__name__}. Leave it out",
        )
        self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def export(self, folder: Path, export: Export) -> None:
        """A transformers folder; adapters are kept beside it in peft's format, and merged in it. Zeros are plain
        weights there."""
        model: Any = self.model
        fix_zeros(model)
        if self.adapters is not None:
            model = merged(self.adapters, folder.parent / "adapter", self.base)
        export_lm(model, folder, export)


@dataclass(frozen=True)
class LMBlueprint(Blueprint):
    """A transformers model: pretrained where `draft.init_from` names one."""

    draft: DraftConfig
    config: PretrainedConfig
    whole: PretrainedConfig | None = None
    """Of the model that is pruned to `config`; None where none is."""
    tokens: int | None = None
    """That `init_from` and the target both know, where it has rows to cut or to add; else None."""
    wants_vocab: int | None = None
    """`with_vocab` puts the tokens chosen into the configuration."""

    @cached_property
    def counts(self) -> WeightCounts:
        """Parameters, and those that a token costs."""
        return count_weights(self.config)

    @property
    def num_parameters(self) -> int:
        return self.counts.total

    @property
    def num_trained(self) -> int:
        """Of a draft with adapters, theirs."""
        if self.draft.lora.rank == 0:
            return self.num_parameters
        return num_trained(empty_model(self.config), self.draft.lora, TASK)

    @property
    def weights_per_token(self) -> int:
        few, text = self.drafts_few, self.config.get_text_config()
        left_out = 0 if few is None else (text.vocab_size - few) * text.hidden_size
        return -(-(self.counts.per_token - left_out) // (self.depth or 1))

    @property
    def depth(self) -> int | None:
        """Of one that drafts them in one pass."""
        masks = masks_in(self.config)
        return None if masks is None else masks.depth

    @property
    def drafts_few(self) -> int | None:
        vocab = own_vocab(self.config)
        return self.wants_vocab if vocab is None else len(vocab)

    @property
    def made_from(self) -> str | None:
        if self.whole is None:
            return None
        before = f"{self.draft.init_from} of {count_weights(self.whole).total:,} parameters"
        return f"{before}, pruned to {self.num_parameters:,} ({self.draft.pruning})"

    @property
    def width(self) -> int:
        return self.config.get_text_config().hidden_size

    @property
    def max_positions(self) -> int:
        return longest_context(self.config) or 1 << 30

    @property
    def attends(self) -> Window | None:
        return own_window(self.config)

    def with_vocab(self, vocab: Tensor) -> LMBlueprint:
        config = deepcopy(self.config)
        set_vocab(config, vocab)
        return replace(self, config=config)

    def build(self, ends: Ends | None = None) -> TrainableLM:
        """With adapters or pruned where that is asked for; it has ends of its own."""
        source, lora, pruning = self.draft.init_from, self.draft.lora, self.draft.pruning
        if source is None:
            return TrainableLM(self._drafting(LMDraft.from_config(self.config).model))
        module = LMDraft.from_pretrained(source, "float32", self.draft.revision, role="draft.init_from")
        if self.tokens is not None:
            with_rows(module.model, self.config.get_text_config().vocab_size, self.tokens)
        if self.attends is not None:  # the setting's, in place of the saved one
            set_window(module.model.config, self.attends)
        model = module.model
        if lora.rank:
            return TrainableLM(self._drafting(model), with_adapters(model, lora, TASK))
        if pruning.is_structured:
            model = without_parts(model, self.config)
        if pruning.sparsity is not None:
            put_zeros(model, pruning)
        return TrainableLM(self._drafting(model))

    def _drafting(self, model: PreTrainedModel) -> LMDraft:
        """The draft of this model, one by one or in one pass as the configuration says."""
        masks = masks_in(self.config)
        if masks is not None:
            set_masks(model.config, masks)
        vocab = own_vocab(self.config)
        if vocab is not None:
            set_vocab(model.config, vocab)
        draft = lm_draft(model)
        if isinstance(draft, PardDraft):
            draft.anchors = self.draft.parallel.anchors
        return draft


def lm_blueprint(
    cfg: TrainConfig, target: ModelDescription | None, tokenizer: PreTrainedTokenizerBase | None
) -> LMBlueprint:
    """A Llama of the configured size over the target's (or the tokenizer's) tokens, or the model of `init_from`, which
    must have the target's tokens and gets as many rows."""
    draft = cfg.draft
    require_peft(draft.lora)
    if draft.init_from is not None:
        source = ModelConfig(path=draft.init_from, revision=draft.revision)
        pretrained = describe_model(source, role="draft.init_from")
        tokens = None
        if target is not None:
            check_same_tokens(target, pretrained)
            tokens = tokens_padded_otherwise(target, pretrained)
            pretrained.config.get_text_config().vocab_size = target.vocab_size
        _set_window(cfg, pretrained.config)
        _set_masks(cfg, pretrained.config, target)
        few = _wanted_vocab(draft, target, pretrained.config)
        if not draft.pruning.is_asked:
            return LMBlueprint(draft, pretrained.config, tokens=tokens, wants_vocab=few)
        pruned = pruned_config(pretrained.config, draft.pruning, draft.init_from)
        return LMBlueprint(draft, pruned, pretrained.config, tokens, few)
    owner: Any = target.config.get_text_config() if target else tokenizer
    assert owner is not None, "a model without a target needs a tokenizer"
    special: dict[str, Any] = {
        name: getattr(owner, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    longest = draft.max_positions or (target.max_positions if target else cfg.sequence_length)
    width, heads = draft.lm_sizes(target.hidden_size if target else None)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=draft.mlp_width or -(-width * 8 // 3 // 64) * 64,
        num_hidden_layers=draft.layers,
        num_attention_heads=heads,
        num_key_value_heads=draft.kv_heads or heads,
        head_dim=width // heads,
        max_position_embeddings=longest,
        tie_word_embeddings=draft.tie_embeddings,
        rope_parameters=rope_of(target),
        vocab_size=target.vocab_size if target else len(owner),
        **special,
    )
    _set_window(cfg, config)
    _set_masks(cfg, config, target)
    return LMBlueprint(draft, config, wants_vocab=_wanted_vocab(draft, target, config))


def _wanted_vocab(draft: DraftConfig, target: ModelDescription | None, config: PretrainedConfig) -> int | None:
    """Entries of a draft vocabulary that is yet to be chosen; that of `init_from` stays. ConfigError for what cannot
    be had."""
    asked, own = draft.head.vocab, own_vocab(config)
    if asked is None:
        return None
    require(
        target is not None,
        f"draft.head.vocab={asked} drafts the tokens that a target's texts hold most, and there is no target. Leave it "
        "out",
    )
    if own is not None:
        require(
            asked == len(own),
            f"draft.head.vocab={asked}, and the draft {draft.init_from} has {len(own)}, which stay as they are. Leave "
            "draft.head.vocab out, or train a new draft without draft.init_from",
        )
        return None
    why = why_not_few(config, empty_model(config).get_output_embeddings())
    require(
        why is None, f"draft.head.vocab={asked} drafts some tokens alone, and {draft.init_from} {why}. Leave it out"
    )
    return asked


def _set_window(cfg: TrainConfig, config: PretrainedConfig) -> None:
    window = asked_window(cfg, longest_context(config) or 1 << 30)
    if window is not None:
        set_window(config, window)


def _set_masks(cfg: TrainConfig, config: PretrainedConfig, target: ModelDescription | None) -> None:
    """As asked; what `init_from` has of them stays where nothing is."""
    asked, own = cfg.draft.parallel, masks_in(config, cfg.draft.init_from or "")
    if asked.tokens:
        token = asked.mask_token
        if token is None:
            token = own.token if own is not None else None if target is None else usual_mask(target)
        require(
            token is not None and token < config.get_text_config().vocab_size,
            f"draft.parallel.mask_token={token} is to stand where tokens are drafted, and the draft has the tokens 0 "
            f"to {config.get_text_config().vocab_size - 1}. Give the id of one that no text holds",
        )
        own = Masks(cast(int, token), asked.tokens)
        set_masks(config, own)
    if own is None:
        return
    require(
        own.depth is not None,
        f"draft.init_from={cfg.draft.init_from} drafts in one pass, and does not say how many tokens. Give "
        "draft.parallel.tokens",
    )
    require(
        cfg.sequence_length >= cast(int, own.depth) + 2,
        f"sequence_length={cfg.sequence_length} has no room for a token and the {own.depth} that a pass drafts behind "
        "it. Use a longer sequence_length, or a smaller draft.parallel.tokens",
    )
