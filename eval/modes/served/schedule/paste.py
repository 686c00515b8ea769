"""What to paste, for each engine that loads a draft, with the figures that it comes from."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from distill.engines.vllm_command import with_speculation
from eval.modes.served.schedule.in_vllm import SCHEDULED, Schedule, lengths
from eval.modes.served.schedule.schedule import Choice, Ratio, Speed, choices, one_length, per_batch_size

NO_DRAFT = "serve the target without the draft"


@dataclass(frozen=True)
class Measured:
    """A draft that was timed in vLLM."""

    target: str
    method: str
    """As vLLM calls it."""
    draft: Sequence[str]
    """Options of `vllm serve` that load it."""
    options: Sequence[str]
    """Those that the servers had besides."""
    plain: Sequence[Speed]
    """The target alone, k = 0, at each batch size."""
    drafted: Sequence[Speed]
    """With the draft loaded; k = 0 among them for methods that follow a schedule."""

    @property
    def candidates(self) -> list[Speed]:
        """What an engine can change to where it drafts one length always, or nothing."""
        return [*self.plain, *(one for one in self.drafted if one.k)]


@dataclass(frozen=True)
class Paste:
    """For one engine."""

    engine: str
    """As `format` of python -m train.export calls it."""
    k: int
    """The longest draft."""
    text: str
    """What to paste; empty where the engine is best left without the draft."""
    why: str
    """The figures that it comes from."""


def chosen_lengths(measured: Measured) -> list[Choice]:
    """By batch size, of the lengths that vLLM can change to there."""
    follows = measured.method in SCHEDULED
    return choices(measured.drafted if follows else measured.candidates, measured.plain)


def schedule_of(measured: Measured) -> Schedule:
    """Draft lengths for vLLM; [(1, n, 0)] where the target is faster with the draft at no batch size."""
    found = chosen_lengths(measured)
    largest = found[-1].batch_size
    if measured.method not in SCHEDULED:
        return [(1, largest, one_length(measured.candidates, measured.plain).k)]
    if not any(one.k and one.over_plain.is_faster for one in found):
        return [(1, largest, 0)]
    return per_batch_size(found)


def for_vllm(measured: Measured) -> Paste:
    """The whole command."""
    schedule = schedule_of(measured)
    longest = max(k for _, _, k in schedule)
    draft = with_speculation(measured.draft, lengths(measured.method, schedule)) if longest else []
    text = shlex.join(["vllm", "serve", measured.target, *draft, *measured.options])
    if measured.method in SCHEDULED:
        why = figures(chosen_lengths(measured))
    else:
        everywhere = one_length(measured.candidates, measured.plain)
        why = f"{figures([everywhere])}; vLLM drafts as many Medusa tokens at every batch size"
    return Paste("vllm", longest, text, why)


def for_others(measured: Measured, commands: Mapping[str, Callable[[int], str]]) -> list[Paste]:
    """For the engines whose launch command by draft length is known. llama.cpp and transformers serve one user, so
    theirs is the length of the smallest batch size; the others draft one length at all."""
    alone = choices(measured.candidates, measured.plain)[0]
    everywhere = one_length(measured.candidates, measured.plain)
    found = []
    for engine, command in commands.items():
        choice = alone if engine in ("llamacpp", "transformers") else everywhere
        why = f"{figures([choice])}, by vLLM's speeds: acceptance is the same elsewhere, costs are not"
        if choice.k:
            found.append(Paste(engine, choice.k, command(choice.k), why))
        else:
            found.append(Paste(engine, 0, "", f"{NO_DRAFT}: {why}"))
    return found


def figures(chosen: Sequence[Choice]) -> str:
    """In words, e.g. "batch size 1: k=4, 1.80 times the target alone (1.71 to 1.90)"."""
    return "; ".join(map(_figures, chosen))


def _figures(one: Choice) -> str:
    where = f"batch size {one.batch_size}" if one.batch_size else "over all batch sizes"
    text = f"{where}: k={one.k}, {_times(one.over_plain)}"
    if one.fastest == one.k:
        return text
    return f"{text}; k={one.fastest} was faster, {_times(one.fastest_over_plain)}, and not beyond the error bar"


def _times(found: Ratio) -> str:
    low, high = found.ci95
    return f"{found.value:.2f} times the target alone ({low:.2f} to {high:.2f})"
