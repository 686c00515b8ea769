"""What a person sees while a stage runs: log lines and progress (rate, ETA), on standard error, from rank 0."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

_ROOT = "draftsmith"
_LINE_INTERVAL_S = 5.0
_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"


def is_main_process() -> bool:
    """Whether this process is rank 0 of its launch; true without a launcher."""
    return os.environ.get("RANK", "0") == "0"


class _ConsoleHandler(logging.Handler):
    """Writes log lines above a running progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if sys.stderr.isatty():
            tqdm.write(line, file=sys.stderr)
        else:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()


def get_logger(name: str) -> logging.Logger:
    """The logger `draftsmith.name`: informs on rank 0, only warns on the others."""
    root = logging.getLogger(_ROOT)
    if not root.handlers:
        handler = _ConsoleHandler()
        handler.setFormatter(logging.Formatter("[draftsmith %(asctime)s] %(message)s", datefmt="%H:%M:%S"))
        root.addHandler(handler)
        root.setLevel(logging.INFO if is_main_process() else logging.WARNING)
    return root.getChild(name)


class Progress(tqdm):
    """A bar that redraws itself on a terminal; made by `progress`."""

    monitor_interval = 0  # tqdm's watcher thread would outlive forks of data workers

    def update(self, n: float | None = 1, **shown: object) -> bool | None:
        """Advance by `n` units, and show the given values behind the rate."""
        if shown:
            self.set_postfix(shown, refresh=False)
        return super().update(n)


class _ProgressLines(Progress):
    """The same as plain lines, for a pipe or a log file, where a bar that redraws itself is noise."""

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        if self.disable:  # close() disables first, then would clear a bar that was never drawn
            return False
        self.fp.write((str(self) if msg is None else msg) + "\n")
        self.fp.flush()
        return True

    def close(self) -> None:
        """End with the last state, unless it is the one shown already."""
        if not self.disable and self.n != self.last_print_n:
            self.refresh()
        super().close()


def progress(total: int | None, unit: str, label: str, initial: int = 0) -> Progress:
    """A context manager with `.update(n=1, **shown)` that shows count, rate and ETA of `total` units.

    Redraws a bar on a terminal, writes a line at most every 5 s elsewhere, and is silent on ranks other than 0.
    """
    is_terminal = sys.stderr.isatty()
    kind = Progress if is_terminal else _ProgressLines
    return kind(
        total=total,
        unit=f" {unit}",
        desc=label,
        initial=initial,
        file=sys.stderr,
        leave=is_terminal,
        bar_format=_FORMAT,
        miniters=1,
        mininterval=0.2 if is_terminal else _LINE_INTERVAL_S,
        delay=0 if is_terminal else 1e-3,  # no line for the start: what ends soon takes one line in all
        dynamic_ncols=is_terminal,
        ncols=None if is_terminal else 110,
        disable=not is_main_process(),
    )


@contextmanager
def quiet() -> Iterator[None]:
    """transformers neither lists weights nor warns nor shows progress inside the block."""
    from transformers.utils import logging as hf_logging

    verbosity, shows = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if shows:
            hf_logging.enable_progress_bar()
