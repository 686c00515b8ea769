"""tau, acceptance and losslessness of one trained draft: decoded in batches on held-out prompts, against the target's
own text."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from decode.drafters.base import Drafter
from decode.stats import Round
from eval.arms.ours import OurArm
from eval.config import EvalConfig
from eval.measure.continuations import Job, Text, batches
from eval.measure.losslessness import Check, check, margin_from
from eval.measure.quality import sampling_at, write_alone
from eval.modes.families.config import shape_settings
from eval.prompts.held_out import Prompt


@dataclass
class Speculator:
    """Continues jobs in batches like eval.measure.continuations.generator, and keeps the rounds of its first call:
    later calls go on behind a divergence, where rounds would count twice."""

    arm: OurArm
    batch_size: int
    seed: int
    rounds: dict[int, list[Round]] = field(default_factory=dict)
    """Prompt -> target passes."""

    def __call__(self, jobs: Sequence[Job]) -> list[Text]:
        """Texts of the jobs, each cut to its own max_new."""
        texts, kept = [], defaultdict[int, list[Round]](list)
        for batch in batches(jobs, self.batch_size):
            longest = max(job.max_new for job in batch)
            sample = self.arm.run([job.prompt for job in batch], [job.row for job in batch], longest, self.seed)
            for one in sample.rounds:
                kept[batch[one.row].row].append(one)
            for job, ids in zip(batch, sample.new_ids, strict=True):
                texts.append(Text(job.row, job.prompt, tuple(ids[: job.max_new])))
        self.rounds = self.rounds or dict(kept)
        return texts


@dataclass(frozen=True)
class Judge:
    """What every draft is measured with: the target in lossless.dtype, and what it wrote alone."""

    cfg: EvalConfig
    model: PreTrainedModel
    references: Mapping[float, list[Text]]
    """Temperature -> the target's own texts."""

    @classmethod
    def of(cls, cfg: EvalConfig, model: PreTrainedModel, prompts: Sequence[Prompt]) -> Judge:
        """Write the references: lossless.tokens after each of lossless.prompts."""
        texts = {one: write_alone(cfg, model, one, prompts, is_first=True) for one in cfg.temperatures}
        return cls(cfg, model, texts)

    def measure(self, drafter: Drafter, shapes: Sequence[str]) -> list[dict[str, Any]]:
        """An entry per temperature and shape."""
        return [
            {"temperature": temperature, "shape": shape, **self._measure(drafter, temperature, settings)}
            for temperature in self.cfg.temperatures
            for shape, settings in shape_settings(self.cfg.families, self.cfg.decode, temperature).items()
            if shape in shapes
        ]

    def _measure(self, drafter: Drafter, temperature: float, settings: Any) -> dict[str, Any]:
        cfg, reference = self.cfg, self.references[temperature]
        arm = OurArm("draft", self.model, drafter, vars(settings))
        speculate = Speculator(arm, cfg.lossless.batch_size, cfg.seed)
        margin = margin_from(self.model, sampling_at(cfg, temperature), cfg.seed)
        total = sum(check(reference, speculate, margin), Check())
        every = [one for rounds in speculate.rounds.values() for one in rounds]
        outcomes = Counter((one.drafted, one.accepted) for one in every)
        return {
            "num_draft_tokens": settings.num_draft_tokens,
            "counts": [_counts(speculate.rounds.get(text.row, [])) for text in reference],
            "outcomes": [[*outcome, count] for outcome, count in sorted(outcomes.items())],
            "mismatches": total.mismatches,
            "near_ties": total.near_ties,
            "tokens_checked": total.tokens,
        }


def _counts(rounds: Sequence[Round]) -> list[int]:
    """[tokens emitted, target passes] of one prompt."""
    return [sum(one.emitted for one in rounds), len(rounds)]
