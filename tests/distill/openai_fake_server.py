"""A server of OpenAI's protocol by proxy, in threads of the test, in the manner of vLLM, of llama.cpp, or of one that
knows no more than the protocol. Its p is a law of the last two tokens; what it writes follows from seed and prompt."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

Manner = Literal["vllm", "llamacpp", "plain"]


def is_response(content: dict[str, Any]) -> bool:
    """Whether a request is one of the run's, none of those that look at the server."""
    return content.get("max_tokens", 1) > 1


@dataclass
class FakeOpenAi:
    """What the server is, to be changed while it runs."""

    tokenizer: PreTrainedTokenizerBase
    manner: Manner = "vllm"
    vocab_size: int = 0
    models: list[str] = field(default_factory=lambda: ["base"])
    max_model_len: int | None = 64
    most_told: int = 20
    key: str | None = None
    lists_to_all: bool = False
    shift: int = 0
    """Of the law: other weights."""
    shifts_after: int | None = None
    """It is shifted once so many responses were written."""
    warps: bool = False
    """It tells p behind the temperature."""
    cuts_at: int | None = None
    tells_end: bool = True
    hides: int | None = None
    """A token that it tells nothing of, as llama.cpp of parts of characters."""
    fault: Callable[[dict[str, Any]], tuple[int, dict[str, str], str] | None] = lambda _: None
    """(status, headers, body) to answer a completion by, in place of it."""
    stalls: threading.Event | None = None
    """Responses wait for it."""
    page: str | None = None
    """What it answers to everything."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    port: int = 0
    at_once: int = 0
    most_at_once: int = 0
    slowness: float = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def end(self) -> int:
        """Its end of text."""
        token = self.tokenizer.eos_token_id
        assert isinstance(token, int)
        return token

    @property
    def written(self) -> list[dict[str, Any]]:
        """Requests for responses."""
        return [one for one in self.asked if is_response(one)]

    def law(self, before: list[int]) -> np.ndarray:
        """log p of the token behind these, (V,)."""
        is_shifted = self.shifts_after is None or len(self.written) > self.shifts_after
        key = [*before[-2:], self.shift if is_shifted else 0]
        logits = 3 * np.random.default_rng(key).standard_normal(self.vocab_size)
        return logits - np.log(np.exp(logits).sum())

    def continued(self, content: dict[str, Any]) -> tuple[list[int], str]:
        """Its tokens, an end among them, and the reason."""
        seed, most = content.get("seed", 1), min(content["max_tokens"], self.cuts_at or 10**6)
        new = [(seed + 7 * n) % 50 + 5 for n in range(most)]
        if seed % 3 == 0 and not content.get("ignore_eos"):
            return [*new[: len(new) // 4], self.end], "stop"
        return new, "length"

    def completion(self, content: dict[str, Any]) -> dict[str, Any]:
        prompt = content["prompt"]
        read = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        new, reason = self.continued(content)
        told = new if self.tells_end else [one for one in new if one != self.end]
        choice = {"text": self.tokenizer.decode(new, skip_special_tokens=True), "finish_reason": reason}
        if self.manner == "vllm" and content.get("return_token_ids"):
            choice["token_ids"] = told
        if content.get("logprobs"):
            rows = [self.likeliest(read + told[:n], content) for n in range(len(told))]
            shown = [(one, row) for one, row in zip(told, rows, strict=True) if one != self.hides]
            choice["logprobs"] = self.in_form([one for one, _ in shown], [row for _, row in shown])
        return {"choices": [choice], "usage": {"prompt_tokens": len(read), "completion_tokens": len(new)}}

    def likeliest(self, before: list[int], content: dict[str, Any]) -> list[tuple[int, float]]:
        log_p = self.law(before)
        if self.warps and content["temperature"] != 1:
            log_p = log_p / content["temperature"]
        return [(int(token), float(log_p[token])) for token in np.argsort(-log_p)[: content["logprobs"]]]

    def in_form(self, told: list[int], rows: list[list[tuple[int, float]]]) -> dict[str, Any]:
        if self.manner == "llamacpp":
            return {
                "content": [
                    {"id": one, "token": "?", "top_logprobs": [{"id": t, "token": "?", "logprob": p} for t, p in row]}
                    for one, row in zip(told, rows, strict=True)
                ]
            }
        name = (lambda t: f"token_id:{t}") if self.manner == "vllm" else (lambda t: f" {t} ")
        return {"tokens": [name(t) for t in told], "top_logprobs": [{name(t): p for t, p in row} for row in rows]}

    def answer(self, path: str, content: dict[str, Any]) -> tuple[int, dict[str, str], str]:
        if self.page is not None:
            return 200, {}, self.page
        if path == "/v1/models":
            about = {"owned_by": self.manner, "max_model_len": self.max_model_len}
            return 200, {}, json.dumps({"data": [{"id": one, **about} for one in self.models]})
        if path == "/tokenize" and self.manner != "plain":
            text = content["prompt" if self.manner == "vllm" else "content"]
            return 200, {}, json.dumps({"tokens": self.tokenizer.encode(text, add_special_tokens=False)})
        if path != "/v1/completions":
            return 404, {}, "<html>not found</html>"
        if self.manner == "plain" and "top_k" in content:
            return 400, {}, "top_k is not permitted"
        if (content.get("logprobs") or 0) > self.most_told:
            return 400, {}, f"at most {self.most_told} logprobs"
        return self.fault(content) or (200, {}, json.dumps(self.completion(content)))

    def refuses(self, path: str, given: str | None) -> bool:
        is_open = self.key is None or (self.lists_to_all and path == "/v1/models")
        return not is_open and given != f"Bearer {self.key}"

    @contextmanager
    def counted(self, content: dict[str, Any]) -> Iterator[None]:
        """Among the responses that it writes at once."""
        if not is_response(content):
            yield
            return
        with self.lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        if self.slowness:
            time.sleep(self.slowness)
        if self.stalls is not None:
            self.stalls.wait(20)
        yield
        with self.lock:
            self.at_once -= 1


@contextmanager
def fake_openai(target: Path, vocab_size: int, **changes: Any) -> Iterator[FakeOpenAi]:
    """One that answers until the block ends."""
    fake = FakeOpenAi(AutoTokenizer.from_pretrained(target), vocab_size=vocab_size, **changes)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, content: dict[str, Any]) -> None:
            given = self.headers["Authorization"]
            if fake.refuses(self.path, given):
                return self._send(401, {}, f"wrong key: {given}")
            with fake.counted(content):
                with fake.lock:
                    fake.asked.append(content | {"path": self.path})
                    answer = fake.answer(self.path, content)
            return self._send(*answer)

        def _send(self, status: int, headers: dict[str, str], body: str) -> None:
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body.encode()))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None:
            """A client that went away is none of the test's."""

    server = Server(("127.0.0.1", 0), Handler)
    fake.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
