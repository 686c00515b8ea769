"""Whether a server runs the target that it is taken for: its tokens, and what it gives of a fixed text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from decode.common.errors import ConfigError, RunError

TEXTS = (
    "Each answer is checked against the first one: 3.14, 2,718 and 10^6 of them.",
    "def add(a: int, b: int = 0) -> int:\n    return a + b  # two spaces\n\n\tx = [1, 2]\r\n",
    "Grüße aus Łódź, привет, 你好世界, こんにちは, مرحبا, 🙂👩‍💻",
    "   three spaces,\ttabs\t\tand a trailing space ",
)
ROUNDING = {"float32": 0.005, "bfloat16": 0.1, "float16": 0.1, "unknown": 0.1}
"""Root mean square of what log p of a token may differ by between passes of the same weights, with room: two attention
kernels in bfloat16 gave 0.009 with a 28M target on a CPU; larger ones and GPUs were not measured. Noise of 3 % of each
matrix's spread gave 0.046 there, of 1 % 0.021."""
LENGTH = 32


def probe_ids(tokenizer: PreTrainedTokenizerBase, room: int) -> list[int]:
    """The fixed text, as long as there is room."""
    return tokenizer.encode(" ".join(TEXTS), add_special_tokens=False)[: min(LENGTH, room)]


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Root mean square of their differences; infinite where they are of texts of other lengths."""
    if len(one) != len(other):
        return float("inf")
    return float((torch.tensor(one) - torch.tensor(other)).square().mean().sqrt())


def check_weights(url: str, now: Sequence[float], before: Sequence[float], dtype: str) -> None:
    """Raise RunError where log p of the fixed text moved by more than rounding: nothing of other weights gets into the
    records."""
    far = distance(now, before)
    if not far <= ROUNDING[dtype]:
        raise RunError(
            f"the server at {url} runs other weights than when this run started: log p of a fixed text moved by "
            f"{far:.3g} (rounding: {ROUNDING[dtype]:g}). Serve the first ones and resume, or use another folder"
        )


def check_end(url: str, token: int, eos: Sequence[int]) -> None:
    """Raise RunError where a server ends a text by another token than the target does."""
    if token not in eos:
        raise RunError(
            f"the server at {url} ended a text at token {token}, and the target's ends are {eos}: its generation "
            "config is another one; start vLLM with --generation-config vllm"
        )


def check_length(url: str, most: int, longest: int) -> None:
    """Raise ConfigError where the run's longest text does not fit."""
    if most < longest:
        raise ConfigError(
            f"the server at {url} takes texts of {most} tokens, and the run's longest one may have {longest}; start it "
            f"with more (vLLM: --max-model-len {longest}), or use fewer sampling.max_new_tokens"
        )


def check_tokens(
    url: str, model: str, tokenize: Callable[[str], list[int]], tokenizer: PreTrainedTokenizerBase, path: str
) -> None:
    """Raise ConfigError where the server cuts a text, without special tokens, into others than `tokenizer` does."""
    for text in TEXTS:
        ours, theirs = tokenizer.encode(text, add_special_tokens=False), tokenize(text)
        if ours != theirs:
            place = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))
            raise ConfigError(
                f"the server at {url} serves {model}, which cuts {text[:20]!r}... into other tokens "
                f"than target.path={path}: {theirs[place : place + 3]}, not {ours[place : place + 3]}, from token "
                f"{place} on. Start it with this model, or name its folder"
            )
