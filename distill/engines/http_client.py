"""HTTP with a server that may be away for a while: what is safe to ask twice is asked again, with back-off.

The standard library's client: what is sent is small, and a server's answer takes seconds, not the connection.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from decode.common.errors import ConfigError, RunError
from decode.common.progress import get_logger

AWAY = frozenset({429, 500, 502, 503, 504})
"""Statuses of a server that is starting, ending or overloaded."""
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
FIRST_ANSWER_S = 20.0
"""A server that is to be used answers what it is by then."""

log = get_logger("distill")


class NoAnswerError(RunError):
    """Nothing listens there, or it ended in the middle of an answer, for as long as was waited."""


def nothing_answers(where: str, error: NoAnswerError) -> ConfigError:
    """What is raised before a run."""
    return ConfigError(
        f"nothing answers at {where}: {error}. Start the server and wait until it says that it is ready, or correct "
        "the address"
    )


class SilentError(RunError):
    """It listens, and gave no answer in time: it hangs, and is not asked again."""


class RefusedError(RunError):
    """The server answered that it will not; `status` is HTTP's, `wait` the seconds after which it may be asked again,
    where it says so."""

    def __init__(self, message: str, status: int, wait: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.wait = status, wait


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Another address would be sent the key too."""

    def redirect_request(self, *_: Any) -> None:
        """Leads to the error of the status."""


_HERE = frozenset({"127.0.0.1", "::1", "localhost"})
"""Asked without a proxy, which would look for the server on its own machine."""


@dataclass
class HttpClient:
    """A server at `root`, http://HOST:PORT. Threads may share one."""

    root: str
    key: str | None = field(default=None, repr=False)
    """Sent as a bearer token; never written anywhere."""
    timeout: float = 600.0
    """Seconds that an answer may take, and that a lost server has to come back."""
    _is_lost: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def read(self, path: str, content: Mapping[str, Any] | None = None, timeout: float | None = None) -> bytes:
        """The answer to one request, a POST where it has content. Raises NoAnswerError, SilentError, RefusedError."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        data = None if content is None else json.dumps(content).encode()
        try:
            proxies = {} if urlsplit(self.root).hostname in _HERE else None  # None: those of the environment
            opener = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler(proxies))
            request = urllib.request.Request(self.root + path, data, headers)
            with opener.open(request, timeout=timeout or self.timeout) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            words = self._without_key(error.read().decode(errors="replace"))[:500]
            wait = _seconds(error.headers.get("Retry-After"))
            raise RefusedError(f"{self.root}{path} answered {error.code}: {words}", error.code, wait) from error
        except TimeoutError as error:
            waited = timeout or self.timeout
            raise SilentError(
                f"{self.root}{path} gave no answer in {waited:g} s (target.timeout): it hangs, or has more to do. "
                "Look at the server's log and start it again, or give more seconds; the run goes on with resume=auto"
            ) from error
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: no address
            raise NoAnswerError(f"{self.root}{path}: {error or type(error).__name__}") from error

    def once(self, path: str, content: Mapping[str, Any] | None = None, timeout: float | None = None) -> Any:
        """The same, of JSON."""
        try:
            return json.loads(self.read(path, content, timeout) or b"{}")
        except ValueError as error:
            raise NoAnswerError(f"{self.root}{path}: {error}") from error

    def ask(self, path: str, content: Mapping[str, Any] | None = None) -> Any:
        """The same, asked again while the server is away; NoAnswerError where it does not come back in time."""
        ends, wait = time.monotonic() + self.timeout, FIRST_WAIT_S
        while True:
            try:
                answer = self.once(path, content)
            except (NoAnswerError, RefusedError) as error:
                if isinstance(error, RefusedError) and error.status not in AWAY:
                    raise
                pause = max(wait, getattr(error, "wait", 0.0))
                if time.monotonic() + pause > ends:
                    raise NoAnswerError(
                        f"{error}; it did not come back in {self.timeout:g} s (target.timeout). Start it again and "
                        "give resume=auto: what was written is kept"
                    ) from error
                self._note(error)
                time.sleep(pause)
                wait = min(2 * wait, LONGEST_WAIT_S)
            else:
                self._note(None)
                return answer

    def version(self, timeout: float = FIRST_ANSWER_S) -> str | None:
        """vLLM's; others have no such address."""
        try:
            return str(self.once("/version", timeout=timeout)["version"])
        except (RunError, KeyError, TypeError):
            return None

    def _without_key(self, words: str) -> str:
        """Some servers repeat the key that they refuse, and messages go to logs."""
        return words.replace(self.key, "***") if self.key else words

    def _note(self, error: Exception | None) -> None:
        """Say once that it is away, and once that it is back."""
        with self._lock:
            if (error is not None) == self._is_lost:
                return
            self._is_lost = error is not None
        if error is None:
            log.info("%s answers again", self.root)
        else:
            log.warning("%s; asking again for up to %g s", error, self.timeout)


def _seconds(retry_after: str | None) -> float:
    """Of the header; a date, which it may be too, is taken for none."""
    return float(retry_after) if retry_after is not None and retry_after.isdecimal() else 0.0


@contextmanager
def refusing() -> Iterator[None]:
    """What a server refuses or fails at in the block is the configuration's fault: ConfigError, since nothing of the
    run was asked yet."""
    try:
        yield
    except RunError as error:
        raise ConfigError(str(error)) from error
