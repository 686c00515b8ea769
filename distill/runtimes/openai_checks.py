"""Whether a server that speaks OpenAI's protocol runs the target and tells what the run needs; each check raises
ConfigError, before anything of the run is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

from transformers import PreTrainedTokenizerBase

from decode.common.errors import ConfigError
from distill.config import ResponseSampling
from distill.engines.config import LATER, TargetConfig
from distill.engines.http_client import RefusedError, refusing
from distill.runtimes.openai_answers import Answer, TokenIds
from distill.runtimes.openai_server import NOT_TAKEN, OpenAiServer, probe_prompts, refused_key
from distill.runtimes.probe import ROUNDING, TEXTS, check_length, check_tokens, distance

MOST_TOLD = 20
"""Likeliest tokens that vLLM tells where --max-logprobs does not say otherwise."""


@dataclass(frozen=True)
class Needs:
    """Of a run."""

    target: TargetConfig
    tokenizer: PreTrainedTokenizerBase
    sampling: ResponseSampling
    longest: int
    """Tokens of its longest text."""
    probe: list[int]
    """The fixed text."""
    likeliest: int | None
    """Tokens whose p is kept; None keeps the text alone."""


@dataclass(frozen=True)
class Told:
    """How a server tells what it writes."""

    source: TokenIds
    log_p: list[float] | None
    """Of the fixed text; None where it tells no log-probabilities."""


def check_server(server: OpenAiServer, needs: Needs) -> Told:
    """All of it; leaves in `server` which fields it takes."""
    with refusing(), _naming_the_key(needs.target):
        if server.max_model_len is not None:
            check_length(server.url, server.max_model_len, needs.longest)
        answer = check_ids(server, needs)
        check_tokenizer(server, needs)
        log_p = told_log_p(server, needs.probe)
        if needs.likeliest is not None:
            check_likeliest(server, needs, needs.likeliest)
        return Told("of the text" if answer is None else answer.source, log_p)


@contextmanager
def _naming_the_key(target: TargetConfig) -> Iterator[None]:
    """llama.cpp lists its models to all, and asks for the key later."""
    try:
        yield
    except RefusedError as error:
        if error.status in (401, 403):
            raise ConfigError(refused_key(target, error)) from error
        raise


def check_ids(server: OpenAiServer, needs: Needs) -> Answer | None:
    """A prompt of ids is read as these ids. Returns an answer with everything that the server tells of tokens."""
    prompt = needs.probe
    answer = _asked_as_it_takes(server, needs)
    if answer.prompt_tokens not in (None, len(prompt)):
        raise ConfigError(
            f"the server at {server.url} read {answer.prompt_tokens} tokens of a prompt of {len(prompt)} "
            "token ids: it adds some or cuts the prompt, and its responses would answer other prompts than are recorded"
        )
    if answer.source == "told":
        return answer
    try:
        return server.one_token(prompt, 1)
    except RefusedError as error:
        if error.status in NOT_TAKEN:
            return None
        raise


def _asked_as_it_takes(server: OpenAiServer, needs: Needs) -> Answer:
    """With the fields beyond OpenAI's protocol; without them where the server refuses these."""
    try:
        return server.complete(needs.probe, 1)
    except RefusedError as error:
        if error.status not in NOT_TAKEN:
            raise
        refused = error
    server.beyond = {}
    try:
        answer = server.complete(needs.probe, 1)
    except RefusedError as error:
        raise ConfigError(
            f"the server at {server.url} does not take a prompt of token ids at /v1/completions ({error}), and text "
            "alone does not say which tokens it reads. vLLM, SGLang and llama.cpp take ids"
        ) from error
    needed = [name for name in ("top_k", "min_p") if getattr(needs.sampling, name)]
    if needed:
        raise ConfigError(
            f"sampling.{needed[0]}={getattr(needs.sampling, needed[0])}, and the server at {server.url} does "
            f"not take it ({refused}); leave it out, or use sampling.top_p"
        )
    return answer


def check_tokenizer(server: OpenAiServer, needs: Needs) -> None:
    """The server cuts fixed texts into the target's tokens, or, where it does not show its cuts, into as many."""
    try:
        check_tokens(server.url, server.model, server.tokenize, needs.tokenizer, str(needs.target.path))
    except RefusedError as error:
        if error.status not in NOT_TAKEN:
            raise
    except (KeyError, TypeError):
        pass
    else:
        return
    for text in TEXTS:
        counted = server.complete(text, 1).prompt_tokens
        wanted = {len(needs.tokenizer.encode(text, add_special_tokens=special)) for special in (False, True)}
        if counted not in wanted:
            raise ConfigError(
                f"the server at {server.url} serves {server.model}, which counts {counted} tokens in {text[:20]!r}..., "
                f"and target.path={needs.target.path} has {sorted(wanted)}: it is another model. Start the server "
                "with this one, or name its folder"
            )


def told_log_p(server: OpenAiServer, probe: list[int]) -> list[float] | None:
    """What it says of fixed texts, by which its weights are known from now on."""
    try:
        return list(chain(*server.likeliest(probe_prompts(probe)))) or None
    except RefusedError as error:
        if error.status not in NOT_TAKEN:
            raise
        return None


def check_likeliest(server: OpenAiServer, needs: Needs, count: int) -> None:
    """It tells as many likeliest tokens as are to be kept, by their ids, and p of them at temperature 1, unwarped."""
    wanted = f"records.store=[topk] with records.topk={count}"
    remedy = f"Use a server that does (vLLM, llama.cpp), or {LATER}"
    try:
        answer = server.one_token(needs.probe, count)
    except RefusedError as error:
        raise ConfigError(
            f"{wanted}, and the server at {server.url} does not tell so many: {error}. Use records.topk={MOST_TOLD}, "
            f"start it so that it tells more (vLLM: --max-logprobs {count}), or {LATER}"
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
    check_unwarped(server, needs, count)


def check_unwarped(server: OpenAiServer, needs: Needs, count: int) -> None:
    """Some servers tell p behind temperature and top_p, by which it is no p of the target."""
    warp, prompts = server.drawing(needs.sampling), probe_prompts(needs.probe)
    plain, warped = (server.likeliest(prompts, count, **settings) for settings in ({}, warp))
    both = [pair for pair in zip(plain, warped, strict=True) if all(pair)]
    far = max((distance(one, other) for one, other in both), default=0.0)
    if not far <= ROUNDING["unknown"]:
        raise ConfigError(
            f"the server at {server.url} tells p behind {warp} (log p moves by {far:.3g}). Use sampling.temperature=1 "
            f"and no top_k, top_p and min_p, make it tell raw p (vLLM: --logprobs-mode raw_logprobs) or {LATER}"
        )
