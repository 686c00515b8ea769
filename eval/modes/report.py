"""The report: check everything that can be checked, measure quality, then speed, then write the page."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

from decode.common.checked_json import write_json
from decode.common.progress import get_logger
from decode.common.run_folder import RunFolder, open_run
from decode.models.load import load_tokenizer
from eval.config import EvalConfig
from eval.inputs import check_models, load, shared_context
from eval.measure.alpha import Alphas
from eval.measure.draft_length import choice_prompts, with_chosen_length
from eval.measure.quality import Quality, measure_curve, measure_quality, with_answers
from eval.measure.speed import Timed, measure_speed
from eval.plan import make_plan
from eval.prompts.held_out import PromptSets, check_lengths, load_prompts
from eval.render.report_page import render_page, render_summary
from eval.render.tracking import track_report
from eval.results.document import Measured, make_results
from eval.results.training_curves import training_curves

log = get_logger("eval")


def run(cfg: EvalConfig) -> None:
    """Measure the target with its drafts and write results.json, summary.md and index.html to cfg.output_dir.

    Raises ConfigError and InputError before any weight is loaded.
    """
    target, families = check_models(cfg)
    limit = shared_context(cfg, target)
    tokenizer = load_tokenizer(cfg.target)
    prompts = load_prompts(cfg, tokenizer, limit)
    chosen_on = choice_prompts(cfg, tokenizer, prompts)
    if cfg.plan:
        sys.stdout.write("\n".join(make_plan(cfg, target, prompts).lines()) + "\n")
        return
    with open_run(cfg.output_dir, "eval", cfg, cfg.resume) as folder:
        if folder.is_finished:
            return
        for line in make_plan(cfg, target, prompts).lines():
            log.info(line)
        began = time.perf_counter()
        cfg, choice = with_chosen_length(cfg, chosen_on)
        prompts, quality, curve = _quality(cfg, prompts, limit)
        timed, dtype = _speed(cfg, prompts)
        seconds = time.perf_counter() - began
        measured = Measured(prompts, quality, curve, timed, target, families, dtype, seconds, choice)
        _write(cfg, folder, make_results(cfg, measured))


def _quality(
    cfg: EvalConfig, prompts: PromptSets, limit: int
) -> tuple[PromptSets, dict[tuple[float, str], Quality], dict[tuple[float, str], Alphas]]:
    """alpha and losslessness in cfg.lossless.dtype; conversations get their later turns here."""
    dtype = cfg.target.dtype if cfg.lossless.dtype == "auto" else cfg.lossless.dtype
    model, drafters = load(cfg, replace(cfg.target, dtype=dtype))
    if any(prompt.later for prompt in prompts.reported):
        reported = with_answers(cfg, model, load_tokenizer(cfg.target), prompts.reported)[: cfg.lossless.prompts]
        check_lengths(reported, cfg, limit)
        prompts = PromptSets(reported, min(cfg.timing.prompts, len(reported)), prompts.screening)
    quality = measure_quality(cfg, model, drafters, prompts.reported)
    curve = measure_curve(cfg, model, drafters, prompts.reported, quality)
    return prompts, quality, curve


def _speed(cfg: EvalConfig, prompts: PromptSets) -> tuple[dict[float, Timed], str]:
    """The timed runs in the target's own precision, after the models of the first half are gone."""
    model, drafters = load(cfg, cfg.target)
    return measure_speed(cfg, model, drafters, prompts), str(model.dtype).removeprefix("torch.")


def _write(cfg: EvalConfig, folder: RunFolder, results: dict[str, Any]) -> None:
    curves = training_curves(cfg.drafts)
    write_json(folder.file("results.json"), results)
    folder.file("summary.md").write_text(render_summary(results), encoding="utf-8")
    folder.file("index.html").write_text(render_page(results, curves), encoding="utf-8")
    track_report(cfg, folder.path, results)
    folder.finish({"rows": len(results["rows"])})
    log.info("report: %s", folder.file("index.html"))
