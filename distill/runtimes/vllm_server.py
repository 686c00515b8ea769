"""A running vLLM server: what it serves, texts continued by it, and texts read by it, by their token ids; and such a
server behind the calls of an engine's worker (`vllm_worker`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from decode.common.errors import ConfigError, RunError
from distill.engines.http_client import FIRST_ANSWER_S, HttpClient, NoAnswerError, RefusedError, nothing_answers
from distill.runtimes.probe import check_end
from distill.runtimes.states_file import await_states, remove_states

KEY = "VLLM_API_KEY"
PATIENCE_S = 20.0
"""States appear here by then once they are written, also over a network."""
TRIALS = 3
T = TypeVar("T")


@dataclass
class VllmServer:
    """One, by its address. A request is of one text: seeds and files of states are those of a request."""

    url: str
    client: HttpClient
    folder: Path
    """Where the states that it writes appear here."""
    run: str
    """What the names of the run's files begin with there."""
    version: str
    model: str
    max_model_len: int

    @classmethod
    def connect(cls, url: str, folder: Path, run: str, timeout: float) -> VllmServer:
        """Raises ConfigError where no vLLM server answers at `url`, or one that asks for another key."""
        client = HttpClient(url.rstrip("/").removesuffix("/v1"), os.environ.get(KEY), timeout)
        try:
            version = client.once("/version", timeout=FIRST_ANSWER_S)
            models = client.once("/v1/models", timeout=FIRST_ANSWER_S)
            served = next(one for one in models["data"] if not one.get("parent"))  # a parent's is an adapter
            return cls(url, client, folder, run, str(version["version"]), served["id"], int(served["max_model_len"]))
        except NoAnswerError as error:
            raise nothing_answers(url, error) from error
        except RefusedError as error:
            if error.status in (401, 403):
                raise ConfigError(
                    f"the server at {url} asks for a key ({error}); give the one of its --api-key in the environment "
                    f"variable {KEY}"
                ) from error
            raise ConfigError(_no_vllm(url, str(error))) from error
        except (KeyError, TypeError, ValueError, StopIteration, RunError) as error:
            raise ConfigError(_no_vllm(url, repr(error))) from error

    def complete(self, prompt: list[int], max_tokens: int, **settings: Any) -> tuple[dict[str, Any], Path | None]:
        """The continuation of a text, {"token_ids", "finish_reason", ...}, and the file with the text's states, if the
        server leaves any, by its name in `folder`: the server's own path is that of another machine. Nothing of the
        server's own defaults is taken. Raises RunError."""
        request = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True}
        plain = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "ignore_eos": True}
        answer = self.client.ask(
            "/v1/completions", {"request_id": f"{self.run}-{uuid4().hex}", **request, **plain, **settings}
        )
        (choice,) = answer["choices"]
        if choice.get("token_ids") is None or choice.get("prompt_token_ids") != prompt:
            raise RunError(
                f"the server at {self.url} (vLLM {self.version}) does not answer with the ids of the tokens it read "
                "and wrote (return_token_ids), and text alone does not say them; use vLLM 0.32 or later"
            )
        told = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
        return choice, None if told is None else self.folder / Path(told).name

    def written(self, prompt: list[int], max_tokens: int, **settings: Any) -> dict[str, Any]:
        """The continuation alone: states that come along, of a text that is not finished, are removed."""
        choice, file = self.complete(prompt, max_tokens, **settings)
        if file is not None:
            self.appears(file)
            remove_states(file)
        return choice

    def appears(self, file: Path) -> bool:
        """Whether it comes, and is whole."""
        return await_states(file, PATIENCE_S, self.client.timeout)

    def log_p(self, ids: list[int]) -> list[float]:
        """Of each token of a text but the first. Raises RunError."""
        rows = self.written(ids, 1, temperature=0.0, prompt_logprobs=0)["prompt_logprobs"][1:]
        return [float(row[str(token)]["logprob"]) for row, token in zip(rows, ids[1:], strict=True)]

    def tokenize(self, text: str) -> list[int]:
        """Its ids, without special tokens."""
        content = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return self.client.ask("/tokenize", content)["tokens"]


def _no_vllm(url: str, why: str) -> str:
    return (
        f"what answers at {url} is no vLLM server, or an old one ({why}); target.runtime=vllm needs one, since others "
        "give no hidden states"
    )


@dataclass
class ServedEngine:
    """Many requests at a time."""

    server: VllmServer
    at_once: int
    check: Callable[[VllmServer], None]
    """Called behind each call, before its answer is used; raises where the server is another one by now."""

    def call(self, content: dict[str, Any]) -> dict[str, Any]:
        """Raises RunError where the server is away for too long, or refuses."""
        answer = self._read(content["rows"]) if "rows" in content else self._write(content)
        self.check(self.server)
        return answer

    def _write(self, content: dict[str, Any]) -> dict[str, Any]:
        settings = {"stop_token_ids": content["eos"], **content["sampling"]}

        def one(pair: tuple[list[int], int]) -> dict[str, Any]:
            prompt, seed = pair
            found = self.server.written(prompt, content["max_new_tokens"], seed=seed, **settings)
            if found["finish_reason"] == "stop":
                check_end(self.server.url, found["token_ids"][-1], content["eos"])
            return found

        found = self._each(one, zip(content["prompts"], content["seeds"], strict=True))
        return {
            "new_ids": [one["token_ids"] for one in found],
            "finish_reasons": [one["finish_reason"] for one in found],
        }

    def _read(self, rows: list[list[int]]) -> dict[str, Any]:
        return {"files": [str(file) for file in self._each(self._file, rows)]}

    def _file(self, ids: list[int]) -> Path:
        """Where its states are; asked again where a server that ended took them along."""
        for _ in range(TRIALS):
            _, file = self.server.complete(ids, 1, temperature=0.0)
            if file is None:
                raise RunError(
                    f"the server at {self.server.url} gave no hidden states, and did so before: it was started again "
                    "without them. Start it as it was, and give resume=auto"
                )
            if self.server.appears(file):
                return file
        return file  # reading it says what is wrong

    def _each(self, do: Callable[[Any], T], rows: Iterable[Any]) -> list[T]:
        with ThreadPoolExecutor(self.at_once) as pool:
            try:
                return list(pool.map(do, rows))
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
