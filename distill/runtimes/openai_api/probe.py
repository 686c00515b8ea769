"""What a server says of fixed texts, by which its weights are known again."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from decode.common.errors import RunError
from distill.runtimes.vllm_probe import ROUNDING, distance

if TYPE_CHECKING:
    from distill.runtimes.openai_api.answers import Answer
    from distill.runtimes.openai_api.server import OpenAiServer

LIKELIEST = 5
"""As many as OpenAI's protocol lets any server tell."""
TRIALS = 8


def probe_prompts(probe: list[int]) -> list[list[int]]:
    """The fixed text and its beginnings, of a quarter, a half and three quarters of it."""
    return [probe[: max(1, len(probe) * part // 4)] for part in (1, 2, 3, 4)]


def one_token(server: OpenAiServer, prompt: list[int], count: int, **settings: Any) -> Answer:
    """The answer to a text with one token and `count` likeliest ones. Some servers tell nothing of an end of text, or
    of a part of a character: an end is kept away, and others are drawn by further seeds."""
    kept_away = {"ignore_eos": True} if server.beyond else {}
    for seed in range(TRIALS):
        answer = server.complete(prompt, 1, logprobs=count, seed=seed, **kept_away | settings)
        if answer.positions:
            break
    return answer


def likeliest(
    server: OpenAiServer, prompts: list[list[int]], count: int = LIKELIEST, **settings: Any
) -> list[list[float]]:
    """log p of the likeliest tokens behind each text, by falling p; [] where the server tells none. Raises RunError."""
    found = [one_token(server, prompt, count, **settings).positions for prompt in prompts]
    return [[log_p for _, log_p in told[0].likeliest[:count]] if told else [] for told in found]


def check_same(server: OpenAiServer, probe: list[int], before: list[float] | None) -> None:
    """Raise RunError where the server is another one than when `before` was told: nothing of other weights gets into
    the records. One that tells no log-probabilities is known by its model's name alone."""
    server.check_listed()
    if before is None:
        return
    far = distance(list(chain(*likeliest(server, probe_prompts(probe)))), before)
    if not far <= ROUNDING["unknown"]:
        raise RunError(
            f"the server at {server.url} runs other weights than when this run started: log p of the likeliest tokens "
            f"behind a fixed text moved by {far:.3g}, and rounding is below {ROUNDING['unknown']:g}. Nothing that it "
            "wrote since it was last looked at was kept. Serve the first weights again and give resume=auto, or use "
            "another folder"
        )
