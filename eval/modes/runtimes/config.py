"""What a user sets about `mode=runtimes`; imports nothing heavy."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from decode.common.typed_config import require, require_at_least

_DECIDED = ("target.path", "target.vllm_python", "output_dir", "resume", "plan")
"""Settings of `python -m distill` that the mode decides for all arms."""


@dataclass
class RuntimesConfig:
    """`mode=runtimes`: how fast records are made, by what runs the target; every way is a run of `python -m distill`,
    timed."""

    arms: dict[str, list[str]] = field(default_factory=lambda: {"today": []})
    """Name -> what this way changes on the command line of `python -m distill`; the first is what others are held
    against."""
    kinds: dict[str, list[str]] = field(default_factory=lambda: {"text": []})
    """Kind of record -> its overrides, e.g. features: [records.features.layers=[-1]]; every arm makes every kind."""
    common: list[str] = field(default_factory=list)
    """Overrides of all arms: corpus, prompts, sampling, batch size."""
    rounds: int = 2
    """Times that each arm makes each kind, in a new order each time."""

    def __post_init__(self) -> None:
        require_at_least(1, self, "runtimes.", "rounds")
        for name in ("arms", "kinds"):
            named = getattr(self, name)
            require(bool(named), f"runtimes.{name} is empty; name at least one")
            wrong = [one for one in named if not re.fullmatch(r"[\w+-]+", one)]
            require(not wrong, f"runtimes.{name} names {wrong}, and folders are named so: use letters, digits, + - _")
        lists = {"common": self.common, **{f"arms.{name}": each for name, each in self.arms.items()}}
        lists |= {f"kinds.{name}": each for name, each in self.kinds.items()}
        for where, overrides in lists.items():
            decided = [one for one in overrides if one.lstrip("+~").split("=")[0] in _DECIDED]
            require(
                not decided,
                f"runtimes.{where} has {decided}, which is the same for all arms: the target is target.path, vLLM's "
                "interpreter peers.vllm_python, the folder output_dir. Leave it out",
            )
