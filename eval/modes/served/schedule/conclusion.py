"""From the speeds of a served comparison to the schedule of each draft, and what to paste for each engine that loads
it, with the figures that it comes from."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from decode.config import ModelConfig
from decode.formats.source import Source
from distill.engines.vllm_command import with_speculation
from eval.config import EvalConfig
from eval.modes.served.engine.jobs import target_options
from eval.modes.served.folders import ServedDraft, is_ours
from eval.modes.served.results import Conclusion, Pasted, ServedLength, ServedSpeed
from eval.modes.served.schedule.in_vllm import SCHEDULED, Schedule, lengths
from eval.modes.served.schedule.schedule import LEAST_ROUNDS, Choice, Ratio, Speed, choices, one_length, per_batch_size
from train.export import stage as export
from train.export.config import ExportConfig, SavedDraftConfig
from train.export.engines import ENGINES
from train.export.engines.base import Engine
from train.export.source import open_source

Commands = Mapping[str, Callable[[int], str]]
"""Engine -> its launch command by draft length."""


@dataclass(frozen=True)
class MeasuredDraft:
    """A draft that was timed in vLLM."""

    draft: ServedDraft
    target: str
    options: Sequence[str]
    """Of the servers, besides those that load the draft."""
    plain: Sequence[Speed]
    """The target alone, k = 0, at each batch size."""
    drafted: Sequence[Speed]
    """With the draft loaded; k = 0 among them for methods that follow a schedule."""

    @property
    def is_scheduled(self) -> bool:
        """Whether vLLM changes its draft length with the batch size."""
        return self.draft.method in SCHEDULED

    @property
    def by_batch(self) -> list[Choice]:
        """By batch size, of the lengths that vLLM can change to there."""
        return choices(self.drafted, self.plain) if self.is_scheduled else self.of_one_length

    @property
    def of_one_length(self) -> list[Choice]:
        """By batch size, for an engine that drafts one length always, or nothing."""
        return choices(self._candidates, self.plain)

    @property
    def everywhere(self) -> Choice:
        """The one length for all batch sizes."""
        return one_length(self._candidates, self.plain)

    @property
    def schedule(self) -> Schedule:
        """For vLLM; [(1, n, 0)] where the target is faster with the draft at no batch size."""
        found = self.by_batch
        largest = found[-1].batch_size
        if not self.is_scheduled:
            return [(1, largest, self.everywhere.k)]
        if not any(one.k and one.over_plain.is_faster for one in found):
            return [(1, largest, 0)]
        return per_batch_size(found)

    @property
    def _candidates(self) -> list[Speed]:
        return [*self.plain, *(one for one in self.drafted if one.k)]


def conclusions(cfg: EvalConfig, drafts: Sequence[ServedDraft], speeds: Sequence[ServedSpeed]) -> list[Conclusion]:
    """One for each draft that was timed beside the target alone in two rounds or more."""
    options, found = [*target_options(cfg.target), *cfg.served.options], []
    for draft in drafts:
        measured = measured_of(speeds, draft, str(draft.target or cfg.target.path), options)
        if measured is not None:
            folder = str(Path(cfg.output_dir) / "exports" / draft.name)
            commands = launch_commands(draft.path, cfg.target, folder) if is_ours(draft.path) else {}
            found.append(concluded(measured, commands))
    return found


def measured_of(
    speeds: Sequence[ServedSpeed], draft: ServedDraft, target: str, options: Sequence[str]
) -> MeasuredDraft | None:
    """The speeds of one draft; None where they tell no schedule: the target alone was not timed, or in fewer rounds
    than an error bar takes."""
    alone = [one for one in speeds if one.draft is None]
    own = [one for one in speeds if one.draft == draft.name]
    if not (alone and own) or any(len(one.tokens_per_s) < LEAST_ROUNDS for one in [*alone, *own]):
        return None
    return MeasuredDraft(draft, target, options, [*map(_speed, alone)], [*map(_speed, own)])


def _speed(one: ServedSpeed) -> Speed:
    return Speed(one.batch_size, one.num_draft_tokens, tuple(one.tokens_per_s))


def concluded(measured: MeasuredDraft, commands: Commands) -> Conclusion:
    """What follows from the speeds of one draft."""
    return Conclusion(
        draft=measured.draft.name,
        lengths=[
            ServedLength(
                batch_size=one.batch_size,
                num_draft_tokens=one.k,
                over_alone=one.over_plain.value,
                ci95=list(one.over_plain.ci95),
            )
            for one in measured.by_batch
        ],
        schedule=[list(entry) for entry in measured.schedule],
        pastes=[for_vllm(measured), *for_others(measured, commands)],
    )


def for_vllm(measured: MeasuredDraft) -> Pasted:
    """The whole command."""
    schedule, draft = measured.schedule, measured.draft
    longest = max(k for _, _, k in schedule)
    loads = with_speculation(draft.options, lengths(draft.method, schedule)) if longest else []
    text = shlex.join(["vllm", "serve", measured.target, *loads, *measured.options])
    if measured.is_scheduled:
        return _pasted("vllm", longest, text, "; ".join(map(_figures, measured.by_batch)))
    why = f"{_figures(measured.everywhere)}; vLLM drafts as many Medusa tokens at every batch size"
    return _pasted("vllm", longest, text, why)


def for_others(measured: MeasuredDraft, commands: Commands) -> list[Pasted]:
    """For the engines whose launch command is known. llama.cpp and transformers serve one user, so theirs is the length
    of the smallest batch size; the others draft one length at all."""
    found = []
    for engine, command in commands.items():
        choice = measured.of_one_length[0] if engine in ("llamacpp", "transformers") else measured.everywhere
        why = f"{_figures(choice)}, by vLLM's speeds: acceptance is the same elsewhere, costs are not"
        if choice.k:
            found.append(_pasted(engine, choice.k, command(choice.k), why))
        else:
            found.append(_pasted(engine, 0, "", f"serve the target without the draft: {why}"))
    return found


def _pasted(engine: str, k: int, text: str, why: str) -> Pasted:
    return Pasted(engine=engine, title=ENGINES[engine].title, num_draft_tokens=k, text=text, why=why)


def _figures(one: Choice) -> str:
    """In words, e.g. "batch size 1: k=4, 1.80 times the target alone (1.71 to 1.90)"."""
    where = f"batch size {one.batch_size}" if one.batch_size else "over all batch sizes"
    text = f"{where}: k={one.k}, {_times(one.over_plain)}"
    if one.fastest == one.k:
        return text
    return f"{text}; k={one.fastest} was faster, {_times(one.fastest_over_plain)}, and not beyond the error bar"


def _times(found: Ratio) -> str:
    low, high = found.ci95
    return f"{found.value:.2f} times the target alone ({low:.2f} to {high:.2f})"


def launch_commands(draft: str, target: ModelConfig, folder: str) -> Commands:
    """How engines other than vLLM are given a draft of ours, exported to `folder`-ENGINE; those that do not load it are
    left out."""
    source = open_source(ExportConfig("all", "unused", draft=SavedDraftConfig(path=draft), target=target))
    return {
        name: partial(_command, source, engine, draft, f"{folder}-{name}")
        for name, engine in ENGINES.items()
        if name not in ("vllm", "speculators") and export.loads(engine, source, "auto")[0] is not None
    }


def _command(source: Source, engine: Engine, draft: str, place: str, k: int) -> str:
    """The export, then the launch."""
    first = ["python", "-m", "train.export", f"draft.path={draft}", f"format={engine.name}", f"num_draft_tokens={k}"]
    export_it = shlex.join([*first, f"output_dir={place}"])
    is_python = engine.name == "transformers"  # the export comes before it, and sets the length
    launch = export.command(replace(source, num_draft_tokens=k), engine, Path(place), "auto")
    return f"{'# ' * is_python}{export_it}\n{launch}"
