"""An adapter for `early_exit`: a small MLP behind the target's first layers, which learns what the layers above would
add to the hidden state before the target's own last norm and output head. The layers stay as they are, and so does the
cache that drafts and verdicts share (self-speculative decoding with a trained exit: Zhang et al. 2024, Kangaroo,
arXiv:2404.18911, whose adapter has attention and a cache of its own)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from decode.common.typed_config import require
from decode.drafters.base import Batch, Context, Step, judged
from decode.drafters.head_config import HeadConfig
from decode.drafters.head_draft import HeadDraft
from decode.drafters.untrained.early_exit import EarlyExitDrafter, refuse_exit
from decode.forward.resume import refuse_inseparable
from decode.models.describe import ModelDescription
from decode.models.output_head import Ends
from decode.models.small import random_like
from decode.models.structure import last_norm_of, layers_of
from decode.trees.tree import Tree


@dataclass(frozen=True, kw_only=True)
class ExitAdapterConfig(HeadConfig):
    """Shape of an adapter; its one tap is the layer that it leaves behind. Attention's fields are of no use here."""

    family: str = "exit_adapter"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            len(self.taps) == 1 and self.taps[0] >= 1,
            f"exit_adapter stands behind one of the target's layers, and taps={list(self.taps)} name none: give "
            "draft.head.taps=[2] to leave behind the second, say",
        )
        require(
            self.draft_vocab_size is None,
            f"exit_adapter drafts with the target's own output head, all of it, and draft.head.vocab="
            f"{self.draft_vocab_size} is less; leave it out",
        )

    @property
    def round_depth(self) -> int | None:
        return None

    @classmethod
    def settled(cls, asked: Mapping[str, Any], target: ModelDescription) -> dict[str, Any]:
        """Training unrolls one token, and its MLP has no gate."""
        return {"depth": 1, "mlp_width": asked["mlp_width"] or target.hidden_size}

    @property
    def exit_layer(self) -> int:
        """Layers of the target that draft."""
        return self.taps[0]

    def refuse_target(self, target: ModelDescription) -> None:
        """InputError where no layer would be left to the verdict, or where passes of such a model cannot be parted."""
        refuse_exit(self.exit_layer, target.num_layers, target.path)
        like = random_like(target.config)
        refuse_inseparable(like, layers_of(like), 1)


class ResidualMLP(nn.Module):
    """x + W2 SiLU(W1 norm(x)). Starts as the identity, so that training starts at the plain early exit."""

    def __init__(self, width: int, inner: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., d)."""
        inner = nn.functional.silu(self.up(self.norm(x.to(self.up.weight))))  # a layer may lie on another card
        return x + self.down(inner).to(x)


class ExitAdapter(HeadDraft):
    """Drafts chains by the target's own passes (`EarlyExitDrafter`), so it reads no recorded states while decoding."""

    config: ExitAdapterConfig
    drafts_trees = False

    def __init__(self, config: ExitAdapterConfig, ends: Ends, vocab: Tensor | None = None) -> None:
        super().__init__(config, ends, vocab)
        self.taps = ()  # the passes leave the states in the target's cache
        self.adapter = ResidualMLP(config.hidden_size, config.mlp_width, config.rms_norm_eps)
        self._exit: EarlyExitDrafter | None = None

    def unroll(self, batch: Batch) -> Iterator[Step]:
        """One step: row t drafts token t + 1."""
        assert batch.features is not None
        hidden = self.layered(self.adapter, batch.features[:, :, 0].to(self.dtype))
        norm = last_norm_of(self.ends.head.model)
        rows, valid = judged(batch, 0)
        final = norm(hidden.to(next(norm.parameters()).device)).to(hidden.device)
        yield Step(final, self.head, rows, valid, head_weights=self.head_weights)

    def start(self, context: Context, capacity: int) -> None:
        """Its runner packs its weights, beside the target's."""
        super().start(context, capacity)
        is_checked = self._exit is not None  # an earlier call has found that the target's passes can be parted
        given = self.ends.head.model, self.config.exit_layer, self.adapter, self.runner.serial
        self._exit = EarlyExitDrafter(*given, is_checked=is_checked)
        self._exit.start(context, capacity)

    def read(self, context: Context, lengths: Mapping[int, int]) -> None:
        """Nothing: the target has read the prompts."""

    def prepare(self, context: Context) -> int:  # type: ignore[override]
        return self._drafter.prepare(context)

    def propose(self, context: Context) -> Tree:
        """A chain, whose verdict needs the rest of the layers alone."""
        return self._drafter.propose(context)

    @property
    def _drafter(self) -> EarlyExitDrafter:
        assert self._exit is not None
        return self._exit
