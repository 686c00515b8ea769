"""What `decode.strict` costs: the plain and the speculative loop with and without padding, timed in turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from transformers import PreTrainedModel

from decode import generate
from decode.drafters.base import Drafter
from eval.config import EvalConfig
from eval.measure.continuations import left_padded
from eval.measure.quality import settings_at
from eval.prompts.held_out import Prompt

ROUNDS = 4
NEW_TOKENS = 48
ARMS = {
    "plain": (False, False),
    "plain_padded": (False, True),
    "speculative": (True, False),
    "speculative_padded": (True, True),
}
"""Name -> (with the draft, strict)."""


def measure_padding(
    cfg: EvalConfig, model: PreTrainedModel, drafter: Drafter, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """Tokens per second after the first arrival of each arm, medians over rounds of timing.batch_size prompts each, at
    the first configured temperature. The first round warms up and is left out."""
    size, temperature = cfg.timing.batch_size, cfg.temperatures[0]
    speeds: dict[str, list[float]] = {name: [] for name in ARMS}
    for turn in range(ROUNDS + 1):
        ids = [prompts[(turn * size + i) % len(prompts)].ids for i in range(size)]
        for name, (drafts, strict) in ARMS.items():
            settings = {**settings_at(cfg, temperature), "strict": strict, "max_new_tokens": NEW_TOKENS}
            speed = _tokens_per_s(model, drafter if drafts else None, settings, cfg.seed, ids)
            if turn and speed is not None:
                speeds[name].append(speed)
    found = {name: median(each) if each else None for name, each in speeds.items()}
    return {
        "temperature": temperature,
        "batch_size": size,
        "rows": cfg.decode.num_draft_tokens + 1,
        "tokens_per_s": found,
    }


def _tokens_per_s(
    model: PreTrainedModel, drafter: Drafter | None, settings: Mapping[str, Any], seed: int, prompts: Sequence[Any]
) -> float | None:
    """None where everything came with the first arrival."""
    ids, mask = left_padded(prompts, 0, model.device)
    stats = generate(model, drafter, ids, attention_mask=mask, seed=seed, **settings).stats
    later = stats.num_tokens - sum(one.emitted for one in stats.rounds[: len(prompts)])
    return later / (stats.arrival_s[-1] - stats.arrival_s[0]) if later else None
