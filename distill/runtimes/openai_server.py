"""A running server that speaks OpenAI's protocol: what it serves, texts continued by it, by their token ids, and what
it says of fixed ones, by which its weights are known again."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from decode.common.errors import ConfigError, RunError
from distill.config import ResponseSampling
from distill.engines.config import TargetConfig
from distill.engines.http_client import FIRST_ANSWER_S, HttpClient, NoAnswerError, RefusedError, nothing_answers
from distill.runtimes.openai_answers import Answer
from distill.runtimes.probe import check_weights

NOT_TAKEN = frozenset({400, 404, 405, 422, 501})
"""Statuses of a request that a server does not know, or not with these fields."""
PLAIN = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
BEYOND = {
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "repetition_penalty": 1.0,
    "top_k": -1,
    "min_p": 0.0,
}
"""Fields that OpenAI's own protocol lacks: vLLM, SGLang and llama.cpp know some of them and pass over the others. These
values change nothing; llama.cpp by itself keeps 40 tokens."""
LIKELIEST = 5
"""As many as OpenAI's protocol lets any server tell."""
TRIALS = 8


@dataclass
class OpenAiServer:
    """One, by its address and the name of the model there."""

    url: str
    client: HttpClient
    model: str
    software: str
    """Its name and version, as far as it tells them."""
    max_model_len: int | None
    beyond: dict[str, Any] = field(default_factory=lambda: dict(BEYOND))
    """Of BEYOND what it takes: all or nothing."""

    @classmethod
    def connect(cls, target: TargetConfig) -> OpenAiServer:
        """Raises ConfigError where no such server answers, it asks for another key, or has not this model."""
        url = str(target.url)
        client = HttpClient(url.rstrip("/").removesuffix("/v1"), _key(target.key_variable), target.timeout)
        try:
            listed = client.once("/v1/models", timeout=FIRST_ANSWER_S)["data"]
            served = {str(one["id"]): one for one in listed}
            named = served[_chosen(url, list(served), target.served_name)]
            software = " ".join(filter(None, [str(named.get("owned_by") or "unknown"), client.version()]))
            length = named.get("max_model_len") or (named.get("meta") or {}).get("n_ctx")  # vLLM, llama.cpp
        except NoAnswerError as error:
            if isinstance(error.__cause__, ValueError):
                raise ConfigError(_other(url, "its answer is no JSON")) from error
            raise nothing_answers(f"target.url={url}", error) from error
        except RefusedError as error:
            if error.status in (401, 403):
                raise ConfigError(refused_key(target, error)) from error
            raise ConfigError(_other(url, str(error))) from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(_other(url, repr(error))) from error
        except RunError as error:
            raise ConfigError(str(error)) from error
        return cls(url, client, str(named["id"]), software, length if isinstance(length, int) else None)

    def complete(self, prompt: list[int] | str, max_tokens: int, **settings: Any) -> Answer:
        """The continuation of a text. Nothing of the server's own defaults is taken. Raises RunError."""
        request = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens}
        answer = self.client.ask("/v1/completions", request | PLAIN | self.beyond | settings)
        return Answer.parsed(answer, f"the server at {self.url}")

    def tokenize(self, text: str) -> list[int]:
        """Its ids, without special tokens. Raises RefusedError where the server has no such address."""
        texts = dict.fromkeys(("prompt", "content", "inputs"), text)  # vLLM and SGLang, llama.cpp, TGI
        plain = {"add_special_tokens": False, "add_special": False}
        answer = self.client.ask("/tokenize", {"model": self.model, **texts, **plain})
        if isinstance(answer, list):
            return [one["id"] for one in answer]
        return answer["tokens"]

    def drawing(self, asked: ResponseSampling) -> dict[str, Any]:
        """How responses are drawn, in the protocol's words."""
        further = {"top_k": asked.top_k or -1, "min_p": asked.min_p} if self.beyond else {}
        return {"temperature": asked.temperature, "top_p": asked.top_p, **further}

    def one_token(self, prompt: list[int], count: int, **settings: Any) -> Answer:
        """The answer to a text with one token and `count` likeliest ones. Some servers tell nothing of an end of text,
        or of a part of a character: an end is kept away, and others are drawn by further seeds."""
        kept_away = {"ignore_eos": True} if self.beyond else {}
        for seed in range(TRIALS):
            answer = self.complete(prompt, 1, logprobs=count, seed=seed, **kept_away | settings)
            if answer.positions:
                break
        return answer

    def likeliest(self, prompts: list[list[int]], count: int = LIKELIEST, **settings: Any) -> list[list[float]]:
        """log p of the likeliest tokens behind each text, by falling p; [] where it tells none. Raises RunError."""
        found = [self.one_token(prompt, count, **settings).positions for prompt in prompts]
        return [[log_p for _, log_p in told[0].likeliest[:count]] if told else [] for told in found]

    def check_same(self, probe: list[int], before: list[float] | None) -> None:
        """Raise RunError where it is another one than when `before` was told: nothing of other weights gets into the
        records. One that tells no log-probabilities is known by its model's name alone."""
        names = [one.get("id") for one in self.client.ask("/v1/models").get("data") or []]
        if self.model not in names:
            raise RunError(
                f"the server at {self.url} served {self.model} when this run started, and now serves {names}. Serve "
                "the first model again and give resume=auto, or use another folder"
            )
        if before is not None:
            check_weights(self.url, list(chain(*self.likeliest(probe_prompts(probe)))), before, "unknown")


def probe_prompts(probe: list[int]) -> list[list[int]]:
    """The fixed text and its beginnings, of a quarter, a half and three quarters of it."""
    return [probe[: max(1, len(probe) * part // 4)] for part in (1, 2, 3, 4)]


def _key(variable: str | None) -> str | None:
    """Raises ConfigError where it is not there, or cannot be sent."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(
            f"target.key_variable={variable}, and the environment has no variable {variable}, or an empty one; set it "
            f"to the server's key (export {variable}=...), or leave target.key_variable out"
        )
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(
            f"the value of the environment variable {variable} holds spaces or characters that a key cannot have; "
            "set it to the server's key alone"
        )
    return key


def _chosen(url: str, names: list[str], wanted: str | None) -> str:
    if wanted is None and len(names) == 1:
        return names[0]
    if wanted is None or wanted not in names:
        raise ConfigError(
            f"the server at target.url={url} serves {', '.join(names) or 'no model'}, and target.served_name is "
            f"{wanted or 'not set'}; name one of them with target.served_name, or correct the address"
        )
    return wanted


def refused_key(target: TargetConfig, error: RefusedError) -> str:
    """What to do about it."""
    url, variable = target.url, target.key_variable
    if variable is None:
        return (
            f"the server at target.url={url} asks for a key ({error}); put it into an environment variable and name "
            "that, as target.key_variable=OPENAI_API_KEY"
        )
    return f"the server at target.url={url} refuses the key in the environment variable {variable} ({error})"


def _other(url: str, why: str) -> str:
    return (
        f"what answers at target.url={url} does not list its models as OpenAI's protocol has it ({why}): another kind "
        "of server, or another address; give it as http://HOST:PORT/v1"
    )
