"""Which servers are started one after another, and what each of them is asked; kept as soon as it is answered."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from decode.common.environment import resolve_device
from decode.common.errors import ConfigError, InputError
from decode.common.progress import get_logger
from decode.config import ModelConfig
from distill.engines.server import running
from distill.engines.vllm_command import serve_command
from distill.engines.worker_process import environment_of
from eval.config import EvalConfig
from eval.measure.energy import EnergyMeter, energy_meter
from eval.modes.served.comparison import ask, first_places
from eval.modes.served.counting import Texts
from eval.modes.served.engine.server import Server, complete, found, models
from eval.modes.served.kept import Asked, Timed
from eval.modes.served.schedule.in_vllm import SCHEDULED, held_at
from eval.results.energy import energy_entry

if TYPE_CHECKING:
    from eval.modes.served.folders import ServedDraft

LEAST_REQUESTS = 8
"""Timed at every batch size: one alone says little."""
TURNS = 3
"""Times that each batch size is timed in a server, in turn with the others; the middle one counts: on a machine with
other work single seconds are off by a half."""
_WARM_UP_TOKENS = 8
log = get_logger("eval")


@dataclass(frozen=True)
class Job:
    """One start of a server."""

    draft: ServedDraft | None
    """None serves the target alone."""
    k: int
    """Draft tokens of a round."""
    longest: int
    """Of all that this draft is measured at."""
    round: int
    """Number of the start."""

    @property
    def name(self) -> str:
        """For files and messages."""
        return f"{'no draft' if self.draft is None else self.draft.name}, k={self.k}, round {self.round + 1}"

    @property
    def file(self) -> str:
        """Of what is kept."""
        draft = "alone" if self.draft is None else f"draft-{self.draft.name}"
        return f"servers/{draft}-k{self.k}-{self.round}.json"

    @property
    def compares(self) -> bool:
        """Whether accepted tokens are compared there."""
        return self.draft is not None and self.round == 0 and self.k == self.draft.compared


def jobs(cfg: EvalConfig, drafts: Sequence[ServedDraft]) -> list[Job]:
    """All of them: those of a round one after another, so that each length is timed at several times of the day. k = 0
    with a draft is what a schedule can say of those that follow one."""
    own = cfg.served
    found = []
    for number in range(own.rounds if own.batch_sizes else 1):
        if own.batch_sizes and own.url is None:
            found.append(Job(None, 0, 0, number))
        for draft in drafts:
            found += [Job(draft, k, max(draft.lengths), number) for k in _lengths(cfg, draft)]
    return found


def _lengths(cfg: EvalConfig, draft: ServedDraft) -> list[int]:
    if cfg.served.url is not None or not cfg.served.batch_sizes:
        return [draft.compared]
    return [*([0] if draft.method in SCHEDULED else []), *draft.lengths]


def do(cfg: EvalConfig, job: Job, prompts: Texts, log_file: Path) -> Asked:
    """Start the server of `job`, compare and time there."""
    began = time.perf_counter()
    with _server(cfg, job, log_file) as server:
        ready = time.perf_counter()
        answers = {}
        if job.compares:
            for temperature in cfg.temperatures:
                label = f"{job.name}, T={temperature:g}"
                tokens = cfg.decode.max_new_tokens
                answers[f"{temperature:g}"] = ask(server, prompts, tokens, temperature, cfg.seed, job.k, label)
        version = server.version()
        turns = [[_timed(cfg, server, job, size, prompts) for size in cfg.served.batch_sizes] for _ in range(TURNS)]
        speeds = [sorted(each, key=lambda one: one.tokens_per_s)[TURNS // 2] for each in zip(*turns, strict=True)]
    return Asked(
        draft=None if job.draft is None else job.draft.name,
        k=job.k,
        round=job.round,
        version=version,
        answers=answers,
        speeds=speeds,
        start_s=ready - began,
        seconds=time.perf_counter() - began,
    )


def _timed(cfg: EvalConfig, server: Server, job: Job, size: int, prompts: Texts) -> Timed:
    """Requests answered `size` at once, after some that are not timed."""
    number = -(-max(size, LEAST_REQUESTS) // size) * size
    asked = [prompts[row % len(prompts)] for row in range(number)]
    temperature, tokens = cfg.temperatures[0], cfg.served.timed_tokens
    complete(server, asked[:size], _WARM_UP_TOKENS, temperature, None, size)
    before = server.counters()
    meter = _meter(cfg)
    done, joules = meter.around(partial(complete, server, asked, tokens, temperature, None, size))
    counters = first_places(server.counters_since(before), job.k)
    return Timed(
        batch_size=size,
        requests=number,
        tokens=done.tokens,
        seconds=done.seconds,
        energy=energy_entry(
            f"{cfg.served.engine}, batch {size}, T={temperature:g}",
            "no draft" if job.draft is None else f"{job.draft.name}, k={job.k}",
            None if joules is None else [[joules, float(done.tokens)]],
            meter,
            cfg.seed,
        ),
        counters=counters,
    )


def _meter(cfg: EvalConfig) -> EnergyMeter:
    """Of the machine that the server runs on, where it is this one."""
    if cfg.served.url is not None and cfg.timing.watts is None:
        reason = (
            f"counters of this machine say nothing of the server at {cfg.served.url}; timing.watts gives an estimate"
        )
        return EnergyMeter(reason=reason)
    return energy_meter(cfg.timing.watts, [resolve_device(cfg.target.device)])


@contextmanager
def _server(cfg: EvalConfig, job: Job, log_file: Path) -> Iterator[Server]:
    if cfg.served.url is not None:
        yield found(cfg.served.url)
        return
    log.info("starting a server: %s; its log is %s", job.name, log_file)
    environment, seconds = environment_of(cfg.served.python), cfg.served.start_minutes * 60
    with running(command(cfg, job), environment, log_file, seconds) as started:
        yield found(started.url, started)


def command(cfg: EvalConfig, job: Job) -> list[str]:
    """Of the server of a job."""
    target, draft, speculation = cfg.target.path, [], {}
    assert target is not None
    if job.draft is not None:
        target, draft = job.draft.target or target, list(job.draft.options)
        speculation = held_at(job.draft.method, job.k, job.longest)
    options = [*target_options(cfg.target), *cfg.served.options]
    return serve_command(cfg.served.python, target, draft, options, speculation)


def target_options(target: ModelConfig) -> list[str]:
    """How the engine is told what `target` says besides its path."""
    words = [] if target.dtype == "auto" else ["--dtype", target.dtype]
    if target.revision is not None:
        words += ["--revision", target.revision, "--tokenizer-revision", target.revision]
    return [*words, "--trust-remote-code"] if target.trust_remote_code else words


def check_server(cfg: EvalConfig) -> None:
    """InputError unless the server at served.url serves target.path, drafts, and drafts decode.num_draft_tokens."""
    url, own = cfg.served.url, cfg.target.path
    assert url is not None
    assert own is not None
    server = found(url)
    listed = models(server)
    names = {str(name) for one in listed for name in (one.id, one.root)}
    expected = cfg.served.model or own
    if expected not in names and not any(_same_folder(expected, name) for name in names):
        raise InputError(
            f"served.url={url} serves {', '.join(sorted(names))}, and the target is {expected}. Start it with {own}; "
            f"or, where that is the same model by another name, give served.model={listed[0].id}"
        )
    _check_length(cfg, server)


def _same_folder(one: str, other: str) -> bool:
    return Path(one).is_dir() and Path(other).is_dir() and Path(one).resolve() == Path(other).resolve()


def _check_length(cfg: EvalConfig, server: Server) -> None:
    """The engine counts by position, as many as it drafts."""
    complete(server, [[1, 2, 3]], 2, 0.0, None, 1)
    k, asked = len(server.counters().accepted), cfg.decode.num_draft_tokens
    if k == 0:
        raise InputError(
            f"served.url={server.url} drafts nothing: its /metrics has no vllm:spec_decode counters. Start it with "
            "--speculative-config, as python -m train.export prints it, and without --disable-log-stats"
        )
    if k != asked:
        raise ConfigError(
            f"served.url={server.url} drafts {k} tokens a round, and decode.num_draft_tokens={asked}; give "
            f"decode.num_draft_tokens={k}, so that both draft alike"
        )
