"""`mode=report`: alpha and losslessness of every draft, then all arms timed at each temperature, then the page; and
what that would be, before anything is loaded."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from decode.common.progress import get_logger
from decode.common.run_folder import RunFolder
from decode.models.describe import ModelDescription
from decode.models.load import load_model
from eval.arms.base import ASSISTED, AUTOREGRESSIVE, TRANSFORMERS, UNQUANTISED, Arm
from eval.arms.ours import OurArm, assisted_arms, assisted_refusal, drafting, our_arm, plain_arms, renamed
from eval.arms.transformers_arms import assisted_settings
from eval.config import EvalConfig
from eval.inputs import check_models, load, rough_seconds_per_token, settings_at, shared_context
from eval.measure.alpha import Alphas
from eval.measure.cells import Cell, CellRun, Point, Results, choose
from eval.measure.quality import Quality, measure_curve, measure_quality, rounding, with_answers
from eval.measure.timed_run import sharing_captures, warm_up
from eval.prompts.chats import chat_tokenizer
from eval.prompts.held_out import PromptSets, check_lengths, load_prompts
from eval.render.files import track_report, write_files
from eval.render.formatting import guess
from eval.render.plots import training_curves
from eval.render.remarks import remarks
from eval.render.report_page import page_of
from eval.report_folder import planned_report
from eval.results.compared import Choice
from eval.results.document import LENGTH, MeasuredReport, draft_lengths, make_results, scopes
from eval.results.figures import Drafted
from eval.results.headline import HEADLINE, arm_name, headline_row, rivals
from eval.results.reported import Report

log = get_logger("eval")
_BATCH_GAIN = 6.0
"""How much faster than one by one a batch goes, in tokens per second."""


def run(cfg: EvalConfig) -> None:
    """Measure the target with its drafts and write results.json, summary.md and index.html to cfg.output_dir.

    Raises ConfigError and InputError before any weight is loaded. resume=auto keeps what was chosen and every
    temperature that is timed; the rest is measured again, to the same figures.
    """
    target, families = check_models(cfg)
    limit = shared_context(cfg, target)
    prompts = load_prompts(cfg, chat_tokenizer(cfg), limit)
    with planned_report(cfg, make_plan(cfg, target, prompts, next(iter(families.values()))).lines()) as folder:
        if folder is None:
            return
        kept = Results(folder)
        choices = _choices(cfg, prompts, kept)
        cfg = with_chosen_length(cfg, choices[0].best)
        began = time.perf_counter()
        prompts, quality, curve = _quality(cfg, prompts, limit)
        seconds = time.perf_counter() - began
        cells = _cells(cfg, prompts, families, choices, kept)
        measured = MeasuredReport(prompts, quality, curve, cells, choices, target, seconds, folder.started)
        _write(cfg, folder, make_results(cfg, measured))


def points(cfg: EvalConfig) -> list[Point]:
    """Where settings are chosen and arms timed: one batch size, every temperature."""
    return [Point(cfg.timing.batch_size, temperature) for temperature in cfg.temperatures]


def _choices(cfg: EvalConfig, prompts: PromptSets, kept: Results) -> list[Choice]:
    """By temperature, the draft length (at the first one) and the peer's setting; all kept."""
    if any(kept.choice(point) is None for point in points(cfg)):
        model, drafters = load(cfg, cfg.target)
        for point in points(cfg):
            if kept.choice(point) is None:
                candidates = _candidates(CellRun(cfg, model, drafters), point)
                kept.keep_choice(point, choose(cfg, point, candidates, prompts.screening))
    return [Choice.model_validate(kept.choice(point)) for point in points(cfg)]


def _candidates(run: CellRun, point: Point) -> dict[str, dict[str, Arm]]:
    cfg, (draft, drafter) = run.cfg, next(iter(run.drafters.items()))
    found: dict[str, dict[str, Arm]] = {}
    if point.temperature == cfg.temperatures[0] and cfg.timing.choose_k:
        found[LENGTH] = {
            str(k): our_arm(arm_name(draft, k), run.model, drafter, drafting(cfg, point.temperature, k))
            for k in dict.fromkeys(cfg.timing.choose_k)
        }
    if cfg.headline.drafts:
        found[HEADLINE] = {
            one.arm: our_arm(one.arm, run.model, run.drafters[one.draft], one.settings)
            for one in rivals(cfg, point.temperature)
        }
    refusal = assisted_refusal(cfg, drafter)
    if refusal is None:
        found[ASSISTED] = assisted_arms(cfg, run.model, drafter, point.temperature)
    elif point.temperature == cfg.temperatures[0]:
        log.info("no peer in this run: %s", refusal)
    return found


def with_chosen_length(cfg: EvalConfig, best: Mapping[str, str]) -> EvalConfig:
    """The configuration with the fastest of timing.choose_k, where it names any."""
    if LENGTH not in best:
        return cfg
    log.info("draft length %s, chosen on prompts that are not reported", best[LENGTH])
    return replace(cfg, decode=replace(cfg.decode, num_draft_tokens=int(best[LENGTH])))


def _quality(
    cfg: EvalConfig, prompts: PromptSets, limit: int
) -> tuple[PromptSets, dict[tuple[float, str], Quality], dict[tuple[float, str], Alphas]]:
    """alpha and losslessness in cfg.lossless.dtype; conversations get their later turns here."""
    dtype = cfg.target.dtype if cfg.lossless.dtype == "auto" else cfg.lossless.dtype
    model, drafters = load(cfg, replace(cfg.target, dtype=dtype))
    if any(prompt.later for prompt in prompts.reported):
        reported = with_answers(cfg, model, chat_tokenizer(cfg), prompts.reported)[: cfg.lossless.prompts]
        check_lengths(reported, cfg, limit)
        prompts = PromptSets(reported, min(cfg.timing.prompts, len(reported)), prompts.screening)
    quality = measure_quality(cfg, model, drafters, prompts.reported)
    curve = measure_curve(cfg, model, drafters, prompts.reported, quality)
    return prompts, quality, curve


def _cells(
    cfg: EvalConfig,
    prompts: PromptSets,
    families: Mapping[str, str],
    choices: list[Choice],
    kept: Results,
) -> list[dict[str, Any]]:
    """The timed runs in the target's own precision, after the models of the first half are gone; all kept."""
    cells = [Cell(one.batch_size, one.temperature, cfg.prompts.label) for one in points(cfg)]
    if any(True for _ in kept.missing(cells)):
        run = CellRun(cfg, *load(cfg, cfg.target))
        before = load_model(replace(cfg.target, quantization=None)) if cfg.peers.unquantised else None
        for cell, choice in zip(cells, choices, strict=True):
            if kept.cell(cell) is None:
                kept.keep_cell(cell, time_cell(run, cell, choice.best, prompts, families, before))
    return [kept.cell(cell) or {} for cell in cells]


def time_cell(
    run: CellRun,
    cell: Cell,
    best: Mapping[str, str],
    prompts: PromptSets,
    families: Mapping[str, str],
    before: PreTrainedModel | None = None,
) -> dict[str, Any]:
    """Both baselines, every draft at its lengths, what competes for the headline, the peer at its `best` setting, and
    the target `before` it was quantised."""
    cfg, chosen = run.cfg, run.cfg.decode.num_draft_tokens
    drafted = [
        Drafted(arm_name(draft, k), families[draft], draft, drafting(cfg, cell.temperature, k))
        for draft in run.drafters
        for k in draft_lengths(cfg, cell.temperature, draft)
    ]
    drafted += [
        Drafted(one.arm, families[one.draft], one.draft, one.settings, one.setting)
        for one in rivals(cfg, cell.temperature)
        if one.setting is not None
    ]
    arms = [
        *plain_arms(cfg, run.model, cell.temperature),
        *(our_arm(one.arm, run.model, run.drafters[one.draft], one.settings) for one in drafted),
    ]
    if ASSISTED in best:
        tried = assisted_arms(cfg, run.model, next(iter(run.drafters.values())), cell.temperature)
        arms.append(renamed(tried[best[ASSISTED]], ASSISTED))
    if before is not None:
        arms.append(OurArm(UNQUANTISED, before, None, settings_at(cfg, cell.temperature)))
    judged = [one.arm for one in drafted if one.settings.num_draft_tokens == chosen or one.setting is not None]
    longest = max(len(one.ids) for one in [*prompts.timed, *prompts.screening]) + cfg.decode.max_new_tokens
    with sharing_captures(longest, cell.batch_size):
        warm_up(arms, prompts.screening, cell.batch_size, cfg.seed, others=prompts.timed)
        content = run.time(cell, arms, drafted, prompts.timed, scopes(cfg, prompts), judged)
    if before is not None:
        content["unquantised"] = rounding(run.model, before, prompts.reported)
    return content


def _write(cfg: EvalConfig, folder: RunFolder, results: dict[str, Any]) -> None:
    found = Report.model_validate(results)
    write_files(folder, page_of(results, training_curves(cfg.drafts)))
    track_report(cfg, folder.path, results)
    row = headline_row(found) or found.rows[0]
    folder.finish({"rows": len(found.rows), "speedup": row.speedup, "alpha": row.alpha, "tau": row.tau})
    for sentence in remarks(found):
        log.info(sentence)
    log.info("report: %s", folder.file("index.html"))


@dataclass(frozen=True)
class Plan:
    """Counts of one report."""

    arms: dict[float, list[str]]
    choose_k: list[int]
    prompts: PromptSets
    timed_tokens: int
    checked_tokens: int
    screened_tokens: int
    seconds: float

    def lines(self) -> list[str]:
        """For a person."""
        sets = self.prompts
        arms = [f"  T={temperature:g}: {', '.join(names)}" for temperature, names in self.arms.items()]
        return [
            "arms, timed prompt by prompt in one run:",
            *arms,
            *([f"k is chosen first, among {self.choose_k}, on other prompts"] if self.choose_k else []),
            f"prompts: {len(sets.timed)} timed, {len(sets.reported)} checked, {len(sets.screening)} for "
            "settings and warm-up",
            f"tokens: {self.timed_tokens:,} timed, {self.checked_tokens:,} checked and for alpha, "
            f"{self.screened_tokens:,} screened",
            f"time: {guess(self.seconds)}",
        ]


def make_plan(cfg: EvalConfig, target: ModelDescription, prompts: PromptSets, family: str) -> Plan:
    """Upper bounds: texts may end before their limit. `family` is the first draft's."""
    is_assisted = assisted_refusal(cfg, family=family) is None
    arms = {temperature: _arm_names(cfg, temperature, is_assisted) for temperature in cfg.temperatures}
    calls = cfg.timing.rounds * len(prompts.timed) * sum(len(names) for names in arms.values())
    timed = calls * cfg.decode.max_new_tokens
    checked = _checked_tokens(cfg, len(prompts.reported))
    screened = len(cfg.timing.choose_k) * len(prompts.screening) * cfg.timing.screening_tokens
    competing = sum(len(rivals(cfg, temperature)) for temperature in cfg.temperatures)
    screened += competing * len(prompts.screening) * cfg.timing.screening_tokens
    if is_assisted:
        per_temperature = len(assisted_settings(cfg.peers)) * len(prompts.screening) * cfg.timing.screening_tokens
        screened += per_temperature * len(cfg.temperatures)
    per_token = rough_seconds_per_token(target, cfg.target.device)
    seconds = per_token * ((timed + screened) / 1.3 + 2 * checked / _BATCH_GAIN)
    return Plan(arms, cfg.timing.choose_k, prompts, timed, checked, screened, seconds)


def _arm_names(cfg: EvalConfig, temperature: float, is_assisted: bool) -> list[str]:
    drafts = [arm_name(draft, k) for draft in cfg.drafts for k in draft_lengths(cfg, temperature, draft)]
    drafts += [one.arm for one in rivals(cfg, temperature) if one.setting is not None]
    peers = [ASSISTED] if is_assisted else []
    before = [UNQUANTISED] if cfg.peers.unquantised else []
    return [AUTOREGRESSIVE, TRANSFORMERS, *before, *drafts, *peers]


def _checked_tokens(cfg: EvalConfig, prompts: int) -> int:
    main = prompts * cfg.lossless.tokens
    others = len(cfg.temperatures) * len(cfg.drafts) - 1 + len(set(cfg.curve_temperatures) - set(cfg.temperatures))
    return main + others * min(prompts, cfg.lossless.other_prompts) * cfg.lossless.other_tokens
