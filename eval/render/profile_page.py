"""profile.md and profile.html: milliseconds of a round by phase, and by class of operator one level down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from eval.measure.operators import CLASSES
from eval.render.formatting import Column, Table, column, columns, number
from eval.render.page import Page, Plot, as_html, as_markdown
from eval.render.plots import COLORS, GREY, draw

LEVELS = ("draft", "target", "verify", "commit", "other")
_SHADES = (*COLORS[:4], GREY)
_PHASES = columns(
    column("arm", "name"),
    *(Column(level, lambda arm, level=level: number(arm["ms_per_round"][level])) for level in LEVELS),
    Column("round", lambda arm: number(sum(arm["ms_per_round"].values()))),
    Column("bare passes", lambda arm: number(sum(arm["floor_ms_per_round"].values()))),
    *(column("tokens a round", "tokens_per_round", number), "tokens/s"),
    Column("prefill a call", lambda arm: number(arm["prefill_ms_per_call"], 1)),
)
_OPERATORS = columns(
    *("arm", "phase"),
    *(Column(kind, lambda row, kind=kind: number(row["classes"].get(kind, 0.0))) for kind in CLASSES),
)


def render_markdown(found: dict[str, Any]) -> str:
    """Both tables and how they were measured."""
    return as_markdown(_page(found))


def render_page(found: dict[str, Any]) -> str:
    """The same with both pictures."""
    return as_html(_page(found))


def _page(found: dict[str, Any]) -> Page:
    phases = "Milliseconds of one round, prompts left out; below each arm its bare passes, timed alone."
    classes = "The same by class of operator. The Python gap is what operators leave of a phase."
    plots = [
        Plot(lambda: _phase_plot(found), phases, is_wide=True),
        Plot(lambda: _operator_plot(found), classes, is_wide=True),
    ]
    return Page(f"Profile: {found['target']['path']}", found, "profile_method.j2", _tables(found), plots=plots)


def _tables(found: dict[str, Any]) -> list[Table]:
    """ms per round by phase, then by class of operator."""
    operators = [
        {"arm": arm["name"], "phase": phase, "classes": classes}
        for arm in found["arms"]
        for phase, classes in arm["operators_ms_per_round"].items()
    ]
    bare = (
        "Milliseconds, medians over calls. Other is what no phase holds: Python between the phases, set-up, output. "
        "Bare passes are the floor: the round's draft and target passes timed alone."
    )
    profiled = (
        "Milliseconds a round, from one call under torch.profiler. Attention counts softmax and batched products; "
        "elementwise is all that is not named. On a GPU these are kernels, and phases are host times: waiting shows in "
        "the phase that reads results (commit)."
    )
    return [
        Table("A round by phase", _PHASES, found["arms"], bare),
        Table("Phases by operator", _OPERATORS, operators, profiled),
    ]


def _phase_plot(found: dict[str, Any]) -> str:
    """A pair of stacked bars per arm: measured, and its bare passes."""
    kinds = (("measured", "ms_per_round"), ("bare passes", "floor_ms_per_round"))
    bars = [(f"{arm['name']}, {kind}", arm[source]) for arm in found["arms"] for kind, source in kinds]
    return draw("milliseconds of a round by phase", lambda axes: _stack(axes[0], bars, LEVELS), width=9)


def _operator_plot(found: dict[str, Any]) -> str:
    """A stacked bar per arm and phase that takes any time."""
    bars = [
        (f"{arm['name']}, {phase}", classes)
        for arm in found["arms"]
        for phase, classes in arm["operators_ms_per_round"].items()
        if sum(classes.values()) > 0.005
    ]
    return draw("milliseconds of a round by operator", lambda axes: _stack(axes[0], bars, CLASSES), width=9)


def _stack(axis: Axes, bars: Sequence[tuple[str, dict[str, float]]], kinds: Sequence[str]) -> None:
    left = [0.0] * len(bars)
    for kind, color in zip(kinds, _SHADES, strict=True):
        values = [parts.get(kind, 0.0) for _, parts in bars]
        axis.barh(range(len(bars)), values, 0.62, left=left, color=color, label=kind)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axis.set_yticks(range(len(bars)), [label for label, _ in bars])
    axis.invert_yaxis()
    axis.set_axisbelow(True)
    axis.grid(visible=False, axis="y")
    axis.set(xlabel="ms a round")
