"""What a user sets about `mode=overlap`; imports nothing heavy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from decode.common.typed_config import real, require, require_at_least

_KEYS = ("target_ms", "draft_ms", "alpha", "token_ms", "batch_size")


@dataclass
class OverlapConfig:
    """`mode=overlap`: when it pays to draft the next round while the target verifies this one, simulated."""

    measured: str | None = None
    """Folder or results.json of a report (`mode=report`): each of its rows whose passes were timed alone is a pair of
    models."""
    given: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name -> a pair of models by its times: target_ms and draft_ms of a pass over one token, alpha (one acceptance, or
    one for each position), token_ms that each further token adds to a pass of the target (0), batch_size (1)."""
    links_ms: list[float] = field(default_factory=lambda: [0.0, 0.05, 1.0, 10.0])
    """Milliseconds one way between the device of the draft and that of the target: 0 in one host, more between two."""
    draft_lengths: list[int] = field(default_factory=lambda: list(range(1, 13)))
    """Draft lengths simulated; each way of drafting has its best one."""
    jitter: float = 0.1
    """Standard deviation of every time, as a share of its mean (lognormal)."""
    rounds: int = 20_000
    """Rounds simulated for each pair, link, length and way."""

    def __post_init__(self) -> None:
        require_at_least(100, self, "overlap.", "rounds")
        require(0 <= self.jitter <= 1, f"overlap.jitter={self.jitter} is outside [0, 1]; 0 is times that never vary")
        for name in ("links_ms", "draft_lengths"):
            values = getattr(self, name)
            require(bool(values), f"overlap.{name} is empty; name at least one")
            require(len(set(values)) == len(values), f"overlap.{name}={values} repeats one; name each once")
        links, lengths = self.links_ms, self.draft_lengths
        require(all(0 <= one < math.inf for one in links), f"overlap.links_ms={links}; each is 0 or more milliseconds")
        require(all(k >= 1 for k in lengths), f"overlap.draft_lengths={lengths}; a draft has at least 1 token")
        for name, one in self.given.items():
            check_given(f"overlap.given.{name}", one)

    def check(self) -> None:
        """ConfigError where there is nothing to simulate."""
        require(
            self.measured is not None or bool(self.given),
            "overlap.measured and overlap.given name no pair of models; give a report's results.json, or times, e.g. "
            "'overlap.given.mine={target_ms: 30, draft_ms: 3, alpha: 0.8}'",
        )


def check_given(where: str, one: Any) -> None:
    """ConfigError unless these are the times and acceptance of a pair."""
    require(isinstance(one, Mapping), f"{where}={one!r} is no pair; give {{target_ms: 30, draft_ms: 3, alpha: 0.8}}")
    unknown = sorted(set(one) - set(_KEYS))
    require(not unknown, f"{where} has unknown keys {unknown}; known are {', '.join(_KEYS)}")
    missing = sorted(set(_KEYS[:3]) - set(one))
    require(not missing, f"{where} lacks {', '.join(missing)}; give {{target_ms: 30, draft_ms: 3, alpha: 0.8}}")
    for name in ("target_ms", "draft_ms"):
        require(0 < real(one[name], f"{where}.{name}") < math.inf, f"{where}.{name}={one[name]}; a pass takes time")
    further = real(one.get("token_ms", 0), f"{where}.token_ms")
    require(0 <= further < math.inf, f"{where}.token_ms={further}; use 0 or more milliseconds a token")
    each = one["alpha"] if isinstance(one["alpha"], list) else [one["alpha"]]
    require(bool(each), f"{where}.alpha is empty; give the acceptance of at least the first position")
    for alpha in each:
        require(0 <= real(alpha, f"{where}.alpha") <= 1, f"{where}.alpha={alpha} is no probability; use 0 to 1")
    rows = one.get("batch_size", 1)
    require(isinstance(rows, int) and rows >= 1, f"{where}.batch_size={rows!r}; use 1 or more rows")
