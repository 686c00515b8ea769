"""profile.md and profile.html: milliseconds of a round by phase, and by class of operator one level down."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from matplotlib.axes import Axes

from decode.common import markdown
from eval.measure.operators import CLASSES
from eval.render.formatting import hardware, number
from eval.render.page import document, facts_list, figure, html_table
from eval.render.plots import COLORS, GREY, draw
from eval.render.summary import markdown_table
from eval.render.tables import Table

LEVELS = ("draft", "target", "verify", "commit", "other")
_SHADES = (*COLORS[:4], GREY)


def render_markdown(found: dict[str, Any]) -> str:
    """Both tables and how they were measured."""
    parts = ["# Profile", *(markdown_table(table, heading="##") for table in tables(found)), "## How it was measured"]
    parts.append(markdown.facts(facts(found)))
    return "\n\n".join(parts) + "\n"


def render_page(found: dict[str, Any]) -> str:
    """A page of its own: both pictures, both tables."""
    phases = "Milliseconds of one round, prompts left out; below each arm its bare passes, timed alone."
    classes = "The same by class of operator. The Python gap is what operators leave of a phase."
    plots = [figure(phase_plot(found), phases, wide=True), figure(operator_plot(found), classes, wide=True)]
    parts = [
        f"<h1>Profile: {escape(found['target']['path'])}</h1>",
        f'<div class="plots">{"".join(plots)}</div>',
        *(html_table(table) for table in tables(found)),
        "<h2>How it was measured</h2>",
        facts_list(facts(found)),
    ]
    return document("draftsmith profile", parts)


def tables(found: dict[str, Any]) -> list[Table]:
    """ms per round by phase, then by class of operator."""
    return [_phase_table(found), _operator_table(found)]


def _phase_table(found: dict[str, Any]) -> Table:
    rows = [
        [
            arm["name"],
            *(number(arm["ms_per_round"][level], 2) for level in LEVELS),
            number(sum(arm["ms_per_round"].values()), 2),
            number(sum(arm["floor_ms_per_round"].values()), 2),
            number(arm["tokens_per_round"], 2),
            number(arm["tokens_per_s"], 0),
            number(arm["prefill_ms_per_call"], 1),
        ]
        for arm in found["arms"]
    ]
    columns = ("arm", *LEVELS, "round", "bare passes", "tokens a round", "tokens/s", "prefill a call")
    note = (
        "Milliseconds, medians over calls. Other is what no phase holds: Python between the phases, set-up, output. "
        "Bare passes are the floor: the round's draft and target passes timed alone."
    )
    return Table("A round by phase", columns, rows, note)


def _operator_table(found: dict[str, Any]) -> Table:
    rows = [
        [arm["name"], phase, *(number(classes.get(kind, 0.0), 2) for kind in CLASSES)]
        for arm in found["arms"]
        for phase, classes in arm["operators_ms_per_round"].items()
    ]
    note = (
        "Milliseconds a round, from one call under torch.profiler. Attention counts softmax and batched products; "
        "elementwise is all that is not named. On a GPU these are kernels, and phases are host times: waiting shows in "
        "the phase that reads results (commit)."
    )
    return Table("Phases by operator", ("arm", "phase", *CLASSES), rows, note)


def phase_plot(found: dict[str, Any]) -> str:
    """A pair of stacked bars per arm: measured, and its bare passes."""
    kinds = (("measured", "ms_per_round"), ("bare passes", "floor_ms_per_round"))
    bars = [(f"{arm['name']}, {kind}", arm[source]) for arm in found["arms"] for kind, source in kinds]
    return draw("milliseconds of a round by phase", lambda axes: _stack(axes[0], bars, LEVELS), width=9)


def operator_plot(found: dict[str, Any]) -> str:
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


def facts(found: dict[str, Any]) -> dict[str, str]:
    """How it was measured, as name -> words."""
    environment, target = found["environment"], found["target"]
    packages = environment["packages"]
    return {
        "Target": f"{target['path']}, {target['num_parameters'] / 1e6:,.1f}M parameters, {target['dtype']}",
        "Draft": ", ".join(f"{name} ({path})" for name, path in found["drafts"].items()),
        "Calls": f"{found['prompts']} prompts, {found['new_tokens']} new tokens each, batch {found['batch_size']}, "
        f"T={found['temperature']:g}, arms in turns after a warm-up",
        "Machine": hardware(environment),
        "Software": f"torch {packages.get('torch')}, transformers {packages.get('transformers')}, Python "
        f"{environment['python']}",
        "Seed": str(environment["seed"]),
        "Command": f"`{environment['command']}`",
    }
