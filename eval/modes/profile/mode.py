"""`mode=profile`: where each round's time goes, with the first draft and without, down to classes of operators."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from decode.common.checked_json import write_json
from decode.common.environment import environment, git_state
from decode.common.progress import get_logger, progress
from decode.drafters.base import Drafter
from eval.arms.base import AUTOREGRESSIVE
from eval.config import EvalConfig
from eval.inputs import check_models, load, shared_context
from eval.measure.energy import EnergyMeter, meter_of
from eval.measure.timed_run import order
from eval.modes.profile.calls import Contestant, Group
from eval.modes.profile.figures import Profile, Turn, entry, joules_of
from eval.modes.profile.page import page_of
from eval.prompts.chats import chat_tokenizer
from eval.prompts.held_out import as_many_as, check_lengths
from eval.prompts.prompt import Prompt
from eval.report_folder import open_report
from eval.results.document import command
from eval.results.energy import energy_entry

SCHEMA = 2
TURNS = 3  # times that every contestant answers every prompt
log = get_logger("eval")


def run(cfg: EvalConfig) -> None:
    """Write profile.json, profile.md and profile.html for the first draft."""
    cfg = replace(cfg, drafts=dict([next(iter(cfg.drafts.items()))]))
    target, _ = check_models(cfg)
    prompts = as_many_as(cfg, chat_tokenizer(cfg), cfg.profile.prompts)
    check_lengths(prompts, cfg, shared_context(cfg, target))
    if cfg.plan:
        sys.stdout.write(_plan(cfg, prompts) + "\n")
        return
    with open_report(cfg) as folder:
        if folder.is_finished:
            return
        model, drafters = load(cfg, cfg.target)
        profile = Profile(
            schema=SCHEMA,
            environment={**environment(), "git": git_state(), "command": command(), "seed": cfg.seed},
            target={"path": target.path, "num_parameters": target.num_parameters, "dtype": str(model.dtype)[6:]},
            drafts=dict(cfg.drafts),
            decode=asdict(cfg.decode),
            temperature=cfg.temperatures[0],
            batch_size=cfg.timing.batch_size,
            prompts=len(prompts),
            new_tokens=cfg.profile.max_new_tokens,
            **_measured(cfg, model, next(iter(drafters.values())), prompts),
        )
        found = profile.model_dump(by_alias=True)
        write_json(folder.file("profile.json"), found)
        page = page_of(found)
        folder.file("profile.md").write_text(page.markdown(), encoding="utf-8")
        folder.file("profile.html").write_text(page.html(), encoding="utf-8")
        folder.finish({"arms": len(profile.arms)})
        log.info("profile: %s", folder.file("profile.html"))


def _plan(cfg: EvalConfig, prompts: Sequence[Prompt]) -> str:
    tokens = (TURNS + 2) * len(prompts) * cfg.profile.max_new_tokens
    return f"two arms, {len(prompts)} prompts, {tokens:,} tokens each, operators in one call of each"


def _measured(cfg: EvalConfig, model: PreTrainedModel, drafter: Drafter, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The fields `arms` and `energy` of profile.json."""
    groups, meter = _groups(cfg, prompts), meter_of(cfg.timing.watts, model)
    contestants = [Contestant(AUTOREGRESSIVE, cfg, model, None), Contestant(_label(cfg), cfg, model, drafter)]
    turns = _take_turns(cfg, contestants, groups, meter)
    where = f"batch {cfg.timing.batch_size}, T={cfg.temperatures[0]:g}"
    energy = [energy_entry(where, one.name, joules_of(turns[one.name]), meter, cfg.seed) for one in contestants]
    return {
        "arms": [entry(one.name, turns[one.name], one.operators(groups[0])) for one in contestants],
        "energy": energy,
    }


def _label(cfg: EvalConfig) -> str:
    k, tree = cfg.decode.num_draft_tokens, cfg.decode.tree
    return f"{next(iter(cfg.drafts))} k={k}" if tree == "chain" else f"{next(iter(cfg.drafts))} {tree}"


def _groups(cfg: EvalConfig, prompts: Sequence[Prompt]) -> list[Group]:
    """Full batches alone: another batch size would be another set of captures."""
    size = cfg.timing.batch_size
    return [
        [prompts[(start + i) % len(prompts)].ids for i in range(size)]
        for start in range(0, max(1, len(prompts) - size + 1), size)
    ]


def _take_turns(
    cfg: EvalConfig, contestants: Sequence[Contestant], groups: Sequence[Group], meter: EnergyMeter
) -> Mapping[str, list[Turn]]:
    """Every contestant's calls, its bare passes timed beside each, in an order drawn anew for every batch of prompts.
    The first turn is a warm-up on every prompt, so that captures are made."""
    found: dict[str, list[Turn]] = {one.name: [] for one in contestants}
    with progress((TURNS + 1) * len(groups) * len(contestants), "calls", "profile") as bar:
        for turn in range(TURNS + 1):
            for number, group in enumerate(groups):
                for one in order(contestants, cfg.seed, turn, number):
                    call, joules = meter.around(partial(one.call, group))
                    taken = Turn(call, one.floor(group), joules)
                    if turn:
                        found[one.name].append(taken)
                    bar.update(1)
    return found
