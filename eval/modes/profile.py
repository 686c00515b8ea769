"""`mode=profile`: where each round's time goes, with the first draft and without, down to classes of operators."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from transformers import PreTrainedModel

from decode import generate
from decode.autotune.timing import measure
from decode.common.checked_json import write_json
from decode.common.environment import environment, git_state
from decode.common.progress import get_logger, progress
from decode.common.run_folder import open_run
from decode.drafters.base import Drafter, drafted_depth
from decode.models.vocabulary import load_tokenizer
from decode.stats import Stats
from decode.trees.tree_plans import parse
from eval.arms.base import AUTOREGRESSIVE
from eval.config import EvalConfig
from eval.inputs import check_models, load, settings_at, shared_context
from eval.measure.continuations import left_padded
from eval.measure.operators import profiled
from eval.prompts.held_out import Prompt, as_many_as, check_lengths
from eval.render.profile_page import render_markdown, render_page
from eval.results.document import command

SCHEMA = 1
TURNS = 3  # times that every arm answers every prompt
COST_REPEATS = 10
log = get_logger("eval")


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
    """Milliseconds of the bare passes of one full round, timed alone at the mean context (`decode.calibrate`); empty
    for a tree that is chosen while it runs."""
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
