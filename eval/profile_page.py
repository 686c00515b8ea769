"""profile.md and profile.html: milliseconds of a round by phase, and by class of operator one level down."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from matplotlib.axes import Axes

from eval.formatting import hardware, number
from eval.operators import CLASSES
from eval.page import document, facts_list, figure, html_table
from eval.plots import COLORS, GREY, draw
from eval.summary import markdown_table
from eval.tables import Table

LEVELS = ("draft", "target", "verify", "commit", "other")
_SHADES = (*COLORS[:4], GREY)


def render_markdown(found: dict[str, Any]) -> str:
    """Both tables and how they were measured."""
    parts = ["# Profile", *(markdown_table(table, heading="##") for table in tables(found)), "## How it was measured"]
    parts.append("\n".join(f"- {name}: {text}" for name, text in facts(found).items()))
    return "\n\n".join(parts) + "\n"


def render_page(found: dict[str, Any]) -> str:
    """A page of its own: both pictures, both tables."""
    phases = "Milliseconds of one round, prompts left out. The right bar of each pair is its bare passes, timed alone."
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
        "Milliseconds. `other` is what no phase holds: Python between the phases, set-up, output. Bare passes are the "
        "floor: the round's draft and target passes timed alone."
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
    """Stacked bars: a pair per arm, measured and bare."""

    def paint(axes: Sequence[Axes]) -> None:
        names = [(arm["name"], kind) for arm in found["arms"] for kind in ("measured", "bare passes")]
        bottom = [0.0] * len(names)
        for level, color in zip(LEVELS, _SHADES, strict=True):
            values = [
                source.get(level, 0.0)
                for arm in found["arms"]
                for source in (arm["ms_per_round"], arm["floor_ms_per_round"])
            ]
            axes[0].bar(range(len(names)), values, 0.62, bottom=bottom, color=color, label=level)
            bottom = [a + b for a, b in zip(bottom, values, strict=True)]
        axes[0].set_xticks(range(len(names)), [f"{name}\n{kind}" for name, kind in names])
        axes[0].set(ylabel="ms a round")
        axes[0].grid(visible=False, axis="x")

    return draw("milliseconds of a round by phase", paint, width=9)


def operator_plot(found: dict[str, Any]) -> str:
    """Stacked bars: one per arm and phase."""
    bars = [(arm["name"], phase, classes) for arm in found["arms"] for phase, classes in _phases(arm)]

    def paint(axes: Sequence[Axes]) -> None:
        bottom = [0.0] * len(bars)
        for kind, color in zip(CLASSES, _SHADES, strict=True):
            values = [classes.get(kind, 0.0) for _, _, classes in bars]
            axes[0].bar(range(len(bars)), values, 0.62, bottom=bottom, color=color, label=kind)
            bottom = [a + b for a, b in zip(bottom, values, strict=True)]
        axes[0].set_xticks(range(len(bars)), [f"{phase}\n{name}" for name, phase, _ in bars], fontsize=8)
        axes[0].set(ylabel="ms a round")
        axes[0].grid(visible=False, axis="x")

    return draw("milliseconds of a round by operator", paint, width=9)


def _phases(arm: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """Those that take any time: an autoregressive round drafts nothing."""
    return [
        (phase, classes) for phase, classes in arm["operators_ms_per_round"].items() if sum(classes.values()) > 0.005
    ]


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
