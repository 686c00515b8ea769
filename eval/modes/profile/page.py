"""A profile as a page and as Markdown: a round by its parts, and by operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from eval.measure.operators import CLASSES
from eval.modes.profile.calls import Classes
from eval.modes.profile.figures import OUT_OF_ROUND, Profile, ProfiledArm
from eval.render.formatting import Column, Table, column, columns, number, with_interval
from eval.render.page import Page, Plot
from eval.render.plots import COLORS, GREY, draw

LEVELS = ("bare draft", "bare target", "outside passes", *OUT_OF_ROUND)
_SHADES = (*COLORS[:4], GREY)


def parts(arm: ProfiledArm) -> dict[str, float]:
    """A round's milliseconds by level."""
    phases, bare = arm.ms_per_round, arm.floor_ms_per_round
    return {
        "bare draft": bare.get("draft", 0.0),
        "bare target": bare.get("target", 0.0),
        "outside passes": arm.outside_passes_ms,
        **{name: phases.get(name, 0.0) for name in OUT_OF_ROUND},
    }


def _part(level: str) -> Column:
    return Column(level, lambda arm: number(parts(arm)[level]))


_PARTS = columns(
    column("arm", "name"),
    *(_part("bare draft"), _part("bare target")),
    Column("outside passes", lambda arm: with_interval(arm.outside_passes_ms, arm.outside_passes_ms_ci95)),
    *(_part("host"), _part("other")),
    Column("whole round", lambda arm: number(sum(arm.ms_per_round.values()))),
    *(column("tokens a round", "tokens_per_round", number), "tokens/s"),
    Column("prefill a call", lambda arm: number(arm.prefill_ms_per_call, 1)),
)
_OPERATORS = columns(
    Column("arm", lambda row: row[0].name),
    Column("phase", lambda row: row[1]),
    *(Column(kind, lambda row, kind=kind: number(row[2].get(kind, 0.0))) for kind in CLASSES),
)


def page_of(results: dict[str, Any]) -> Page:
    """Every table, both pictures, and how it was measured."""
    found = Profile.model_validate(results)
    rounds = "Milliseconds of one round, prompts left out, by what it is made of."
    classes = "The same by class of operator. The Python gap is what operators leave of a phase."
    plots = [
        Plot(lambda: _round_plot(found), rounds, is_wide=True),
        Plot(lambda: _operator_plot(found), classes, is_wide=True),
    ]
    title = f"Profile: {found.target['path']}"
    return Page(title, results, "profile_method.j2", _tables(found), plots=plots)


def _operators(found: Profile) -> list[tuple[ProfiledArm, str, Classes]]:
    """By arm and phase."""
    return [(arm, phase, classes) for arm in found.arms for phase, classes in arm.operators_ms_per_round.items()]


def _tables(found: Profile) -> list[Table]:
    """ms per round by part, then by class of operator."""
    made_of = (
        "Milliseconds, medians over calls. Bare passes are those of a full round, timed alone beside every call; "
        "outside passes is what the round takes beyond them, with a 95% interval over calls. Host is reading results, "
        "stop strings and events; other is what no phase holds: Python in between, set-up, output. On a GPU a round is "
        "its launch, and the wait for it shows in host: read the two together."
    )
    profiled = (
        "Milliseconds a round, from one call under torch.profiler. Attention counts softmax and batched products; "
        "elementwise is all that is not named. On a GPU these are kernels."
    )
    return [
        Table("A round by part", _PARTS, found.arms, made_of),
        Table("Phases by operator", _OPERATORS, _operators(found), profiled),
    ]


def _round_plot(found: Profile) -> str:
    """A stacked bar per arm."""
    bars = [(arm.name, parts(arm)) for arm in found.arms]
    return draw("milliseconds of a round by part", lambda axes: _stack(axes[0], bars, LEVELS), width=9)


def _operator_plot(found: Profile) -> str:
    """A stacked bar per arm and phase that takes any time."""
    bars = [
        (f"{arm.name}, {phase}", classes) for arm, phase, classes in _operators(found) if sum(classes.values()) > 0.005
    ]
    return draw("milliseconds of a round by operator", lambda axes: _stack(axes[0], bars, CLASSES), width=9)


def _stack(axis: Axes, bars: Sequence[tuple[str, dict[str, float]]], kinds: Sequence[str]) -> None:
    """A part below nothing, as rounds faster than their passes timed alone have it, takes no room."""
    left = [0.0] * len(bars)
    for kind, color in zip(kinds, _SHADES, strict=True):
        values = [max(0.0, parts.get(kind, 0.0)) for _, parts in bars]
        axis.barh(range(len(bars)), values, 0.62, left=left, color=color, label=kind)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axis.set_yticks(range(len(bars)), [label for label, _ in bars])
    axis.invert_yaxis()
    axis.set_axisbelow(True)
    axis.grid(visible=False, axis="y")
    axis.set(xlabel="ms a round")
