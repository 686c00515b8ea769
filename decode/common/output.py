"""`... | head`: where the reader of our output has left, there is nothing to report, and nobody to report it to."""

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

UNREAD = 141  # 128 + SIGPIPE: what a shell sees of a program that the signal ends


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
