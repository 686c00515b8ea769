"""A server: started here in processes of its own that end with the block, or one that runs somewhere."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from decode.common.errors import InputError
from eval.modes.served.engine.metrics import Counters, read_counters, read_running

HOST = "127.0.0.1"
PORT = "{port}"
"""Stands in a command for the port that the server gets."""
_LAST_LINES = 25
_PATIENCE_S = 600.0
"""Of one request: a long text on a slow machine, and not forever."""
_LOOK_S = 60.0
"""Of what needs no model, models and metrics: one that hangs is told soon."""
_LAST_BREATH_S = 10.0
"""An engine that breaks answers with an error first, and its processes end after that."""
_OPENER = build_opener(ProxyHandler({}))


class ServerGoneError(InputError):
    """The server died, or does not answer; with the end of its log, where it was started here."""


@dataclass(frozen=True)
class Started:
    """The processes of a server that was started here."""

    process: subprocess.Popen[bytes]
    log: Path

    def end(self) -> None:
        """All of them."""
        for one, seconds in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 5.0)):
            try:
                os.killpg(self.process.pid, one)
                self.process.wait(seconds)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        self.process.wait()

    def last_words(self) -> str:
        """The end of its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return f"{self.log} ends with:\n" + "\n".join(lines[-_LAST_LINES:])


@dataclass(frozen=True)
class Server:
    """One that answers as OpenAI's do."""

    url: str
    model: str = ""
    """What it calls the model that it serves."""
    started: Started | None = None

    def get(self, path: str) -> str:
        """What lies at `path`; ServerGoneError where there is no answer."""
        return self._ask(Request(f"{self.url}{path}"), _LOOK_S)

    def post(self, path: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to `content`; InputError where that is no JSON."""
        data = json.dumps(content).encode()
        text = self._ask(Request(f"{self.url}{path}", data, {"Content-Type": "application/json"}), _PATIENCE_S)
        try:
            return json.loads(text)
        except ValueError as error:
            raise InputError(
                f"{self.url}{path} answered {text[:80]!r}, which is no JSON: that is no server of a model, or a proxy "
                "in front of one. Give the address of the engine itself"
            ) from error

    def version(self) -> str:
        """Of the engine; empty where it does not say."""
        try:
            return str(json.loads(self.get("/version"))["version"])
        except (ValueError, LookupError, TypeError, InputError):
            return ""

    def metrics(self) -> str:
        """Prometheus text."""
        return self.get("/metrics")

    def counters(self) -> Counters:
        """Counters once all is counted that was answered: an answer may come before its last round is."""
        before, deadline = "", time.monotonic() + _PATIENCE_S
        while True:
            text = self.metrics()
            now = read_counters(text)
            if not read_running(text) and repr(now) == before:
                return now
            if time.monotonic() > deadline:
                raise InputError(
                    f"the server at {self.url} goes on with {read_running(text)} requests that are not ours, so its "
                    "counters are not of our prompts alone; measure while nobody else asks it"
                )
            before = repr(now)
            time.sleep(0.02)

    def counters_since(self, before: Counters) -> Counters:
        """What was counted since `before`; ServerGoneError where the server was started anew meanwhile."""
        now = self.counters()
        was, is_now = ((one.drafts, one.drafted, *one.accepted) for one in (before, now))
        if len(was) != len(is_now) or any(a > b for a, b in zip(was, is_now, strict=True)):
            raise self._gone(f"counted {before.drafts} drafts and now says {now.drafts}: it was started anew meanwhile")
        return now - before

    def _ask(self, request: Request, seconds: float) -> str:
        try:
            with _OPENER.open(request, timeout=seconds) as answer:
                return answer.read().decode(errors="replace")
        except HTTPError as error:
            said = error.read().decode(errors="replace")[:500]
            if error.code < 500:
                raise InputError(f"{request.full_url} answered {error.code}: {said}") from error
            raise self._gone(f"answered {error.code} ({said})") from error
        except (URLError, OSError, HTTPException) as error:
            raise self._gone(f"does not answer ({getattr(error, 'reason', None) or error})") from error

    def _gone(self, what: str) -> ServerGoneError:
        if self.started is None:
            return ServerGoneError(f"the server at {self.url} {what}; start it, or give the address of one that runs")
        try:
            code = self.started.process.wait(_LAST_BREATH_S)
        except subprocess.TimeoutExpired:
            return ServerGoneError(f"the server {what}; {self.started.last_words()}")
        return ServerGoneError(f"the server ended with code {code}; {self.started.last_words()}")


@contextmanager
def running(command: Sequence[str], environment: Mapping[str, str], log: Path, seconds: float) -> Iterator[Server]:
    """A server that `command` starts, once it answers; PORT in it is replaced. ServerGoneError, with the end of its
    log, where it dies or has not answered in `seconds`."""
    with _reserved_port() as port, log.open("wb") as file:
        process = subprocess.Popen(
            [word.replace(PORT, str(port)) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            process_group=0,  # it starts processes of its own, which have to end with it
        )
        started = Started(process, log)
        try:
            _wait(Server(f"http://{HOST}:{port}", started=started), seconds)
            yield found(f"http://{HOST}:{port}", started)
        finally:
            started.end()


def found(url: str, started: Started | None = None) -> Server:
    """The server at `url`; ServerGoneError where none answers, InputError for one that lists no model."""
    server = Server(url.rstrip("/"), started=started)
    listed = models(server)
    return Server(server.url, listed[0]["id"], started)


def models(server: Server) -> list[dict[str, Any]]:
    """What it serves: `id`, `root` where the weights lie, `max_model_len`."""
    try:
        listed = json.loads(server.get("/v1/models"))["data"]
        assert all(isinstance(one["id"], str) for one in listed)
    except (ValueError, LookupError, TypeError, AssertionError) as error:
        raise InputError(f"{server.url}/v1/models lists no models, so that is no server of a model") from error
    if not listed:
        raise InputError(f"{server.url}/v1/models is empty: the server has no model")
    return listed


def _wait(server: Server, seconds: float) -> None:
    """Until it answers."""
    assert server.started is not None
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        code = server.started.process.poll()
        if code is not None:
            raise ServerGoneError(
                f"the server ended with code {code} before it answered; {server.started.last_words()}"
            )
        try:
            with _OPENER.open(f"{server.url}/health", timeout=10):
                return
        except OSError:  # HTTPError and URLError are such
            time.sleep(0.25)
    raise ServerGoneError(
        f"the server has not answered in {seconds / 60:g} minutes (served.start_minutes); {server.started.last_words()}"
    )


@contextmanager
def _reserved_port() -> Iterator[int]:
    """A free port that nobody else is given meanwhile: it stays bound here. The server binds it too, as both allow it
    to be used again and only the server listens."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((HOST, 0))
        yield held.getsockname()[1]
