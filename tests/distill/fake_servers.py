"""Servers by proxy that write for recording: vLLM's, and OpenAI's protocol's. What they write follows from seeds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tests.distill.vllm_proxy import state_of
from tests.fake_server import Answer, FakeServer, serving

Manner = Literal["vllm", "llamacpp", "plain"]


@dataclass
class FakeVllm(FakeServer):
    """States follow from tokens (`state_of`), and probabilities from these by the target's own norm and head."""

    target: Path
    folder: Path
    """Where it writes states; None where it gives none."""
    layers: list[int]
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    max_model_len: int = 64
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
    most: int = 0
    """Files in the folder at once."""

    def needs_key(self, path: str) -> bool:
        return self.key is not None and path != "/version"

    def last(self, ids: list[int]) -> np.ndarray:
        by = self.shift if self.shifts_after is None or len(self.asked) > self.shifts_after else 0.0
        return state_of(ids, max(self.layers), self.model.config.hidden_size) + np.float32(by)

    def of(self, ids: list[int], layer: int) -> np.ndarray:
        """States (L, d) of another layer than the last one."""
        if layer == 0:
            return self.model.get_input_embeddings()(torch.tensor(ids)).numpy()
        return state_of(ids, layer, self.model.config.hidden_size)

    def answer(self, path: str, content: dict[str, Any]) -> Answer:
        if content and self.away:
            self.away -= 1
            return None
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
        stacked = np.stack([self.last(ids) if n == max(self.layers) else self.of(ids, n) for n in self.layers], 1)
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
    with serving(FakeVllm(target, folder, layers, model, tokenizer, **changes)) as fake:
        yield fake


def is_response(content: dict[str, Any]) -> bool:
    """Whether a request is one of the run's, none of those that look at the server."""
    return content.get("max_tokens", 1) > 1


@dataclass
class FakeOpenAi(FakeServer):
    """In the manner of vLLM, of llama.cpp, or of one that knows no more than the protocol. Its p is a law of the last
    two tokens."""

    tokenizer: PreTrainedTokenizerBase
    manner: Manner = "vllm"
    vocab_size: int = 0
    models: list[str] = field(default_factory=lambda: ["base"])
    max_model_len: int | None = 64
    most_told: int = 20
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
    at_once: int = 0
    most_at_once: int = 0
    slowness: float = 0.0

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

    def answer(self, path: str, content: dict[str, Any]) -> Answer:
        if self.page is not None:
            return self.page
        if path == "/v1/models":
            about = {"owned_by": self.manner, "max_model_len": self.max_model_len}
            return {"data": [{"id": one, **about} for one in self.models]}
        if path == "/tokenize" and self.manner != "plain":
            text = content["prompt" if self.manner == "vllm" else "content"]
            return {"tokens": self.tokenizer.encode(text, add_special_tokens=False)}
        if path != "/v1/completions":
            return 404, {}, "<html>not found</html>"
        if self.manner == "plain" and "top_k" in content:
            return 400, {}, "top_k is not permitted"
        if (content.get("logprobs") or 0) > self.most_told:
            return 400, {}, f"at most {self.most_told} logprobs"
        return self.fault(content) or self.completion(content)

    def needs_key(self, path: str) -> bool:
        return self.key is not None and not (self.lists_to_all and path == "/v1/models")

    @contextmanager
    def busy(self, content: dict[str, Any]) -> Iterator[None]:
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
    with serving(FakeOpenAi(AutoTokenizer.from_pretrained(target), vocab_size=vocab_size, **changes)) as fake:
        yield fake
