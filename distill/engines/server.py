"""A server in processes of its own: started, waited for until it answers, quoted where it dies, and ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from decode.common.errors import InputError, RunError
from distill.engines.http_client import HttpClient

HOST = "127.0.0.1"
PORT = "{port}"
"""Stands in a command for the port that the server gets."""
_LAST_LINES = 25
_LAST_BREATH_S = 10.0
"""An engine that breaks answers with an error first, and its processes end after that."""


class ServerGoneError(InputError):
    """The server died, or does not answer; with the end of its log, where it was started here."""


@dataclass(frozen=True)
class StartedServer:
    """The processes of a server that was started here."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(cls, command: Sequence[str], environment: Mapping[str, str], log: Path, port: int) -> StartedServer:
        """It does not answer yet. PORT in `command` is replaced."""
        with log.open("wb") as file:
            process = subprocess.Popen(
                [word.replace(PORT, str(port)) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                process_group=0,  # it starts processes of its own, which have to end with it
            )
        return cls(f"http://{HOST}:{port}", process, log)

    def wait(self, seconds: float) -> None:
        """Until it answers; ServerGoneError where it dies or takes longer."""
        client, deadline = HttpClient(self.url), time.monotonic() + seconds
        while time.monotonic() < deadline:
            code = self.process.poll()
            if code is not None:
                raise ServerGoneError(
                    f"the server ended with code {code} before it answered; {last_words(self.log, _LAST_LINES)}"
                )
            try:
                client.read("/health", timeout=10)
            except RunError:
                time.sleep(0.25)
            else:
                return
        raise ServerGoneError(
            f"the server has not answered in {seconds / 60:g} minutes (served.start_minutes); "
            f"{last_words(self.log, _LAST_LINES)}"
        )

    def gone(self, what: str) -> ServerGoneError:
        """What to raise where it no longer answers."""
        try:
            what = f"ended with code {self.process.wait(_LAST_BREATH_S)}"
        except subprocess.TimeoutExpired:
            pass
        return ServerGoneError(f"the server {what}; {last_words(self.log, _LAST_LINES)}")

    def end(self) -> None:
        """All of its processes."""
        for one, seconds in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 5.0)):
            try:
                os.killpg(self.process.pid, one)
                self.process.wait(seconds)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        self.process.wait()


@contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str], log: Path, seconds: float
) -> Iterator[StartedServer]:
    """A server that `command` starts, once it answers. ServerGoneError, with the end of its log, where it dies or has
    not answered in `seconds`."""
    with reserved_port() as port:
        server = StartedServer.start(command, environment, log, port)
        try:
            server.wait(seconds)
            yield server
        finally:
            server.end()


@contextmanager
def reserved_port() -> Iterator[int]:
    """A free port that nobody else is given meanwhile: it stays bound here. The server binds it too, as both allow it
    to be used again and only the server listens."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((HOST, 0))
        yield held.getsockname()[1]


def last_words(log: Path, lines: int) -> str:
    """The end of a log."""
    words = log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
    return f"{log} ends with:\n" + "\n".join(words)
