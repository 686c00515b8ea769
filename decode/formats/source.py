"""A trained draft that is written in one of these forms, with the target's ends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from decode.common.checked_json import read_json
from decode.drafters.dspark import DSparkConfig
from decode.drafters.head_config import HeadConfig
from decode.drafters.head_draft import HeadDraft
from decode.drafters.saved_head import load_head
from decode.forward.window import Window, window_in
from decode.models.describe import ModelDescription
from decode.models.few_rows import vocab_in
from decode.models.small import load_ends


@dataclass(frozen=True)
class Source:
    """A draft of any family; weights are read when a layout asks for them."""

    folder: Path
    """Where it was saved."""
    form: str
    """What engines tell apart: its family, but `dflash` for blocks of fill-in layout without a Markov bias."""
    target: ModelDescription
    dtype: torch.dtype | None
    """Precision to write; None is the one it was saved in."""
    num_draft_tokens: int
    """k of launch commands."""
    written: dict[str, Any]
    """Its draftsmith.json."""
    head_config: HeadConfig | None = None
    """None of a language model."""

    @property
    def config(self) -> HeadConfig:
        """Shape of a head."""
        assert self.head_config is not None
        return self.head_config

    @property
    def block(self) -> DSparkConfig:
        """Shape of a DFlash or DSpark head."""
        return cast(DSparkConfig, self.config)

    @property
    def kind(self) -> str:
        """The form, with the name that it was trained by where engines use another."""
        is_dflash = self.form == "dspark" and not self.block.markov_rank
        return "DFlash head of layout=anchor, which engines run as DSpark" if is_dflash else self.form

    @property
    def taps(self) -> tuple[int, ...]:
        """Hidden states that a head reads; a language model reads none."""
        return self.head_config.taps if self.head_config else ()

    @cached_property
    def window(self) -> Window | None:
        """The window of its attention; None sees the whole text."""
        return self.head_config.attends if self.head_config else window_in(read_json(self.folder / "config.json"))

    @cached_property
    def few_tokens(self) -> int | None:
        """How many tokens a language model drafts, where these are not all."""
        vocab = None if self.head_config else vocab_in(read_json(self.folder / "config.json"), str(self.folder))
        return None if vocab is None else len(vocab)

    @property
    def is_for_gguf(self) -> bool:
        """Whether its target is a GGUF file."""
        return Path(self.target.path).is_file()

    @property
    def is_calibrated(self) -> bool:
        """Whether temperatures of the chances that it predicts were fitted."""
        return self.form == "dspark" and bool(self.block.temperatures)

    @property
    def is_reduced(self) -> bool:
        """Whether a head drafts from a reduced vocabulary."""
        return self.head_config is not None and self.head_config.draft_vocab_size is not None

    @property
    def is_parallel(self) -> bool:
        """Whether a language model drafts all tokens of a round in one pass."""
        return self.head_config is None and read_json(self.folder / "config.json").get("pard_token") is not None

    @property
    def has_own_head(self) -> bool:
        """Whether it drafts with output heads of its own, as one does that began as a published head."""
        return self.head_config is not None and self.head_config.has_own_head

    @property
    def head(self) -> HeadDraft:
        """A head between the target's ends, in float32 with the values that are written; the target's layers are not
        read."""
        return self._loaded[0]

    @property
    def weight_dtype(self) -> torch.dtype:
        """Precision of what is written."""
        return self._loaded[1]

    @cached_property
    def _loaded(self) -> tuple[HeadDraft, torch.dtype]:
        """The head, and the precision that its values have."""
        ends = replace(self.target.source, dtype="float32", device="cpu", device_map=None)
        head = load_head(self.folder, load_ends(ends), self.target)
        dtype = self.dtype or head.dtype
        return head.to(dtype).float().eval().requires_grad_(False), dtype

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """A head's tensors by our names, as they are written."""
        state = self.head.state_dict()
        return {name: self._cast(tensor) for name, tensor in state.items()}

    @cached_property
    def embedding(self) -> Tensor:
        """(V, d) rows of the target's embedding, as its first layer gets them."""
        with torch.no_grad():
            rows = self.head.ends.embed(torch.arange(self.target.vocab_size))
        return self._cast(rows)

    @cached_property
    def output_rows(self) -> Tensor:
        """(V_draft, d) rows of the target's output head for the tokens that are drafted."""
        rows = self.head.ends.head.weight
        return self._cast(rows if self.head.vocab is None else rows[self.head.vocab])

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.weight_dtype).contiguous() if tensor.is_floating_point() else tensor
