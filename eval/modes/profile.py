"""`mode=profile`: where each round's time goes, with the first draft and without, down to classes of operators."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from transformers import PreTrainedModel

from decode import generate
from decode.autotune.timing import measure
from decode.common.checked_json import write_json
from decode.common.environment import environment, git_state
from decode.common.progress import get_logger, progress
from decode.common.run_folder import open_run
from decode.drafters.base import Drafter, drafted_depth
from decode.models.compatibility import load_tokenizer
from decode.stats import Stats
from decode.trees.tree_plans import parse
from eval.arms.base import AUTOREGRESSIVE
from eval.config import EvalConfig
from eval.inputs import check_models, load, settings_at, shared_context
from eval.measure.continuations import left_padded
from eval.measure.operators import CLASSES, profiled
from eval.prompts.held_out import Prompt, as_many_as, check_lengths
from eval.render.formatting import Column, Table, column, columns, number
from eval.render.page import Page, Plot, as_html, as_markdown
from eval.render.plots import COLORS, GREY, draw
from eval.results.document import command

SCHEMA = 1
TURNS = 3  # times that every arm answers every prompt
COST_REPEATS = 10
log = get_logger("eval")
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


@dataclass(frozen=True)
class Call:
    """What one timed call took, as a whole and by phase."""

    stats: Stats
    seconds: float

    @property
    def rounds(self) -> int:
        """Target passes of the batch."""
        return len(self.stats.arrival_s)

    def ms_per_round(self) -> dict[str, float]:
        """By phase, reading prompts left out; `other` is what no phase holds: Python between them, set-up, output."""
        phases = {phase: seconds for phase, seconds in self.stats.seconds.items() if phase != "prefill"}
        phases["other"] = self.seconds - sum(self.stats.seconds.values())
        return {phase: 1e3 * seconds / self.rounds for phase, seconds in phases.items()}


def run(cfg: EvalConfig) -> None:
    """Write profile.json, profile.md and profile.html for the first draft."""
    cfg = replace(cfg, drafts=dict([next(iter(cfg.drafts.items()))]))
    target, _ = check_models(cfg)
    prompts = as_many_as(cfg, load_tokenizer(cfg.target), cfg.profile.prompts)
    check_lengths(prompts, cfg, shared_context(cfg, target))
    if cfg.plan:
        tokens = (TURNS + 2) * len(prompts) * cfg.profile.max_new_tokens
        sys.stdout.write(f"two arms, {len(prompts)} prompts, {tokens:,} tokens each, operators in one call of each\n")
        return
    with open_run(cfg.output_dir, "eval", cfg, cfg.resume) as folder:
        if folder.is_finished:
            return
        model, drafters = load(cfg, cfg.target)
        found = {
            "schema": SCHEMA,
            "environment": {**environment(), "git": git_state(), "command": command(), "seed": cfg.seed},
            "target": {"path": target.path, "num_parameters": target.num_parameters, "dtype": str(model.dtype)[6:]},
            "drafts": dict(cfg.drafts),
            "decode": asdict(cfg.decode),
            "temperature": cfg.temperatures[0],
            "batch_size": cfg.timing.batch_size,
            "prompts": len(prompts),
            "new_tokens": cfg.profile.max_new_tokens,
            "arms": _arms(cfg, model, next(iter(drafters.values())), prompts),
        }
        write_json(folder.file("profile.json"), found)
        folder.file("profile.md").write_text(render_markdown(found), encoding="utf-8")
        folder.file("profile.html").write_text(render_page(found), encoding="utf-8")
        folder.finish({"arms": len(found["arms"])})
        log.info("profile: %s", folder.file("profile.html"))


def _arms(cfg: EvalConfig, model: PreTrainedModel, drafter: Drafter, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """Both arms, interleaved; each is warmed up on every prompt first, so that captures are made."""
    drafters: dict[str, Drafter | None] = {AUTOREGRESSIVE: None, _label(cfg): drafter}
    groups = _groups(cfg, prompts)
    calls: dict[str, list[Call]] = {name: [] for name in drafters}
    with progress((TURNS + 1) * len(groups) * len(drafters), "calls", "profile") as bar:
        for turn in range(TURNS + 1):
            for group in groups:
                for name, one in drafters.items():
                    began = time.perf_counter()
                    stats = _call(cfg, model, one, group)()
                    if turn:
                        calls[name].append(Call(stats, time.perf_counter() - began))
                    bar.update(1)
    return [
        _entry(
            name,
            calls[name],
            floor(cfg, model, one, groups[0]),
            _call(cfg, model, one, groups[0]),
            model.device.type == "cuda",
        )
        for name, one in drafters.items()
    ]


def _label(cfg: EvalConfig) -> str:
    k, tree = cfg.decode.num_draft_tokens, cfg.decode.tree
    return f"{next(iter(cfg.drafts))} k={k}" if tree == "chain" else f"{next(iter(cfg.drafts))} {tree}"


def _groups(cfg: EvalConfig, prompts: Sequence[Prompt]) -> list[list[tuple[int, ...]]]:
    """Full batches alone: another batch size would be another set of captures."""
    size = cfg.timing.batch_size
    return [
        [prompts[(start + i) % len(prompts)].ids for i in range(size)]
        for start in range(0, max(1, len(prompts) - size + 1), size)
    ]


def _call(
    cfg: EvalConfig, model: PreTrainedModel, drafter: Drafter | None, group: Sequence[Sequence[int]]
) -> Callable[[], Stats]:
    """Generation that no end token cuts short."""
    settings = {**settings_at(cfg, cfg.temperatures[0]), "max_new_tokens": cfg.profile.max_new_tokens}
    ids, mask = left_padded(group, 0, model.device)

    def call() -> Stats:
        return generate(
            model, drafter, ids, attention_mask=mask, seed=cfg.seed, eos_token_id=(), stop_strings=(), **settings
        ).stats

    return call


def floor(
    cfg: EvalConfig, model: PreTrainedModel, drafter: Drafter | None, group: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Milliseconds of the bare passes of one full round, timed alone at the mean context (see
    `decode.autotune.timing`); empty for a tree that is chosen while it runs."""
    if drafter is not None and cfg.decode.tree == "sequoia":
        return {}
    context = sum(map(len, group)) // len(group) + cfg.profile.max_new_tokens // 2
    decode = cfg.decode
    shape = parse(decode.tree, decode.num_draft_tokens, decode.tree_nodes) if drafter is not None else None
    if drafter is not None and shape is not None:
        shape = shape.cut(drafted_depth(drafter, shape))
    nodes = shape.num_nodes if shape is not None else 1
    costs = measure(model, drafter, context, [nodes], len(group), COST_REPEATS)
    found = {"target": 1e3 * costs.t_target[nodes]}
    return found if shape is None else {"draft": 1e3 * shape.depth * costs.t_draft, **found}


def _entry(
    name: str, calls: Sequence[Call], bare: dict[str, float], again: Callable[[], Stats], on_cuda: bool
) -> dict[str, Any]:
    """Medians over calls, which another program on the machine moves less than means."""
    profiled_calls: list[Stats] = []
    seconds = profiled(lambda: profiled_calls.append(again()), on_cuda)
    rounds = len(profiled_calls[0].arrival_s)
    each = [call.ms_per_round() for call in calls]
    phases = {phase: median(one[phase] for one in each) for phase in each[0]}
    return {
        "name": name,
        "calls": len(calls),
        "tokens_per_round": sum(call.stats.num_tokens for call in calls) / sum(call.rounds for call in calls),
        "tokens_per_s": median(call.stats.num_tokens / call.seconds for call in calls),
        "prefill_ms_per_call": 1e3 * median(call.stats.seconds["prefill"] for call in calls),
        "ms_per_round": phases,
        "floor_ms_per_round": bare,
        "operators_ms_per_round": {
            phase: _classes(seconds[phase], rounds, ms) for phase, ms in phases.items() if phase in seconds
        },
    }


def _classes(seconds: dict[str, float], rounds: int, phase_ms: float) -> dict[str, float]:
    """Operators of the profiled call per round; what they leave of the phase, timed without the profiler, is Python."""
    found = {kind: 1e3 * value / rounds for kind, value in seconds.items()}
    return {**found, "Python gap": max(0.0, phase_ms - sum(found.values()))}


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
