"""Whether a server that speaks OpenAI's protocol runs the target and tells what the run needs; each check raises
ConfigError, before anything of the run is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING

from decode.common.errors import ConfigError
from distill.runtimes.http_client import RefusedError, refusing
from distill.runtimes.openai_api.answers import Answer
from distill.runtimes.openai_api.probe import likeliest, one_token, probe_prompts
from distill.runtimes.openai_api.server import NOT_TAKEN, refused_key
from distill.runtimes.openai_api.settings import LATER
from distill.runtimes.vllm_probe import ROUNDING, TEXTS, check_tokens, distance

if TYPE_CHECKING:
    from distill.runtimes.openai_api.runtime import OpenAiRuntime

MOST_TOLD = 20
"""Likeliest tokens that vLLM tells where --max-logprobs does not say otherwise."""


def check_server(runtime: OpenAiRuntime) -> None:
    """All of it; leaves what the server takes and tells in `runtime`."""
    with refusing(), _naming_the_key(runtime):
        check_room(runtime)
        answer = check_ids(runtime)
        check_tokenizer(runtime)
        remember(runtime)
        if runtime.store is not None:
            check_likeliest(runtime)
        runtime.note_server("of the text" if answer is None else answer.source)


@contextmanager
def _naming_the_key(runtime: OpenAiRuntime) -> Iterator[None]:
    """llama.cpp lists its models to all, and asks for the key later."""
    try:
        yield
    except RefusedError as error:
        if error.status in (401, 403):
            raise ConfigError(refused_key(runtime.config.target, error)) from error
        raise


def check_room(runtime: OpenAiRuntime) -> None:
    """Texts of the run fit, as far as the server says how long they may be."""
    room = runtime.server.max_model_len
    if room is not None and room < runtime.longest:
        raise ConfigError(
            f"the server at {runtime.server.url} takes texts of {room} tokens, and the run's longest one may have "
            f"{runtime.longest}; start it with more, or use fewer sampling.max_new_tokens"
        )


def check_ids(runtime: OpenAiRuntime) -> Answer | None:
    """A prompt of ids is read as these ids. Returns an answer with everything that the server tells of tokens."""
    prompt = runtime.probe
    answer = _asked_as_it_takes(runtime)
    if answer.prompt_tokens not in (None, len(prompt)):
        raise ConfigError(
            f"the server at {runtime.server.url} read {answer.prompt_tokens} tokens of a prompt of {len(prompt)} "
            "token ids: it adds some or cuts the prompt, and its responses would answer other prompts than are recorded"
        )
    if answer.source == "told":
        return answer
    try:
        return one_token(runtime.server, prompt, 1)
    except RefusedError as error:
        if error.status in NOT_TAKEN:
            return None
        raise


def _asked_as_it_takes(runtime: OpenAiRuntime) -> Answer:
    """With the fields beyond OpenAI's protocol; without them where the server refuses these."""
    server = runtime.server
    try:
        return server.complete(runtime.probe, 1)
    except RefusedError as error:
        if error.status not in NOT_TAKEN:
            raise
        refused = error
    server.beyond = {}
    try:
        answer = server.complete(runtime.probe, 1)
    except RefusedError as error:
        raise ConfigError(
            f"the server at {server.url} does not take a prompt of token ids at /v1/completions ({error}), and text "
            "alone does not say which tokens it reads. vLLM, SGLang and llama.cpp take ids"
        ) from error
    needed = [name for name in ("top_k", "min_p") if getattr(runtime.config.sampling, name)]
    if needed:
        raise ConfigError(
            f"sampling.{needed[0]}={getattr(runtime.config.sampling, needed[0])}, and the server at {server.url} does "
            f"not take it ({refused}); leave it out, or use sampling.top_p"
        )
    return answer


def check_tokenizer(runtime: OpenAiRuntime) -> None:
    """The server cuts fixed texts into the target's tokens, or, where it does not show its cuts, into as many."""
    server, tokenizer = runtime.server, runtime.tokenizer
    try:
        check_tokens(server, tokenizer, runtime.target.path)
    except RefusedError as error:
        if error.status not in NOT_TAKEN:
            raise
    except (KeyError, TypeError):
        pass
    else:
        return
    for text in TEXTS:
        counted = server.complete(text, 1).prompt_tokens
        wanted = {len(tokenizer.encode(text, add_special_tokens=special)) for special in (False, True)}
        if counted not in wanted:
            raise ConfigError(
                f"the server at {server.url} serves {server.model}, which counts {counted} tokens in {text[:20]!r}..., "
                f"and target.path={runtime.target.path} has {sorted(wanted)}: it is another model. Start the server "
                "with this one, or name its folder"
            )


def remember(runtime: OpenAiRuntime) -> None:
    """What the server says of fixed texts, by which its weights are known from now on."""
    try:
        runtime.log_p = list(chain(*likeliest(runtime.server, probe_prompts(runtime.probe)))) or None
    except RefusedError as error:
        if error.status not in NOT_TAKEN:
            raise
        runtime.log_p = None


def check_likeliest(runtime: OpenAiRuntime) -> None:
    """It tells as many likeliest tokens as are to be kept, by their ids, and p of them at temperature 1, unwarped."""
    assert runtime.store is not None
    server, count = runtime.server, runtime.store.head
    wanted = f"records.store=[topk] with records.topk={count}"
    remedy = f"Use a server that does (vLLM, llama.cpp). Or: {LATER}"
    try:
        answer = one_token(server, runtime.probe, count)
    except RefusedError as error:
        raise ConfigError(
            f"{wanted}, and the server at {server.url} does not tell so many: {error}. Use records.topk={MOST_TOLD}, "
            f"or start it so that it tells more (vLLM: --max-logprobs {count}). Or: {LATER}"
        ) from error
    told = answer.positions[0].likeliest if answer.positions else []
    if not told:
        raise ConfigError(f"{wanted}, and the server at {server.url} tells no likeliest tokens. {remedy}")
    if any(token is None for token, _ in told) or answer.source == "of the text":
        raise ConfigError(
            f"{wanted}, and the server at {server.url} tells the likeliest tokens by their text, which may be that of "
            f"several tokens, not by their ids. {remedy}"
        )
    if len(told) < count:
        raise ConfigError(
            f"{wanted}, and the server at {server.url} tells {len(told)} likeliest tokens; use records.topk={len(told)}"
        )
    check_unwarped(runtime, count)


def check_unwarped(runtime: OpenAiRuntime, count: int) -> None:
    """Some servers tell p behind temperature and top_p, by which it is no p of the target."""
    server, warp = runtime.server, runtime.sampling()
    prompts = probe_prompts(runtime.probe)
    plain, warped = (likeliest(server, prompts, count, **settings) for settings in ({}, warp))
    both = [pair for pair in zip(plain, warped, strict=True) if all(pair)]
    far = max((distance(one, other) for one, other in both), default=0.0)
    if not far <= ROUNDING["unknown"]:
        raise ConfigError(
            f"log p of the likeliest tokens that the server at {server.url} tells changes by {far:.3g} with {warp}: "
            "it tells p behind these, and p is recorded at temperature 1, unwarped. Use sampling.temperature=1 and "
            f"no top_k, top_p and min_p, or start the server so that it tells raw ones (vLLM: --logprobs-mode "
            f"raw_logprobs). Or: {LATER}"
        )
