"""The target as a transformers model in this process, loaded when it is first needed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import transformers
from transformers import PreTrainedModel

from decode.common.progress import get_logger
from decode.drafters.base import Drafter
from decode.drafters.saved_draft import load_drafter
from decode.models.fingerprint import weights_fingerprint
from decode.models.load import ModelDescription, load_model
from distill.config import DistillConfig
from distill.records.record_manifest import RecordedRuntime
from distill.responses import Sampler, target_sampler
from distill.runtimes.response_draft import describe
from distill.runtimes.runtime import Runtime
from distill.target_passes import ModelPasses

log = get_logger("distill")


class TransformersRuntime(Runtime):
    """Writes by our own decoder, reads by forwards."""

    def __init__(self, config: DistillConfig, target: ModelDescription, dtype: str) -> None:
        """Raises InputError for a draft of another target."""
        self.config, self.draft = config, describe(config.sampling.draft, target)
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
        return target_sampler(self.model, self.config.sampling, self.config.batch_size, self.drafter)

    def passes(self, layers: Sequence[int]) -> ModelPasses:
        return ModelPasses(self.model, layers, self.config.batch_size)

    def weights(self) -> str | None:
        return weights_fingerprint(self.model)
