"""The stage: check everything that can be checked, measure quality, then speed, then write the report."""

from __future__ import annotations

import gc
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from decode import load_drafter
from decode.config import ModelConfig
from decode.drafters.load import PROVENANCE, family_of, model_folder
from decode.house.errors import InputError
from decode.house.progress import get_logger
from decode.house.run_folder import RunFolder, open_run, read_json, write_json
from decode.models import ModelDescription, check_same_tokens, describe_model, load_model, load_tokenizer
from distill.config import DataConfig
from eval.config import EvalConfig
from eval.curves import training_curves
from eval.page import render_page
from eval.plan import make_plan
from eval.prompts import PromptSets, check_lengths, load_prompts
from eval.quality import Quality, measure_curve, measure_quality, with_answers
from eval.report import Measured, make_results
from eval.speed import Timed, measure_speed
from eval.summary import render_summary
from eval.teacher_forced import Alphas
from eval.tracking import check_tracking, track_report

log = get_logger("eval")


def run(cfg: EvalConfig) -> None:
    """Measure the target with its drafts and write results.json, summary.md and index.html to cfg.output_dir.

    Raises ConfigError and InputError before any weight is loaded.
    """
    transformers_logging.set_verbosity_error()  # its advice on generate() is about calls that it makes itself
    transformers_logging.disable_progress_bar()
    check_tracking(cfg)
    target, families = check_models(cfg)
    limit = min(
        target.max_positions, *(describe_model(_draft(cfg, name), "draft").max_positions for name in cfg.drafts)
    )
    prompts = load_prompts(cfg, load_tokenizer(cfg.target), limit)
    if cfg.plan:
        sys.stdout.write("\n".join(make_plan(cfg, target, prompts).lines()) + "\n")
        return
    folder = open_run(cfg.output_dir, "eval", cfg, cfg.resume)
    if folder.is_finished:
        log.info("%s is already finished", folder.path)
        return
    for line in make_plan(cfg, target, prompts).lines():
        log.info(line)
    began = time.perf_counter()
    prompts, quality, curve = _quality(cfg, prompts, limit)
    timed, dtype = _speed(cfg, prompts)
    measured = Measured(prompts, quality, curve, timed, target, families, dtype, time.perf_counter() - began)
    _write(cfg, folder, make_results(cfg, measured))


def check_models(cfg: EvalConfig) -> tuple[ModelDescription, dict[str, str]]:
    """The target's description and each draft's family; InputError where a draft's tokens are not the target's."""
    target = describe_model(cfg.target)
    families = {}
    for name in cfg.drafts:
        draft = describe_model(_draft(cfg, name), f"drafts.{name}")
        check_same_tokens(target, draft)
        families[name] = family_of(draft.path)
        if cfg.prompts.file is None:
            check_held_out(cfg.data, name, draft.path)
    return target, families


def check_held_out(data: DataConfig, name: str, draft: str) -> None:
    """Raise InputError where the draft was trained on the same corpus under other shares: held-out text would be
    seen."""
    file = Path(draft) / PROVENANCE
    trained = (read_json(file).get("data") if file.is_file() else None) or {}
    if any(trained.get(key) != getattr(data, key) for key in ("name", "path", "subset")):
        return
    for key in ("heldout_share", "validation_share"):
        if trained[key] != getattr(data, key):
            raise InputError(
                f"drafts.{name}={draft} was trained with data.{key}={trained[key]}, and this report draws its prompts "
                f"with data.{key}={getattr(data, key)}: part of them was trained on. Give data.{key}={trained[key]}"
            )


def _draft(cfg: EvalConfig, name: str) -> ModelConfig:
    return ModelConfig(path=str(model_folder(cfg.drafts[name])))


def _quality(
    cfg: EvalConfig, prompts: PromptSets, limit: int
) -> tuple[PromptSets, dict[tuple[float, str], Quality], dict[tuple[float, str], Alphas]]:
    """alpha and losslessness in cfg.lossless.dtype; conversations get their later turns here."""
    dtype = cfg.target.dtype if cfg.lossless.dtype == "auto" else cfg.lossless.dtype
    model, drafters = _load(cfg, replace(cfg.target, dtype=dtype))
    if any(prompt.later for prompt in prompts.reported):
        reported = with_answers(cfg, model, load_tokenizer(cfg.target), prompts.reported)[: cfg.lossless.prompts]
        check_lengths(reported, cfg, limit)
        prompts = PromptSets(reported, min(cfg.timing.prompts, len(reported)), prompts.screening)
    quality = measure_quality(cfg, model, drafters, prompts.reported)
    curve = measure_curve(cfg, model, drafters, prompts.reported, quality)
    return prompts, quality, curve


def _speed(cfg: EvalConfig, prompts: PromptSets) -> tuple[dict[float, Timed], str]:
    """The timed runs in the target's own precision, after the models of the first half are gone."""
    _forget()
    model, drafters = _load(cfg, cfg.target)
    return measure_speed(cfg, model, drafters, prompts), str(model.dtype).removeprefix("torch.")


def _load(cfg: EvalConfig, source: ModelConfig) -> tuple[PreTrainedModel, dict[str, Any]]:
    model = load_model(source)
    return model, {name: load_drafter(path, target=model) for name, path in cfg.drafts.items()}


def _forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _write(cfg: EvalConfig, folder: RunFolder, results: dict[str, Any]) -> None:
    curves = training_curves(cfg.drafts)
    write_json(folder.file("results.json"), results)
    folder.file("summary.md").write_text(render_summary(results), encoding="utf-8")
    folder.file("index.html").write_text(render_page(results, curves), encoding="utf-8")
    track_report(cfg, folder.path, results)
    folder.finish({"rows": len(results["rows"])})
    log.info("report: %s", folder.file("index.html"))
