"""A running server behind the calls of an engine's worker (`vllm_worker`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from decode.common.errors import RunError
from distill.runtimes.vllm_server import VllmServer

TRIALS = 3
T = TypeVar("T")


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
            if found["finish_reason"] == "stop" and found["token_ids"][-1] not in content["eos"]:
                raise RunError(
                    f"the server at {self.server.url} ended a text at token {found['token_ids'][-1]}, and the target's "
                    f"ends are {content['eos']}; start it with --generation-config vllm"
                )
            return found

        found = self._each(one, zip(content["prompts"], content["seeds"], strict=True))
        return {
            "new_ids": [one["token_ids"] for one in found],
            "finish_reasons": [one["finish_reason"] for one in found],
            "arrivals": [],
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
