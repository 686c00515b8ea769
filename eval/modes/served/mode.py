"""`mode=served`: export and check the drafts, ask servers of the engine, count and time the same here, write a page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from decode.common.errors import ConfigError
from decode.common.progress import get_logger
from decode.models.describe import ModelDescription
from distill.engines.worker_process import check_python
from eval.config import EvalConfig
from eval.inputs import check_models, shared_context
from eval.measure.cells import Results
from eval.modes.served.counting import Texts
from eval.modes.served.document import make_results
from eval.modes.served.engine.jobs import Job, check_server, do, jobs
from eval.modes.served.folders import check_drafts, prepare
from eval.modes.served.here import measure_here
from eval.modes.served.kept import Asked
from eval.modes.served.page import page_of
from eval.prompts.chats import chat_tokenizer
from eval.prompts.held_out import as_many_as
from eval.prompts.prompt import Prompt, check_room
from eval.render.files import write_files
from eval.render.formatting import count, duration
from eval.report_folder import planned_report

log = get_logger("eval")
_LEAST_PROMPTS = 2
_START_S = 30.0
"""Seconds that a server takes to start, as an order of magnitude."""


def run(cfg: EvalConfig) -> None:
    """Compare drafts in an engine with ours and write results.json, summary.md and index.html to cfg.output_dir, where
    exported drafts (exports/NAME) and logs of servers lie too.

    Raises ConfigError and InputError before any server is started where it can be known, and InputError where a server
    does not start, dies, or serves another model. resume=auto keeps what was answered.
    """
    _check(cfg)
    target, _ = check_models(cfg)
    if cfg.served.url is None:
        check_python(cfg.served.python, "served.python", "ask a running server by served.url=")
    else:
        check_server(cfg)
    check_drafts(cfg, target)
    prompts = _prompts(cfg, target)
    with planned_report(cfg, plan_lines(cfg, prompts)) as folder:
        if folder is None:
            return
        drafts = [prepare(cfg, name, target, folder.file(f"exports/{name}")) for name in cfg.drafts]
        results, ids = Results(folder), [prompt.ids for prompt in prompts]
        asked = _ask_all(cfg, results, jobs(cfg, drafts), ids)
        here = measure_here(cfg, results, drafts, asked, ids)
        found = make_results(cfg, target, drafts, prompts, asked, here)
        content = found.model_dump(by_alias=True)
        write_files(folder, page_of(content))
        folder.finish({"drafts": len(drafts), "servers": len(asked)})
        for one in found.schedules:
            log.info("%s: what to paste, %s:\n%s", one.draft, one.pastes[0].why, one.pastes[0].text)
        log.info("report: %s", folder.file("index.html"))


def _check(cfg: EvalConfig) -> None:
    usual = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "tree": "chain", "adaptive": False}
    changed = [f"decode.{name}" for name, value in usual.items() if getattr(cfg.decode, name) != value]
    if changed:
        raise ConfigError(
            f"{', '.join(changed)}: mode=served compares chains of one length without filters, which all engines draft "
            "and verify alike; leave that out"
        )
    if cfg.served.url is not None and len(cfg.drafts) > 1:
        raise ConfigError(
            f"served.url={cfg.served.url} drafts with one draft, and drafts names {', '.join(cfg.drafts)}; name the "
            "one that the server was started with"
        )


def _prompts(cfg: EvalConfig, target: ModelDescription) -> list[Prompt]:
    prompts = as_many_as(cfg, chat_tokenizer(cfg), cfg.served.prompts)
    if len(prompts) < _LEAST_PROMPTS:
        raise ConfigError(
            f"there is {count(len(prompts), 'prompt')}, and intervals are over prompts; give more of them"
        )
    longest = max(cfg.decode.max_new_tokens, cfg.served.timed_tokens)
    drafted = max(cfg.decode.num_draft_tokens, *cfg.served.draft_lengths, 1)
    check_room(prompts, longest + 2 * (drafted + 1), shared_context(cfg, target))
    return prompts


def plan_lines(cfg: EvalConfig, prompts: Sequence[Prompt]) -> list[str]:
    """For a person."""
    own = cfg.served
    lengths = sorted({cfg.decode.num_draft_tokens, *own.draft_lengths})
    starts = (1 + len(cfg.drafts) * (1 + len(lengths))) * own.rounds if own.batch_sizes else len(cfg.drafts)
    where = f"the server at {own.url}" if own.url else f"{count(starts, 'server')} at most, one after another"
    temperatures = ", ".join(f"{one:g}" for one in cfg.temperatures)
    speeds = f"batch sizes {own.batch_sizes}, drafts of {lengths} tokens, {count(own.rounds, 'round')}"
    return [
        f"drafts: {', '.join(cfg.drafts)}; engine: {own.engine}, {where}",
        f"compared: {len(prompts)} prompts, {cfg.decode.max_new_tokens} new tokens each, T {temperatures}, "
        f"{cfg.decode.num_draft_tokens} draft tokens",
        f"timed: {speeds if own.batch_sizes else 'nothing'}",
        *([] if own.url else [f"time: {duration(starts * _START_S)} for starting small models, and what they answer"]),
    ]


def _ask_all(cfg: EvalConfig, results: Results, every: Sequence[Job], prompts: Texts) -> list[Asked]:
    """What each server answered, asked now where it is not kept."""
    found, began, done = [], time.perf_counter(), 0
    for number, job in enumerate(every):
        kept = results.read(job.file)
        if kept is not None:
            found.append(Asked.model_validate(kept))
        else:
            found.append(do(cfg, job, prompts, results.folder.file(f"logs/{Path(job.file).stem}.log")))
            results.keep(job.file, found[-1].model_dump())
            done += 1
            left = (time.perf_counter() - began) / done * (len(every) - number - 1)
            log.info("server %d of %d done (%s); about %s left", number + 1, len(every), job.name, duration(left))
    return found
