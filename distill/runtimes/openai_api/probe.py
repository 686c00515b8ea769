"""What a server says of fixed texts, by which its weights are known again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from decode.common.errors import RunError
from distill.runtimes.vllm_probe import ROUNDING, distance

if TYPE_CHECKING:
    from distill.runtimes.openai_api.server import OpenAiServer

LIKELIEST = 5
"""As many as OpenAI's protocol lets any server tell."""


def probe_prompts(probe: list[int]) -> list[list[int]]:
    """The fixed text and its beginnings, of a quarter, a half and three quarters of it."""
    return [probe[: max(1, len(probe) * part // 4)] for part in (1, 2, 3, 4)]


def likeliest(
    server: OpenAiServer, prompts: list[list[int]], count: int = LIKELIEST, **settings: Any
) -> list[float] | None:
    """log p of the likeliest tokens behind each text, by falling p; None where the server tells none. Raises
    RunError."""
    found: list[float] = []
    for prompt in prompts:
        told = server.complete(prompt, 1, logprobs=count, **settings).positions
        if not told or not told[0].likeliest:
            return None
        found += [log_p for _, log_p in told[0].likeliest[:count]]
    return found


def check_same(server: OpenAiServer, probe: list[int], before: list[float] | None) -> None:
    """Raise RunError where the server is another one than when `before` was told: nothing of other weights gets into
    the records. One that tells no log-probabilities is known by its model's name alone."""
    server.check_listed()
    if before is None:
        return
    far = distance(likeliest(server, probe_prompts(probe)) or [], before)
    if not far <= ROUNDING["unknown"]:
        raise RunError(
            f"the server at {server.url} runs other weights than when this run started: log p of the likeliest tokens "
            f"behind a fixed text moved by {far:.3g}, and rounding is below {ROUNDING['unknown']:g}. Nothing that it "
            "wrote since it was last looked at was kept. Serve the first weights again and give resume=auto, or use "
            "another folder"
        )
