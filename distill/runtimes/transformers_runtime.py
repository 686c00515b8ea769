"""The target as a transformers model in this process, loaded when it is first needed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
import transformers
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from decode.common.progress import get_logger
from decode.drafters.base import Drafter
from decode.drafters.exit_adapter import ExitAdapter
from decode.drafters.saved_draft import load_drafter
from decode.drafters.untrained.early_exit import EarlyExitDrafter
from decode.models.compatibility import cache_argument
from decode.models.describe import ModelDescription
from decode.models.fingerprint import weights_fingerprint
from decode.models.load import load_model
from decode.models.weight_counts import empty_model
from distill.config import DistillConfig
from distill.records.record_manifest import RecordedRuntime
from distill.responses import Sampler, target_sampler
from distill.runtimes.runtime import Runtime, describe
from distill.target_passes import MOST_TOKENS, ModelPasses, with_final

log = get_logger("distill")

READ_MEANWHILE = {"cuda": 5_000_000_000}
"""Numbers of two bytes that an H100 reads while a pass of some 1,800 kernels is launched, 3 ms by estimate: by the
weights alone, prompts for a target of 135M parameters were written there a few at a time, at 115 tokens/s."""


class TransformersRuntime(Runtime):
    """Writes by our own decoder, whose passes leave the states of what they write, and reads by forwards where they do
    not."""

    def __init__(self, config: DistillConfig, target: ModelDescription, dtype: str) -> None:
        """Raises InputError for a draft of another target."""
        self.config, self.target, self.draft = config, target, describe(config.sampling.draft, target)
        self.note = RecordedRuntime(name="transformers", version=transformers.__version__, dtype=dtype)

    @cached_property
    def model(self) -> PreTrainedModel:
        """The target."""
        log.info("loading %s", self.config.target.path)
        with self.stopwatch.part("starting"):
            return load_model(self.config.target)

    @cached_property
    def drafter(self) -> Drafter | None:
        """What proposes the tokens of responses."""
        asked = self.config.sampling.draft
        if asked.path is None:
            return None
        log.info("loading %s, which drafts the responses", asked.path)
        with self.stopwatch.part("starting"):
            return load_drafter(asked.path, self.model, asked.dtype, **asked.loading)

    def sampler(self) -> Sampler:
        config, entries = self.config, _cache_entries(self.target.config)
        read = max(self.target.num_parameters, READ_MEANWHILE.get(self.model.device.type, 0))
        slots = None if entries is None else read // entries
        return target_sampler(self.model, config.sampling, config.batch_size, self.drafter, self._layers(), slots)

    def _layers(self) -> tuple[int, ...]:
        """Whose states writing leaves: none where none are kept, where the rounding of passes depends on the time that
        others took, or where a pass leaves the lower layers to the draft."""
        kept, is_parted = self.config.records, isinstance(self.drafter, EarlyExitDrafter | ExitAdapter)
        if self.config.sampling.draft.adaptive or is_parted or not (kept.store or kept.features.layers):
            return ()
        return with_final(kept.features.layers)

    def passes(self, layers: Sequence[int]) -> ModelPasses:
        return ModelPasses(self.model, layers, self.config.batch_size)

    def memory(self, longest: int) -> list[str]:
        rows = self.config.batch_size if self.config.responses == "target" else 0
        width = getattr(torch, self.note.dtype).itemsize
        weights = self.target.num_parameters * width / 1e9
        entries = _cache_entries(self.target.config)
        held = rows * longest * (entries or 0) * width / 1e9
        known = "" if entries else " (a token's are not known of this architecture before it is loaded)"
        return [
            f"memory, at least      {weights + held:.1f} GB: {weights:.1f} of weights, {held:.1f} of keys and values "
            f"of {rows} rows of {longest:,} tokens (batch_size){known}; texts are read {MOST_TOKENS:,} tokens at a time"
        ]

    def weights(self) -> str | None:
        return weights_fingerprint(self.model)


def _cache_entries(config: PretrainedConfig) -> int | None:
    """Keys and values of one token in all layers, as a pass over one without values leaves them; None where the pass
    asks for values: which experts JetMoE and DBRX send a token to, how long a text is that a dynamic rope turns."""
    model, cache = empty_model(config), DynamicCache()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")  # eager ones ask as well, and grouped ones want bfloat16
    name = cache_argument(type(model))
    assert name is not None, type(model)  # refuse_unsupported
    ids = torch.zeros(1, 1, dtype=torch.long, device="meta")
    try:
        with torch.no_grad():
            model(input_ids=ids, position_ids=ids, use_cache=True, **{name: cache})
    except RuntimeError:  # of PyTorch, about tensors on the meta device
        return None
    parts = [getattr(layer, name) for layer in cache.layers for name in ("keys", "values")]
    return sum(part.numel() for part in parts if part is not None)
