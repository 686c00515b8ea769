"""From the speeds of a served comparison to the schedule of each draft and what to paste, as results.json has it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from decode.config import ModelConfig
from decode.formats.source import Source
from eval.modes.served.schedule.paste import Measured, chosen_lengths, for_others, for_vllm, schedule_of
from eval.modes.served.schedule.schedule import LEAST_ROUNDS, Speed
from eval.results.schema import Count, Interval, Part
from train.export import stage as export
from train.export.config import ExportConfig, SavedDraftConfig
from train.export.engines import ENGINES
from train.export.engines.base import Engine
from train.export.source import open_source

Row = Mapping[str, Any]
"""A speed of results.json."""
DEFINITION = (
    "The draft length of a batch size: the shortest one, unless a longer one is faster beyond the error bar, the 95% "
    "interval of the mean log ratio of their tokens/s by round (Student's t). k = 0 is measured with the draft loaded "
    "where the engine follows a schedule. Between two batch sizes that were measured the shorter of both lengths "
    "stands; behind the last one the engine goes on with its length."
)


class Length(Part):
    """What is drafted at a batch size."""

    batch_size: Count
    num_draft_tokens: Count
    over_alone: float
    """Its speed over that of the target alone."""
    ci95: Interval


class Pasted(Part):
    """For an engine."""

    engine: str
    """As `format` of python -m train.export calls it."""
    title: str
    """As its makers do."""
    num_draft_tokens: Count
    text: str
    why: str


class Conclusion(Part):
    """Of a draft."""

    draft: str
    lengths: list[Length]
    schedule: list[list[int]]
    """[from, to, k], batch sizes inclusive."""
    pastes: list[Pasted]


def concluded(measured: Measured, draft: str, commands: Mapping[str, Callable[[int], str]]) -> Conclusion:
    """What follows from the speeds of one draft."""
    pastes = [for_vllm(measured), *for_others(measured, commands)]
    return Conclusion(
        draft=draft,
        lengths=[
            Length(
                batch_size=one.batch_size,
                num_draft_tokens=one.k,
                over_alone=one.over_plain.value,
                ci95=list(one.over_plain.ci95),
            )
            for one in chosen_lengths(measured)
        ],
        schedule=[list(entry) for entry in schedule_of(measured)],
        pastes=[
            Pasted(
                engine=one.engine,
                title=ENGINES[one.engine].title,
                num_draft_tokens=one.k,
                text=one.text,
                why=one.why,
            )
            for one in pastes
        ],
    )


def has_speeds(rows: Sequence[Row], draft: str) -> bool:
    """Whether a schedule can be told: the target alone was timed too, in as many rounds as an error bar takes."""
    alone = [row for row in rows if row["draft"] is None]
    own = [row for row in rows if row["draft"] == draft]
    return bool(alone and own) and all(len(row["tokens_per_s"]) >= LEAST_ROUNDS for row in [*alone, *own])


def measured_of(
    rows: Sequence[Row], draft: str, target: str, method: str, loads: Sequence[str], options: Sequence[str]
) -> Measured:
    """The speeds of one draft, which the options `loads` load."""
    own = [row for row in rows if row["draft"] == draft]
    plain = [_speed(row) for row in rows if row["draft"] is None]
    return Measured(target, method, loads, options, plain, [_speed(row) for row in own])


def _speed(row: Row) -> Speed:
    return Speed(row["batch_size"], row["num_draft_tokens"], tuple(row["tokens_per_s"]))


def launch_commands(draft: str, target: ModelConfig, folder: str) -> dict[str, Callable[[int], str]]:
    """How engines other than vLLM are given a draft of ours, exported to `folder`-ENGINE, by draft length; those that
    do not load it are left out."""
    source = open_source(ExportConfig("all", "unused", draft=SavedDraftConfig(path=draft), target=target))
    found = {}
    for name, engine in ENGINES.items():
        if name in ("vllm", "speculators") or export.loads(engine, source, "auto")[0] is None:
            continue
        place = f"{folder}-{name}"
        found[name] = partial(_command, source, engine, draft, place)
    return found


def _command(source: Source, engine: Engine, draft: str, place: str, k: int) -> str:
    """The export, then the launch."""
    first = ["python", "-m", "train.export", f"draft.path={draft}", f"format={engine.name}", f"num_draft_tokens={k}"]
    export_it = shlex.join([*first, f"output_dir={place}"])
    is_python = engine.name == "transformers"  # the export comes before it, and sets the length
    launch = export.command(replace(source, num_draft_tokens=k), engine, Path(place), "auto")
    return f"{'# ' * is_python}{export_it}\n{launch}"
