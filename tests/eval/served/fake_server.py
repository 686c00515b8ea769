"""A server that answers as vLLM's does, of a model that writes by a rule: each token is the one before it plus one. As
a program it is what `running` starts; `--port` says where it listens."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

from eval.modes.served.engine.metrics import Counters


class FakeEngine:
    """What it knows and counts: of every draft of `k` tokens, `right` are accepted."""

    def __init__(self, model: str = "a/target", k: int = 2, right: int = 1, dies_after: int | None = None) -> None:
        self.model, self.dies_after = model, dies_after
        self.counters, self.right = Counters(0, 0, (0,) * k), right
        self.asked = list[dict[str, Any]]()
        self.lock = Lock()

    def complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        """An answer, which is counted."""
        with self.lock:
            self.asked.append(asked)
            if self.dies_after is not None and len(self.asked) > self.dies_after:
                self.die()
            ids, counters = self.write(asked)
            self.counters += counters
        return {"choices": [{"token_ids": ids, "text": ""}]}

    def write(self, asked: dict[str, Any]) -> tuple[list[int], Counters]:
        """Tokens, and what became of the drafts."""
        drafts, k = -(-(asked["max_tokens"] - 1) // (self.right + 1)), len(self.counters.accepted)
        accepted = tuple(drafts if place < self.right else 0 for place in range(k))
        return [asked["prompt"][-1] + 1 + i for i in range(asked["max_tokens"])], Counters(drafts, drafts * k, accepted)

    def die(self) -> None:
        """As a process does."""
        sys.stdout.write("EngineDeadError: out of memory\n")
        sys.stdout.flush()
        os._exit(7)

    def metrics(self) -> str:
        """Prometheus text."""
        name, labels = "vllm:spec_decode_num", f'engine="0",model_name="{self.model}"'
        lines = [f"vllm:num_requests_running{{{labels}}} 0.0", f"# TYPE {name}_drafts_total counter"]
        if self.counters.accepted:
            lines += [
                f"{name}_drafts_total{{{labels}}} {float(self.counters.drafts)}",
                f"{name}_drafts_created{{{labels}}} 1.7e+09",
                f"{name}_draft_tokens_total{{{labels}}} {float(self.counters.drafted)}",
                f"{name}_accepted_tokens_total{{{labels}}} {float(sum(self.counters.accepted))}",
            ]
        for place, taken in enumerate(self.counters.accepted):
            lines.append(f'{name}_accepted_tokens_per_pos_total{{{labels},position="{place}"}} {float(taken)}')
        return "\n".join(lines) + "\n"


def handler_of(engine: FakeEngine) -> type[BaseHTTPRequestHandler]:
    """The handler that speaks for `engine`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            pages = {
                "/health": "",
                "/metrics": engine.metrics(),
                "/version": json.dumps({"version": "0.0"}),
                "/v1/models": json.dumps({"data": [{"id": engine.model, "root": engine.model}]}),
            }
            self._say(200 if self.path in pages else 404, pages.get(self.path, "no such page"))

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if asked["model"] != engine.model:
                self._say(404, "no such model")
                return
            self._say(200, json.dumps(engine.complete(asked)))

        def _say(self, code: int, text: str) -> None:
            content = text.encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class calls it so
            """Nothing: tests read what is printed."""

    return Handler


@contextmanager
def serving(engine: FakeEngine) -> Iterator[str]:
    """Its address, in a thread of this process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(engine))
    thread = Thread(target=server.serve_forever, args=[0.01], daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def main() -> None:
    """Serve until it is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--dies-after", type=int)
    given = parser.parse_args()
    sys.stdout.write("started\n")
    ThreadingHTTPServer(("127.0.0.1", given.port), handler_of(FakeEngine(dies_after=given.dies_after))).serve_forever()


if __name__ == "__main__":
    main()
