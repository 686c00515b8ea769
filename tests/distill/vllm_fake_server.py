"""A vLLM server by proxy, in threads of the test: tokens that follow from seeds, states that follow from tokens
(`state_of`), and probabilities that these states have by the target's own norm and head."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tests.distill.vllm_proxy import state_of


@dataclass
class FakeVllm:
    """What the server is, to be changed while it runs."""

    target: Path
    folder: Path
    """Where it writes states; None where it gives none."""
    layers: list[int]
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    max_model_len: int = 64
    key: str | None = None
    gives_states: bool = True
    dtype: type = np.float32
    shift: float = 0.0
    """Added to the last layer's states: other weights."""
    shifts_after: int | None = None
    """It is added from this request on."""
    away: int = 0
    """Requests that are answered by an end of the connection."""
    is_full: bool = False
    stray_end: bool = False
    version: str | None = "0.fake"
    asked: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    port: int = 0
    most: int = 0
    """Files in the folder at once."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def last(self, ids: list[int]) -> np.ndarray:
        by = self.shift if self.shifts_after is None or len(self.asked) > self.shifts_after else 0.0
        return state_of(ids, max(self.layers), self.model.config.hidden_size) + np.float32(by)

    def answer(self, path: str, content: dict[str, Any]) -> dict[str, Any]:
        if path == "/version":
            return {} if self.version is None else {"version": self.version}
        if path == "/v1/models":
            adapter = {"id": "adapter", "parent": "base", "max_model_len": 1}
            return {"data": [adapter, {"id": "base", "parent": None, "max_model_len": self.max_model_len}]}
        if path == "/tokenize":
            return {"tokens": self.tokenizer.encode(content["prompt"], add_special_tokens=False)}
        return self.completion(content)

    def completion(self, content: dict[str, Any]) -> dict[str, Any]:
        prompt, asked = content["prompt"], content["max_tokens"]
        new, reason = [prompt[0]], "length"
        if "seed" in content:
            new = [(content["seed"] + n) % 200 + 5 for n in range(asked)]
            if content["seed"] % 3 == 0 and asked > 2:
                new, reason = [*new[:2], 7 if self.stray_end else content["stop_token_ids"][0]], "stop"
        choice = {"token_ids": new, "finish_reason": reason, "prompt_token_ids": prompt}
        if "prompt_logprobs" in content:
            choice["prompt_logprobs"] = self.log_p(prompt)
        answer: dict[str, Any] = {"choices": [choice]}
        if self.gives_states:
            answer["kv_transfer_params"] = {"hidden_states_path": f"/on/the/server/{self.leave(content)}"}
        return answer

    @torch.no_grad()
    def log_p(self, ids: list[int]) -> list[dict[str, Any] | None]:
        norm = self.model.base_model.get_submodule("norm")
        log_p = self.model.lm_head(norm(torch.from_numpy(self.last(ids)))).log_softmax(-1)
        rows = [{str(token): {"logprob": log_p[n, token].item()}} for n, token in enumerate(ids[1:])]
        return [None, *rows]

    @torch.no_grad()
    def leave(self, content: dict[str, Any]) -> str:
        ids, name = content["prompt"], f"cmpl-{content['request_id']}.safetensors"
        width = self.model.config.hidden_size
        embedded = self.model.get_input_embeddings()(torch.tensor(ids)).numpy()
        states = {0: embedded, max(self.layers): self.last(ids)}
        stacked = np.stack([states[n] if n in states else state_of(ids, n, width) for n in self.layers], 1)
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / name
        Path(f"{file}.lock").touch()
        save_file({"hidden_states": stacked.astype(self.dtype), "token_ids": np.array(ids)}, file)
        self.most = max(self.most, len(list(self.folder.iterdir())))
        if self.is_full:
            file.write_bytes(file.read_bytes()[:100])
        return name


@contextmanager
def fake_vllm(target: Path, folder: Path, layers: list[int], **changes: Any) -> Iterator[FakeVllm]:
    """One that answers until the block ends."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(target).eval(), AutoTokenizer.from_pretrained(target)
    fake = FakeVllm(target, folder, layers, model, tokenizer, **changes)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, content: dict[str, Any]) -> None:
            is_open = self.path == "/version" or fake.key is None
            if not is_open and self.headers["Authorization"] != f"Bearer {fake.key}":
                return self.send_error(401)
            with fake.lock:
                fake.asked.append(content | {"path": self.path})
                if content and fake.away:
                    fake.away -= 1
                    return self.connection.close()
                body = json.dumps(fake.answer(self.path, content)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return None

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
