"""transformers assisted generation with the same draft, at its best setting: the system a user would otherwise run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product

from transformers import PreTrainedModel

from decode.sampling.warp import Sampling
from eval.arms.ours import Sample, run_transformers
from eval.config import PeersConfig

NAME = "transformers assisted"


@dataclass(frozen=True)
class Setting:
    """The two knobs users turn; the schedule is constant, so that a setting means the same for every prompt."""

    num_assistant_tokens: int
    assistant_confidence_threshold: float

    @property
    def label(self) -> str:
        """Short and unique."""
        return f"k={self.num_assistant_tokens},c={self.assistant_confidence_threshold:g}"

    def as_dict(self) -> dict[str, object]:
        """For the report. With scikit-learn present transformers refits a threshold above 0 while it runs."""
        return {
            "num_assistant_tokens": self.num_assistant_tokens,
            "assistant_confidence_threshold": self.assistant_confidence_threshold,
            "num_assistant_tokens_schedule": "constant",
            "scikit_learn": find_spec("sklearn") is not None,
        }


def settings(cfg: PeersConfig) -> list[Setting]:
    """Every combination that is tried."""
    return [Setting(*pair) for pair in product(cfg.num_assistant_tokens, cfg.confidence_threshold)]


@dataclass(frozen=True)
class AssistedArm:
    """model.generate(assistant_model=draft) at one setting; batch 1 only, which is a limit of transformers."""

    name: str
    model: PreTrainedModel
    draft: PreTrainedModel
    sampling: Sampling
    setting: Setting

    def run(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], max_new_tokens: int, seed: int) -> Sample:
        """One assisted call."""
        with using(self.draft, self.setting):
            return run_transformers(self.model, self.sampling, prompts, max_new_tokens, seed + rows[0], self.draft)


@contextmanager
def using(draft: PreTrainedModel, setting: Setting) -> Iterator[None]:
    """transformers reads these knobs from the draft's generation_config and nowhere else; they are put back
    afterwards."""
    config = draft.generation_config
    assert config is not None
    wanted = {
        "num_assistant_tokens": setting.num_assistant_tokens,
        "assistant_confidence_threshold": setting.assistant_confidence_threshold,
        "num_assistant_tokens_schedule": "constant",
    }
    before = {name: getattr(config, name, None) for name in wanted}
    for name, value in wanted.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
