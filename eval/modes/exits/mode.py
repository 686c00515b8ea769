"""`mode=exits`: measure every early exit of a target, and recommend one."""

from __future__ import annotations

import time
from typing import Any

from decode.autotune.exit_times import measure_exits
from decode.common.errors import InputError
from decode.common.progress import get_logger
from decode.drafters.untrained.early_exit import refuse_exit
from decode.models.describe import ModelDescription
from eval.config import EvalConfig
from eval.inputs import check_models, load, sampling_at, shared_context
from eval.measure.alpha import measure_alpha
from eval.measure.cells import mean_context
from eval.measure.continuations import Text, jobs_for
from eval.measure.quality import alone
from eval.modes.exits.measuring import Entry, Exit, ExitFace, entries, exits_of, make_results
from eval.modes.exits.page import page_of
from eval.prompts.chats import chat_tokenizer
from eval.prompts.held_out import as_many_as, split_prompts
from eval.prompts.prompt import Prompt, check_room
from eval.render.files import write_files
from eval.report_folder import planned_report

log = get_logger("eval")
FAMILY = "exit_adapter"


def run(cfg: EvalConfig) -> None:
    """Write results.json, summary.md and index.html to cfg.output_dir; ConfigError and InputError before a weight is
    loaded."""
    target, families = check_models(cfg)
    _check(cfg, target, families)
    prompts = _prompts(cfg, shared_context(cfg, target))
    with planned_report(cfg, plan_lines(cfg, target, prompts)) as folder:
        if folder is None:
            return
        began = time.perf_counter()
        found, t_target_1 = _measured(cfg, target, prompts)
        results = make_results(cfg, target, found, t_target_1, len(prompts), time.perf_counter() - began)
        content = results.model_dump(by_alias=True)
        write_files(folder, page_of(content))
        folder.finish({"exits": len(found), "exit_layer": results.exit_layer})
        log.info("report: %s", folder.file("index.html"))


def plan_lines(cfg: EvalConfig, target: ModelDescription, prompts: list[Prompt]) -> list[str]:
    """For a person."""
    layers = ", ".join(map(str, cfg.exits.layers_of(target.num_layers)))
    return [
        f"exits: layers {layers} of {target.num_layers}; adapters {', '.join(cfg.drafts) or 'none'}",
        f"text: {len(prompts)} prompts, which the target continues by {cfg.decode.max_new_tokens} tokens at each of "
        f"temperatures={cfg.temperatures}",
    ]


def _check(cfg: EvalConfig, target: ModelDescription, families: dict[str, str]) -> None:
    for layer in cfg.exits.layers_of(target.num_layers) or [1]:  # of one layer none can be left
        refuse_exit(layer, target.num_layers, target.path)
    for name, family in families.items():
        if family != FAMILY:
            raise InputError(
                f"drafts.{name}={cfg.drafts[name]} is of family {family}, and mode=exits measures where a target may "
                f"be left: it takes adapters trained with draft={FAMILY}. Compare others with mode=drafters"
            )


def _prompts(cfg: EvalConfig, max_positions: int) -> list[Prompt]:
    """Of the validation split, or of the user's file: what is chosen here is not reported on these."""
    tokenizer, wanted = chat_tokenizer(cfg), cfg.timing.screening_prompts
    if cfg.prompts.file is not None:
        prompts = as_many_as(cfg, tokenizer, wanted)
    else:
        prompts = split_prompts(cfg, tokenizer, "validation", wanted, f"timing.screening_prompts={wanted}")
    check_room(prompts, cfg.decode.max_new_tokens + max(cfg.exits.draft_lengths) + 1, max_positions)
    return prompts


def _measured(cfg: EvalConfig, target: ModelDescription, prompts: list[Prompt]) -> tuple[list[Entry], float]:
    """Entries of all exits at all temperatures, and the seconds of a plain pass."""
    model, drafters = load(cfg, cfg.target)
    adapters = {name: (cfg.drafts[name], drafter) for name, drafter in drafters.items()}
    exits = exits_of(model, cfg.exits.layers_of(target.num_layers), adapters)
    context = mean_context(prompts, cfg.decode.max_new_tokens)
    log.info("timing the passes of %d exits", len(exits))
    rows, repeats = cfg.timing.batch_size, cfg.timing.cost_repeats
    lower, lengths = [one.lower for one in exits], sorted(cfg.exits.draft_lengths)
    times = measure_exits(model, lower, lengths, context, rows, repeats)
    found = [entry for temperature in cfg.temperatures for entry in _at(cfg, model, exits, times, temperature, prompts)]
    return found, times.t_target_1


def _at(
    cfg: EvalConfig, model: Any, exits: list[Exit], times: Any, temperature: float, prompts: list[Prompt]
) -> list[Entry]:
    write = alone(cfg, model, temperature, f"target alone at T={temperature:g}")
    texts: list[Text] = write(jobs_for(prompts, cfg.decode.max_new_tokens))
    faces = {one.name: ExitFace(model, one) for one in exits}
    alphas = measure_alpha(model, faces, texts, sampling_at(cfg, temperature))
    return entries(exits, alphas, times, temperature, [text.row for text in texts], cfg.seed)
