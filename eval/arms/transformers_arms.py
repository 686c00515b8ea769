"""transformers' own ways to continue prompts: generate, a static cache with a compiled forward, and assisted generation
with the same draft."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import product
from typing import Any, cast

import torch
from torch._inductor import config as inductor
from transformers import CompileConfig, GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from decode.autotune.timing import synchronize
from decode.sampling.stopping import own_eos_ids
from decode.sampling.warp import Sampling
from eval.arms.base import Sample, emitted
from eval.measure.config import PeersConfig
from eval.measure.continuations import left_padded


class ArrivalClock(StoppingCriteria):
    """Never stops anything; transformers calls it whenever tokens arrive, and it writes down when and how many there
    were."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.widths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        if not self.times:
            synchronize(input_ids.device)
        self.times.append(time.perf_counter())
        self.widths.append(input_ids.shape[1])
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@dataclass(frozen=True)
class TransformersArm:
    """transformers' own generate on the same model; `options` are further fields of its GenerationConfig. With a
    `setting` it is assisted, by a draft or, where the options say so, by its own first layers: batch 1 only, which is a
    limit of transformers."""

    name: str
    model: PreTrainedModel
    sampling: Sampling
    options: Mapping[str, Any] = field(default_factory=dict)
    draft: PreTrainedModel | None = None
    setting: Setting | None = None

    def run(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], max_new_tokens: int, seed: int) -> Sample:
        """One call of model.generate, on its dynamic cache unless the options name another."""
        asked = (self.model, self.sampling, prompts, max_new_tokens, seed + rows[0], self.draft)
        with nullcontext() if self.setting is None else using(self.draft or self.model, self.setting):
            return run_transformers(*asked, **self.options)


def run_transformers(
    model: PreTrainedModel,
    sampling: Sampling,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    seed: int,
    assistant: PreTrainedModel | None = None,
    **options: Any,
) -> Sample:
    """model.generate, timed whole, with the arrivals that its stopping criteria see."""
    ids, mask = left_padded(prompts, 0, model.device)
    config = generation_config(model, sampling, max_new_tokens, options)
    clock = ArrivalClock()
    torch.manual_seed(seed)
    began = time.perf_counter()
    sequences = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=mask,
        generation_config=config,
        stopping_criteria=StoppingCriteriaList([clock]),
        assistant_model=assistant,
    )
    synchronize(model.device)
    seconds = time.perf_counter() - began
    written = cast(torch.Tensor, sequences)[:, ids.shape[1] :].tolist()
    new = [emitted(row, config.eos_token_id or (), max_new_tokens) for row in written]
    first = min(clock.widths[0] - ids.shape[1], max_new_tokens)
    first_tokens = sum(min(first, len(row)) for row in new)
    arrivals = [at - began for at in clock.times]
    return Sample(new, seconds, arrivals[0], first_tokens, arrivals, [])


def generation_config(
    model: PreTrainedModel, sampling: Sampling, max_new_tokens: int, options: Mapping[str, Any] | None = None
) -> GenerationConfig:
    """The sampling, spelled out: transformers would fill what is left open from the model's own habits (top_k is 50
    there). `options` are further fields."""
    eos = own_eos_ids(model.generation_config, model.config.get_text_config().vocab_size)
    warpers = {} if sampling.is_greedy else _warpers(sampling)
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=not sampling.is_greedy,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        num_beams=1,
        eos_token_id=eos or None,
        pad_token_id=next(iter(eos), 0),
        **warpers,
        **(options or {}),
    )


def _warpers(sampling: Sampling) -> dict[str, float | int | None]:
    min_p = sampling.min_p if sampling.min_p > 0 else None
    return {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": min_p}


def no_compiler() -> str | None:
    """Why nothing can be compiled on this CPU; None where a C++ compiler is found."""
    names = inductor.cpp.cxx if isinstance(inductor.cpp.cxx, list | tuple) else (inductor.cpp.cxx,)
    if any(name and shutil.which(name) for name in (*names, "g++", "clang++")):
        return None
    return "torch.compile needs a C++ compiler, and neither g++ nor clang++ is installed"


def static_options(model: PreTrainedModel, max_length: int) -> dict[str, Any]:
    """Fields of GenerationConfig: one cache of `max_length` tokens for all calls, so that one graph serves them."""
    compiled = CompileConfig(mode="default")  # reduce-overhead is about CUDA graphs
    compiled._compile_all_devices = model.device.type == "cpu"  # type: ignore[assignment]  # the only way to ask for it
    return {"cache_implementation": "static", "max_cache_len": max_length, "compile_config": compiled}


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


def assisted_settings(cfg: PeersConfig) -> list[Setting]:
    """Every combination that is tried."""
    return [Setting(*pair) for pair in product(cfg.num_assistant_tokens, cfg.confidence_threshold)]


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
