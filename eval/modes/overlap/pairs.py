"""Pairs of target and draft as a simulation sees them: what passes take, and what is accepted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from decode.common.errors import InputError
from eval.config import TOKEN_FOR_TOKEN
from eval.modes.overlap.config import OverlapConfig
from eval.results.schema import read_results


@dataclass(frozen=True)
class Pair:
    """Times in milliseconds of passes that run alone."""

    name: str
    target_ms: float
    """Of the target over one token."""
    token_ms: float
    """That each further token of the same pass adds."""
    draft_ms: float
    """Of the draft, per token."""
    acceptance: tuple[float, ...]
    """That a draft token is accepted, where those before it were; the last one stands for all positions behind."""
    batch_size: int = 1

    def verify_ms(self, k: int) -> float:
        """Of the target over k draft tokens and the one before them."""
        return self.target_ms + k * self.token_ms

    def chances(self, count: int) -> list[float]:
        """Acceptance at the first `count` positions."""
        known = list(self.acceptance[:count])
        return known + [self.acceptance[-1]] * (count - len(known))


def pairs(cfg: OverlapConfig) -> list[Pair]:
    """All that are asked for, measured ones first; InputError where the report holds none."""
    measured = [] if cfg.measured is None else _measured(Path(cfg.measured))
    return [*measured, *(_given(name, one) for name, one in cfg.given.items())]


def _given(name: str, one: Mapping[str, Any]) -> Pair:
    alpha = one["alpha"] if isinstance(one["alpha"], list) else [one["alpha"]]
    target_ms, token_ms, draft_ms = (float(one.get(key, 0)) for key in ("target_ms", "token_ms", "draft_ms"))
    return Pair(name, target_ms, token_ms, draft_ms, tuple(map(float, alpha)), one.get("batch_size", 1))


def _measured(given: Path) -> list[Pair]:
    file = given / "results.json" if given.is_dir() else given
    if not file.is_file():
        raise InputError(
            f"overlap.measured={given} is no report: {file} does not exist. Name the folder or the results.json of a "
            "report (mode=report)"
        )
    found = [_of_row(row) for row in read_results(file)["rows"] if _is_pair(row)]
    if not found:
        raise InputError(
            f"overlap.measured={file} has no row of a draft LM under verifier=coupled whose passes were timed alone, "
            "so what to simulate is not known: heads wait for the target's hidden states. Name the results.json of a "
            "report (mode=report) of a draft LM with decode.tree=chain, or give times in overlap.given"
        )
    return found


def _is_pair(row: Mapping[str, Any]) -> bool:
    """Of a draft that can go on alone, under a rule by which it guesses the target's own token as often as others."""
    is_asked = row["drafter"] == "lm" and row["verifier"] in TOKEN_FOR_TOKEN and row["category"] is None
    return is_asked and row["setting"] is None and bool(row["component_times"]) and bool(_known(row))


def _known(row: Mapping[str, Any]) -> list[float]:
    return list(takewhile(lambda share: share is not None, row["acceptance_by_position"]))


def _of_row(row: Mapping[str, Any]) -> Pair:
    times = row["component_times"]
    further = (times["t_target_k1_s"] - times["t_target_1_s"]) / times["num_draft_tokens"]
    return Pair(
        f"{row['draft']}, T={row['temperature']:g}, batch {row['batch_size']}",
        1e3 * times["t_target_1_s"],
        1e3 * max(0.0, further),  # noise may have the longer pass the faster
        1e3 * times["t_draft_s"],
        tuple(_known(row)),
        row["batch_size"],
    )
