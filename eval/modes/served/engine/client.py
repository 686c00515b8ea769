"""Prompts as token ids to a server, texts as token ids back, with the time that they took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from decode.common.errors import InputError
from eval.modes.served.engine.server import Server

_PLAIN = {
    "ignore_eos": True,
    "return_token_ids": True,
    # left out, vLLM takes them from the generation_config.json of the model
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


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
        ids = answer["choices"][0]["token_ids"]
    except (LookupError, TypeError):
        ids = None
    if not isinstance(ids, list) or len(ids) != max_tokens:
        got = "no token ids" if not isinstance(ids, list) else f"{len(ids)} tokens"
        raise InputError(
            f"the server at {server.url} answered with {got} where {max_tokens} tokens were asked for by "
            "return_token_ids and ignore_eos, as vLLM knows them from 0.10.2 on. Update it; or its --max-model-len is "
            "too small for the prompts"
        )
    return ids
