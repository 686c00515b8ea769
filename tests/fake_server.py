"""A server of a model by proxy, in threads of the test: what it is asked is kept, what it answers is a subclass's."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

Answer = dict[str, Any] | str | tuple[int, dict[str, str], str] | None
"""JSON, a page, (status, headers, body), or the end of the connection."""


@dataclass(kw_only=True)
class FakeServer:
    """What the server is, to be changed while it runs."""

    key: str | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    port: int = 0

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.root}/v1"

    def answer(self, path: str, content: dict[str, Any]) -> Answer:
        """To one request after another."""
        raise NotImplementedError

    def needs_key(self, path: str) -> bool:
        return self.key is not None

    def busy(self, content: dict[str, Any]) -> AbstractContextManager[None]:
        """Around an answer, of which many may be waited for at once."""
        return nullcontext()

    def reply(self, path: str, given: str | None, content: dict[str, Any]) -> tuple[int, dict[str, str], str] | None:
        if self.needs_key(path) and given != f"Bearer {self.key}":
            return 401, {}, f"wrong key: {given}"
        with self.busy(content), self.lock:
            self.asked.append(content | {"path": path})
            found = self.answer(path, content)
        if found is None or isinstance(found, tuple):
            return found
        return 200, {}, found if isinstance(found, str) else json.dumps(found)


class Listening(ThreadingHTTPServer):
    """Answers for a server by proxy."""

    def __init__(self, fake: FakeServer, port: int = 0) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply({})

            def do_POST(self) -> None:
                self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _reply(self, content: dict[str, Any]) -> None:
                found = fake.reply(self.path, self.headers["Authorization"], content)
                if found is None:
                    return self.connection.close()
                status, headers, body = found
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(body.encode()))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body.encode())
                return None

            def log_message(self, *_: Any) -> None:
                """Nothing."""

        super().__init__(("127.0.0.1", port), Handler)
        fake.port = self.server_address[1]

    def handle_error(self, *_: Any) -> None:
        """A client that went away is none of the test's."""


F = TypeVar("F", bound=FakeServer)


@contextmanager
def serving(fake: F) -> Iterator[F]:
    """It answers until the block ends."""
    server = Listening(fake)
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
