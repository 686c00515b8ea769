"""`mode=runtimes`: make the same records by every way, round by round, each in a process of its own; write a page."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from decode.common.progress import get_logger
from decode.common.run_folder import open_run
from decode.models.load import describe_model
from eval.config import EvalConfig
from eval.measure.cells import Results
from eval.modes.runtimes.arms import check_arms, make
from eval.modes.runtimes.page import render_page, render_summary
from eval.modes.runtimes.results import make_results, net
from eval.render.files import write_files
from eval.render.formatting import count

log = get_logger("eval")


def run(cfg: EvalConfig) -> None:
    """Time every arm and write results.json, summary.md and index.html to cfg.output_dir, where logs of the runs lie
    too.

    Raises ConfigError and InputError before anything is made, RunError where a run fails. resume=auto keeps what was
    made.
    """
    target = describe_model(cfg.target)
    left_out = check_arms(cfg, Path(cfg.output_dir) / "records")
    arms = [arm for arm in cfg.runtimes.arms if arm not in left_out]
    if cfg.plan:
        sys.stdout.write("\n".join(plan_lines(cfg, arms, left_out)) + "\n")
        return
    with open_run(cfg.output_dir, "eval", cfg, cfg.resume) as folder:
        if folder.is_finished:
            return
        for line in plan_lines(cfg, arms, left_out):
            log.info(line)
        content = make_results(cfg, target, left_out, _made(cfg, arms, Results(folder)), folder.started)
        write_files(folder, content, render_summary(content), render_page(content))
        folder.finish({"arms": len(arms), "left_out": left_out})
        log.info("report: %s", folder.file("index.html"))


def plan_lines(cfg: EvalConfig, arms: Sequence[str], left_out: Mapping[str, str]) -> list[str]:
    """For a person."""
    own = cfg.runtimes
    runs = len(arms) * len(own.kinds) * own.rounds
    return [
        f"arms: {', '.join(arms)}; kinds of record: {', '.join(own.kinds)}",
        *(f"left out: {arm} {why}" for arm, why in left_out.items()),
        f"{count(runs, 'run')} of python -m distill, {count(own.rounds, 'round')}, each in a process of its own",
    ]


def turns(cfg: EvalConfig, arms: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """(round, kind, arm) of every run: all arms make a kind one after another, and another one begins each time."""
    for number in range(cfg.runtimes.rounds):
        for kind in cfg.runtimes.kinds:
            begin = number % len(arms)
            yield from ((number, kind, arm) for arm in [*arms[begin:], *arms[:begin]])


def _made(cfg: EvalConfig, arms: Sequence[str], results: Results) -> list[dict[str, Any]]:
    """What each run took, made now where it is not kept."""
    found, every = [], list(turns(cfg, arms))
    for done, (number, kind, arm) in enumerate(every):
        name = f"{kind}-{arm}-{number}"
        kept = results.read(f"made/{name}.json")
        if kept is None:
            files = results.folder.file("records"), results.folder.file(f"logs/{name}.log")
            kept = {"round": str(number), "kind": kind, "arm": arm, **make(cfg, arm, kind, *files)}
            results.keep(f"made/{name}.json", kept)
        log.info("run %d of %d: %s of %s, %.0f tokens/s", done + 1, len(every), kind, arm, net(kept))
        found.append(kept)
    return found
