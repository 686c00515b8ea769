"""The command line of every stage: Hydra composes, our dataclass checks, then the stage's code is imported."""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TextIO

from decode.common.compose import compose, wants_sweep
from decode.common.environment import keep_freed_memory
from decode.common.errors import ConfigError, RunError, UserError
from decode.common.progress import is_main_process
from decode.common.stage_help import HELP_FLAGS, help_text
from decode.common.sweep import run_sweep
from decode.common.sweep_table import Figures
from decode.common.typed_config import build
from decode.common.version import __version__

SPINS = "10000"
"""How often a thread of OpenMP (GNU's, in torch's wheels) looks for work before it sleeps; its own default is hundreds
of thousands. SmolLM2, 2 cores, batch 1, plain: 52 tokens/s alone either way; beside a busy process 16, and with the
default not one text in 200 s. With 100, or OMP_WAIT_POLICY=PASSIVE, 28 alone."""
UNREAD = 141  # 128 + SIGPIPE: what a shell sees of a program that the signal ends
TERMINATED = 143  # 128 + SIGTERM


class Terminated(KeyboardInterrupt):
    """By SIGTERM, as schedulers send it before they kill."""


def stage_main(stage: str, config: str, run: str, figures: Figures | None) -> NoReturn:
    """Run one stage from `sys.argv`, then exit: 0 done, 1 RunError, 2 UserError, 130 interrupted, 141 output unread,
    143 terminated.

    `config` ("module:Class") is imported to check the configuration, `run` ("module:function") only after that, so that
    a bad configuration fails before torch is imported. `--multirun` runs one subprocess per combination of values, and
    compares them by `figures`; a stage without any has no sweeps.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read when torch is imported
    if os.environ.get("WORLD_SIZE", "1") == "1":  # a rank that waits for others in C would not hear it
        signal.signal(signal.SIGTERM, _terminate)
    with quiet_when_unread():
        try:
            code = _run(stage, config, run, figures)
        except KeyboardInterrupt as stop:  # before the stage began, or between the jobs of a sweep
            jobs = wants_sweep(sys.argv[1:])
            _interrupted(
                stage, "Finished jobs are kept; to go on, run the same command with resume=auto" if jobs else ""
            )
            code = _code_of(stop)
    sys.exit(code)


def _terminate(*_: object) -> NoReturn:
    raise Terminated


def _code_of(stop: KeyboardInterrupt) -> int:
    return TERMINATED if isinstance(stop, Terminated) else 130


def _run(stage: str, config: str, run: str, figures: Figures | None) -> int:
    arguments = sys.argv[1:]
    config_class = _load(config)
    try:
        shown = _shown(stage, config_class, arguments)
        if shown is not None:
            sys.stdout.write(shown if is_main_process() else "")
            return 0
        if wants_sweep(arguments):
            if figures is None:
                raise ConfigError("this stage has no --multirun: give it one command for each folder")
            return run_sweep(stage, config_class, arguments, figures)
        container = compose(stage, config_class, arguments)
        if container is None:  # --hydra-help, --cfg and --info show something and run nothing
            return 0
        built = build(config_class, container)
    except UserError as error:
        if is_main_process():  # every rank has the same configuration; one message is enough
            _say(stage, "error", error)
        return 2
    return _run_stage(stage, run, built)


def _shown(stage: str, config_class: type, arguments: Sequence[str]) -> str | None:
    """What to print instead of running: the help, or our version; None where neither is asked for."""
    if "--version" in arguments:
        return f"draftsmith {__version__}\n"
    if not HELP_FLAGS & set(arguments):
        return None
    return help_text(stage, config_class, [one for one in arguments if not one.startswith("-") and "=" not in one])


NOISY = ("torchao", "torch.utils._pytree")
"""Loggers that tell, where torchao is installed and transformers imports it, of its extensions for other machines."""


def _run_stage(stage: str, run: str, config: Any) -> int:
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    keep_freed_memory()
    rank = "" if is_main_process() else f" on rank {os.environ['RANK']}"
    try:
        _load(run)(config)
    except UserError as error:
        _say(stage, f"error{rank}", error)
        return 2
    except KeyboardInterrupt as stop:
        _interrupted(stage, how_to_go_on(config))
        return _code_of(stop)
    except RunError as error:
        _say(stage, f"failed{rank}", error)
        return 1
    except OSError as error:  # a disk that is full, a file that went away
        if isinstance(error, BrokenPipeError) and is_unread():
            raise
        _say(stage, f"failed{rank}", error, how_to_go_on(config))
        return 1
    except Exception as error:
        if is_main_process():
            error.add_note(how_to_go_on(config))  # the last lines of a traceback are read first
        raise
    return 0


def how_to_go_on(config: Any) -> str:
    """What is kept of a run that ended on its way, and how it goes on, as a sentence; empty where it had not begun."""
    folder = getattr(config, "output_dir", None)
    if not folder or not (Path(folder) / "run.json").is_file():
        return ""
    again = "again" if config.resume == "auto" else "with resume=auto"
    return f"What is finished is kept in {folder}; to go on, run the same command {again}"


def _interrupted(stage: str, hint: str) -> None:
    if is_main_process():
        sys.stderr.write(f"\ndraftsmith {stage}: interrupted. {hint}".rstrip(". ") + "\n")


def _load(name: str) -> Any:
    module, attribute = name.split(":")
    return getattr(import_module(module), attribute)


def _say(stage: str, what: str, error: Exception, hint: str = "") -> None:
    sys.stderr.write(f"draftsmith {stage}: {what}: {error}\n" + (f"{hint}\n" if hint else ""))


@contextmanager
def quiet_when_unread() -> Iterator[None]:
    """End the process with `UNREAD`, and without a word, where standard output or error is a pipe without a reader.

    Resetting SIGPIPE to the system's default would do the same, but also end us wherever a worker's pipe or a socket
    breaks. Buffers are flushed here: what is left in one when Python ends, Python complains of.
    """
    try:
        try:
            yield
        finally:
            for stream in _streams():
                stream.flush()
    except BrokenPipeError:
        if not is_unread():
            raise
        for stream in filter(_lost_its_reader, _streams()):
            _throw_away(stream)
        sys.exit(UNREAD)


def is_unread() -> bool:
    """Whether standard output or error is a pipe without a reader, so that a BrokenPipeError may come from there."""
    return any(map(_lost_its_reader, _streams()))


def _streams() -> list[TextIO]:
    return [stream for stream in (sys.stdout, sys.stderr) if stream is not None]  # None: closed by whoever started us


def _lost_its_reader(stream: TextIO) -> bool:
    try:
        file = stream.fileno()
    except (OSError, ValueError):  # not a file, or closed
        return False
    poll = select.poll()
    poll.register(file, 0)  # errors are told without being asked for
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _throw_away(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
