"""Drafts that are heads on the target's hidden states: as wide as the target, between its own frozen ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from decode.common.progress import get_logger
from decode.common.typed_config import require
from decode.drafters.base import Batch
from decode.drafters.dspark import DSparkDraft
from decode.drafters.head_config import HeadConfig
from decode.drafters.head_draft import HeadDraft
from decode.drafters.mtp import own_mtp
from decode.drafters.saved_draft import head_in
from decode.drafters.saved_head import HEADS, empty_head, expected
from decode.forward.window import Window
from decode.models.describe import ModelDescription
from decode.models.head_targets import check_taps
from decode.models.hidden_states import FINAL
from decode.models.output_head import Ends
from train.config import TrainConfig
from train.drafts.adapters import merged, num_trained, with_adapters
from train.drafts.begun_head import is_published, saved_head
from train.drafts.blueprint import Blueprint, TrainableDraft, asked_window
from train.drafts.confidence import calibrated
from train.drafts.draft_config import AdapterConfig, DraftConfig
from train.drafts.rope import rope_of
from train.export.draft_folder import Export, export_head
from train.export.loadable import foreseen

if TYPE_CHECKING:
    from peft import PeftModel

log = get_logger("train")


class TrainableHead(TrainableDraft):
    """A head of any family."""

    def __init__(self, head: HeadDraft, adapters: PeftModel | None = None, base: Path | None = None) -> None:
        """`adapters` are those in it, where it is trained through them, and `base` is the folder that it came from."""
        super().__init__(head)
        self.head, self.adapters, self.base = head, adapters, base

    def token_tables(self) -> list[nn.Parameter]:
        """With what adds to the target's logits, and output heads of its own, over its vocabulary or a reduced one; by
        name, since a layer may be as wide as a vocabulary."""
        tables = ("markov_out", "lm_head", "lm_heads")
        added = [child for name, child in self.head.named_modules() if name in tables]
        return [*super().token_tables(), *(weight for child in added for weight in child.parameters())]

    def calibrate(self, validation: Iterable[Batch], chunk_rows: int) -> dict[str, float]:
        """The temperatures of a head that predicts its own acceptance."""
        head = self.head
        if not head.foresees:
            return {}
        head.config, measured = calibrated(cast(DSparkDraft, head), validation, chunk_rows)
        return measured

    def recompute(self) -> None:
        self.head.recomputes = True

    def export(self, folder: Path, export: Export) -> None:
        head = self.head
        if self.adapters is not None:
            head = merged(self.adapters, folder.parent / "adapter", str(self.base))
        export_head(head, folder, export)


@dataclass(frozen=True)
class HeadBlueprint(Blueprint):
    """A head of any family."""

    config: HeadConfig
    target: ModelDescription
    source: Path | None = None
    """Folder of a saved head."""
    own: dict[str, Tensor] | None = None
    """Weights of the target's own layer, to start from."""
    vocab: Tensor | None = None
    """(V_draft,) ascending target ids of a new head's reduced draft vocabulary, from `with_vocab`."""
    lora: AdapterConfig = field(default_factory=AdapterConfig)
    """Adapters that a saved head is trained through."""

    @property
    def engines(self) -> list[str]:
        family = next(name for name, (shape, _) in HEADS.items() if shape is type(self.config))
        return foreseen(family, self.config, self.target)

    @property
    def num_parameters(self) -> int:
        """The target's ends are not among them."""
        return sum(prod(shape) for name, shape in expected(self.config).items() if name != "vocab")

    @property
    def num_trained(self) -> int:
        """With adapters, theirs."""
        return num_trained(empty_head(self.config), self.lora) if self.lora.rank else self.num_parameters

    @property
    def weights_per_token(self) -> int:
        """With the rows of the target's output head that it drafts from. What runs once a round is shared by its
        tokens."""
        config = self.config
        own = self.num_parameters if config.is_recursive else -(-self.num_parameters // config.depth)
        drafted = config.draft_vocab_size or config.vocab_size
        return own + (0 if config.has_own_head else drafted * config.hidden_size)

    @property
    def width(self) -> int:
        return self.config.hidden_size

    @property
    def muon_lr(self) -> float:
        return self.config.muon_lr or super().muon_lr

    @property
    def max_positions(self) -> int:
        return self.config.max_positions

    @property
    def attends(self) -> Window | None:
        return self.config.attends

    @property
    def layers_read(self) -> tuple[int, ...]:
        return self.config.taps

    @property
    def depth(self) -> int | None:
        return self.config.round_depth

    @property
    def wants_vocab(self) -> int | None:
        return self.config.draft_vocab_size if self.source is None else None

    def with_vocab(self, vocab: Tensor) -> HeadBlueprint:
        return replace(self, vocab=vocab)

    def build(self, ends: Ends | None) -> TrainableHead:
        """Between the target's `ends`, which it refers to and does not own."""
        assert ends is not None, "a head is built between its target's ends"
        if self.source is not None:
            saved = head_in(self.source, ends, self.target, check=is_published(self.source)).float()
            saved.config = self.config  # where a setting of which no weight is made took the place of its own
            adapters = with_adapters(saved, self.lora) if self.lora.rank else None
            return TrainableHead(saved, adapters, self.source)
        config = self.config.between(ends, self.target.path)
        head = HEADS[config.family][1](config, ends, self.vocab)
        if self.own is not None:
            head.load_state_dict(self.own | ({} if self.vocab is None else {"vocab": self.vocab}))
        return TrainableHead(head)


def head_blueprint(
    cfg: TrainConfig, target: ModelDescription | None, tokenizer: PreTrainedTokenizerBase | None
) -> HeadBlueprint:
    """A head of the target's own sizes where none are configured, or the saved head of `init_from`.

    Raises InputError for a target that heads do not know, for hidden states that it does not have and for a saved head
    that is another one's; ConfigError where the family's own choice of hidden states does not fit the target.
    """
    assert target is not None, "checked by TrainConfig"
    require(
        cfg.sequence_length >= cfg.draft.head.depth + 2,
        f"sequence_length={cfg.sequence_length} has no room for a token, the one after it and the "
        f"draft.head.depth={cfg.draft.head.depth} drafted ones. Use a longer sequence_length, or a smaller depth",
    )
    text = target.config.get_text_config()
    check_taps(target.config, (FINAL,), target.path)
    draft = cfg.draft
    if draft.init_from is not None:
        config, folder = saved_head(cfg, target)
        changed = {"anchors": _anchors(cfg)} | _window(cfg, config.max_positions)
        return HeadBlueprint(replace(config, **_known(type(config), changed)), target, folder, lora=draft.lora)
    taps = tuple(draft.head.taps) if draft.head.taps else default_taps(draft.family, target.num_layers, target.path)
    check_taps(target.config, taps, target.path)
    if draft.head.init_own:
        sizes = {name: getattr(draft, name) for name in ("heads", "kv_heads", "mlp_width", "max_positions")}
        given = {name: value for name, value in sizes.items() if value is not None}
        require(not given, f"draft.head.init_own=true takes the target's own layer as it is; leave {given} out")
        config, weights = own_mtp(target, draft.head.depth)
        return HeadBlueprint(replace(config, draft_vocab_size=draft.head.vocab), target, own=weights)
    kind, asked = HEADS[draft.family][0], draft.head_shape
    given = asked | _sizes(draft, target, text) | {"family": draft.family, "taps": taps, "anchors": _anchors(cfg)}
    given |= _window(cfg, given["max_positions"]) | kind.settled(asked, target)
    if cfg.objective.confidence_weight == 0:  # what was never trained must not cut drafts
        given["confidence"] = False
    config = kind(**_known(kind, given))
    config.refuse_target(target)
    return HeadBlueprint(config, target)


def _known(kind: type[HeadConfig], given: dict[str, Any]) -> dict[str, Any]:
    """Those that are fields of this family's configuration."""
    return {field.name: given[field.name] for field in fields(kind) if field.name in given}


def default_taps(family: str, num_layers: int, path: str) -> tuple[int, ...]:
    """The hidden states that a family reads of a target with so many layers, ascending; ConfigError where they are not
    different ones."""
    taps = HEADS[family][0].default_taps(num_layers)
    require(
        taps == (FINAL,) or (taps[0] >= 0 and list(taps) == sorted(set(taps)) and taps[-1] < num_layers),
        f"draft={family} reads {len(taps)} different hidden states, and target.path={path} has {num_layers} layers: "
        f"{list(taps)}. Name them, as draft.head.taps=[0,1,-1], or use draft=medusa, which reads the final one",
    )
    return taps


TOKENS_PER_ANCHOR = 8
"""Of a row (DSpark and DFlash: 512 anchors in 4,096 tokens)."""


def _sizes(draft: DraftConfig, target: ModelDescription, text: PretrainedConfig) -> dict[str, Any]:
    """Fields of a head's configuration that are the target's own unless set. A head whose dynamic rotary positions
    go by another length could not be exported."""
    heads = draft.heads or text.num_attention_heads
    kv_heads = draft.kv_heads or getattr(text, "num_key_value_heads", None) or heads
    require(heads % kv_heads == 0, f"draft.heads={heads} is not a multiple of draft.kv_heads={kv_heads}")
    rope, longest = rope_of(target, same_head_dim=True), draft.max_positions or target.max_positions
    require(
        rope["rope_type"] != "dynamic" or longest == target.max_positions,
        f"draft.max_positions={longest}, and the target's rotary positions are dynamic: engines turn them by its "
        f"context of {target.max_positions} tokens. Leave draft.max_positions out",
    )
    return {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft.head.vocab,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": getattr(text, "head_dim", None) or target.hidden_size // text.num_attention_heads,
        "mlp_width": draft.mlp_width or getattr(text, "intermediate_size", None) or 4 * target.hidden_size,
        "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
        "rope": rope,
        "max_positions": longest,
    }


def _window(cfg: TrainConfig, context: int) -> dict[str, Any]:
    """Fields of a head's configuration; of a saved head, which has its own, nothing where none is asked for."""
    window = asked_window(cfg, context)
    return {} if window is None else window.written()


def _anchors(cfg: TrainConfig) -> int:
    return cfg.draft.head.anchors or -(-cfg.sequence_length // TOKENS_PER_ANCHOR)
