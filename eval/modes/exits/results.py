"""results.json of `mode=exits`, from which `draft.settings.profile=` takes its layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decode.models.load import ModelDescription
from eval.config import EvalConfig
from eval.results.document import heading, target_entry

DEFINITIONS = {
    "alpha": "Mean of sum_v min(p_v, q_v) over what the target wrote, with q what the exit says; at T = 0 the share of "
    "positions where the argmaxes agree. Brackets are 95% intervals over prompts.",
    "t_lower": "Milliseconds of a pass over one token through the layers that draft, with norm and head.",
    "predicted": "tau x t_target(1) / (k x t_lower + t_rest(k + 1)), with t_rest what is left of the verdict's pass "
    "and tau what the acceptance of consecutive positions promises; at the k where it is the most.",
}


def make_results(
    cfg: EvalConfig, target: ModelDescription, found: Sequence[dict[str, Any]], t_target_1: float, prompts: int,
    seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """The content of results.json."""
    plain = [one for one in found if one["draft"] is None]
    return {
        **heading(cfg, seconds),
        "target": target_entry(target, target.dtype_name),
        "definitions": DEFINITIONS,
        "rows": [],
        "exit_layer": best_of(plain, cfg.temperatures[0])["exit_layer"],
        "t_target_1_s": t_target_1,
        "batch_size": cfg.timing.batch_size,
        "prompts": {"count": prompts, "max_new_tokens": cfg.decode.max_new_tokens, "source": _source(cfg)},
        "exits": list(found),
    }


def best_of(found: Sequence[dict[str, Any]], temperature: float) -> dict[str, Any]:
    """The exit of most predicted speedup at a temperature."""
    return max((one for one in found if one["temperature"] == temperature), key=lambda one: one["predicted_speedup"])


def _source(cfg: EvalConfig) -> str:
    return cfg.prompts.file or f"validation split of {cfg.data.name}"
