"""One process at a time in a run folder: a kernel lock on `run.lock`, and in it who holds it.

The kernel gives the lock back however its process ends, so that what a killed run leaves does not block the next one on
that machine. Whether it is shared between machines depends on the file system: a file that names another machine
therefore counts as held until it is removed, by that run's end or by a person.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from decode.common.errors import ConfigError
from decode.common.progress import get_logger

LOCK_FILE = "run.lock"
_ROOT = Path(__file__).resolve().parents[2]
_PATIENCE_S = 1.0  # longer than another process looks whether the lock is free, or takes to write its name into it
_POLL_S = 0.02
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # Lustre mounted without flock, some network file systems
_held: set[int] = set()

log = get_logger("run")


@dataclass(frozen=True)
class Holder:
    """The process that a lock names."""

    host: str
    pid: int
    started: str
    """When it took the lock, UTC."""
    command: str

    @classmethod
    def this(cls) -> Holder:
        """This process."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(socket.gethostname(), os.getpid(), now, _command())

    @classmethod
    def read(cls, file: int) -> Holder | None:
        """What an open lock file says; None where it says nothing that can be understood."""
        try:
            return cls(**json.loads(os.pread(file, 1 << 20, 0)))
        except (ValueError, TypeError):
            return None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.started}: {self.command}"


def check_unlocked(folder: Path) -> None:
    """Raise ConfigError, which names the holder, where `folder` is held. Writes nothing; whoever wants to hold the
    folder has to ask again with `run_lock`."""
    try:
        file = os.open(folder / LOCK_FILE, os.O_RDONLY)
    except (OSError, ValueError):  # no folder, no lock, or no place to write to, which is said elsewhere
        return
    try:
        _take(folder, file, fcntl.LOCK_SH)
    finally:
        os.close(file)


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the existing `folder` for this process; the file is gone at the end, also where that is an exception.

    Processes that are forked do not hold it. Raises ConfigError, which names the holder, where another process does.
    """
    file = _open_and_take(folder)
    owner = os.getpid()
    _held.add(file)
    try:
        _write(file, Holder.this())
        yield
    finally:
        if os.getpid() == owner:  # an exception in a forked process unwinds this frame there as well
            if _is_at(file, folder / LOCK_FILE):
                (folder / LOCK_FILE).unlink()  # while it is held: a moment later it may be the next one's
            _held.discard(file)
            os.close(file)


def _open_and_take(folder: Path) -> int:
    """A locked file that is still the one of that name: the holder before may have removed it while we waited."""
    while True:
        file = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _take(folder, file, fcntl.LOCK_EX)
            if _is_at(file, folder / LOCK_FILE):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _take(folder: Path, file: int, kind: int) -> None:
    """Lock the open file, waiting no longer than another process needs to look at it."""
    deadline = time.monotonic() + _PATIENCE_S
    while not _flock(folder, file, kind):
        if time.monotonic() > deadline:
            who = Holder.read(file) or "another process, which has not written its name"
            raise ConfigError(
                f"{folder} is in use by {who}. Two runs in one folder would write over each other. Wait for its end, "
                "end it, or use another output_dir."
            )
        time.sleep(_POLL_S)
    _check_abandoned(folder, file)


def _flock(folder: Path, file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        log.warning("%s: no locks on this file system (%s), so a second run would go unnoticed", folder, error.strerror)
    return True


def _check_abandoned(folder: Path, file: int) -> None:
    """What a free lock file still says: nothing, a dead process of this machine, or what cannot be known from here."""
    holder = Holder.read(file)
    if os.fstat(file).st_size and (holder is None or holder.host != socket.gethostname()):
        raise ConfigError(
            f"{folder} is in use by {holder or 'an unknown process'}, or was when that was killed: from this machine "
            f"({socket.gethostname()}) there is no telling. Two runs in one folder would write over each other. If it "
            f"has ended: rm {shlex.quote(str(folder / LOCK_FILE))}"
        )


def _write(file: int, holder: Holder) -> None:
    """In place: a new file under the name would be another lock."""
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(asdict(holder)).encode(), 0)


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _command() -> str:
    program = Path(sys.argv[0]).resolve()
    if program.name != "__main__.py":
        return shlex.join([program.name, *sys.argv[1:]])
    ours = program.parent.is_relative_to(_ROOT)  # train.export, where others are told apart by their last folder
    module = ".".join(program.parent.relative_to(_ROOT).parts) if ours else program.parent.name
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def _close_in_child() -> None:
    """A forked process shares its parent's locks, and would keep them past the parent's death."""
    for file in _held:
        os.close(file)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
