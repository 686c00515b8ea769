"""A server of the engine, started here or found: what it serves, prompts as token ids to it, texts back with the time
that they took, and what it counts."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from decode.common.errors import InputError
from distill.engines.http_client import HttpClient, NoAnswerError, RefusedError, SilentError
from distill.engines.server import ServerGoneError, StartedServer
from eval.modes.served.engine.metrics import Counters, read_counters, read_running

_PATIENCE_S = 600.0
"""Of one request: a long text on a slow machine, and not forever."""
_LOOK_S = 60.0
"""Of what needs no model, models and metrics: one that hangs is told soon."""
_PLAIN = {
    "ignore_eos": True,
    "return_token_ids": True,
    # left out, vLLM takes them from the generation_config.json of the model
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


class ListedModel(BaseModel, frozen=True):
    """That a server lists."""

    id: str
    root: Any = None
    """Where the weights lie."""


class _Models(BaseModel):
    data: list[ListedModel]


class _Choice(BaseModel):
    token_ids: list[int]


class _Completion(BaseModel):
    choices: list[_Choice] = Field(min_length=1)


@dataclass(frozen=True)
class Server:
    """One that answers as OpenAI's do."""

    url: str
    model: str = ""
    """What it calls the model that it serves."""
    started: StartedServer | None = None

    def get(self, path: str) -> str:
        """What lies at `path`; ServerGoneError where there is no answer."""
        return self._ask(path, None, _LOOK_S)

    def post(self, path: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to `content`; InputError where that is no JSON."""
        text = self._ask(path, content, _PATIENCE_S)
        try:
            return json.loads(text)
        except ValueError as error:
            raise InputError(
                f"{self.url}{path} answered {text[:80]!r}, which is no JSON: that is no server of a model, or a proxy "
                "in front of one. Give the address of the engine itself"
            ) from error

    def version(self) -> str:
        """Of the engine; empty where it does not say."""
        return HttpClient(self.url).version(_LOOK_S) or ""

    def counters(self) -> Counters:
        """Counters once all is counted that was answered: an answer may come before its last round is."""
        before, deadline = "", time.monotonic() + _PATIENCE_S
        while True:
            text = self.get("/metrics")
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

    def _ask(self, path: str, content: Mapping[str, Any] | None, seconds: float) -> str:
        try:
            return HttpClient(self.url).read(path, content, seconds).decode(errors="replace")
        except RefusedError as error:
            if error.status < 500:
                raise InputError(str(error)) from error
            raise self._gone(f"is broken: {error}") from error
        except (NoAnswerError, SilentError) as error:
            raise self._gone(f"does not answer ({error.__cause__})") from error

    def _gone(self, what: str) -> ServerGoneError:
        if self.started is not None:
            return self.started.gone(what)
        return ServerGoneError(f"the server at {self.url} {what}; start it, or give the address of one that runs")


def found(url: str, started: StartedServer | None = None) -> Server:
    """The server at `url`; ServerGoneError where none answers, InputError for one that lists no model."""
    server = Server(url.rstrip("/"), started=started)
    return Server(server.url, models(server)[0].id, started)


def models(server: Server) -> list[ListedModel]:
    """What it serves."""
    try:
        listed = _Models.model_validate_json(server.get("/v1/models")).data
    except ValidationError as error:
        raise InputError(f"{server.url}/v1/models lists no models, so that is no server of a model") from error
    if not listed:
        raise InputError(f"{server.url}/v1/models is empty: the server has no model")
    return listed


@dataclass(frozen=True)
class Completions:
    """What a server wrote."""

    texts: list[list[int]]
    """New tokens of each prompt."""
    seconds: float
    """From the first question to the last answer."""

    @property
    def tokens(self) -> int:
        """Written in all."""
        return sum(map(len, self.texts))


def complete(
    server: Server,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    temperature: float,
    seed: int | None,
    concurrency: int,
) -> Completions:
    """`max_tokens` new tokens for each prompt, ends of texts ignored, `concurrency` of them asked for at once; with a
    seed, each prompt's is `seed` plus its number."""

    def ask(row: int) -> list[int]:
        content = {
            "model": server.model,
            "prompt": list(prompts[row]),
            "max_tokens": max_tokens,
            "temperature": temperature,
            **_PLAIN,
            **({} if seed is None else {"seed": seed + row}),
        }
        return _ids(server, server.post("/v1/completions", content), max_tokens)

    began = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        texts = list(pool.map(ask, range(len(prompts))))
    return Completions(texts, time.perf_counter() - began)


def _ids(server: Server, answer: dict, max_tokens: int) -> list[int]:
    try:
        ids = _Completion.model_validate(answer).choices[0].token_ids
    except ValidationError:
        ids = None
    if ids is None or len(ids) != max_tokens:
        got = "no token ids" if ids is None else f"{len(ids)} tokens"
        raise InputError(
            f"the server at {server.url} answered with {got}, not {max_tokens} tokens as return_token_ids and "
            "ignore_eos ask (vLLM from 0.10.2 on). Update it; or its --max-model-len is too small for the prompts"
        )
    return ids
