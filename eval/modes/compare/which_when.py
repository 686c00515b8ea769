"""Which way to draft is the fastest for which text, and what a mixture gains over its members: computed from cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.arms.base import PLAIN_ARMS, our_name
from eval.results.compared import DraftingArm
from eval.results.statistics import Estimate, described, fastest_arm, ratio_over

FEWEST = 3
"""Batches of prompts from which anything of others is concluded."""
Cells = Sequence[Mapping[str, Any]]
"""One cell in each run."""
DEFINITIONS = {
    "texts": "code: windows of held-out sources are continued. free: how docstrings of held-out sources begin. edit, "
    "answer, log: tasks made of held-out files, with what they copy from in the prompt. own: the prompts of a file.",
    "choices": "Draft lengths, and the peers' settings, are chosen for every arm and cell on prompts of the validation "
    "split (of a file: on others than are timed), which are never reported; the fastest median counts.",
    "over_plain": "Speed over that of the faster way without a draft in the same cell, paired by batch of prompts: our "
    "autoregressive loop or transformers generate.",
    "which_when": "The arm of the highest median tokens per second. `as_good` are those that the same batches do not "
    "tell from it: the 95% interval of its speed over theirs includes 1. The best is picked on the prompts that it is "
    "reported on, so its speed is slightly flattered. Null where there are fewer than 3 batches. "
    "Without training: no part of it has weights.",
    "mixtures": "A mixture over the fastest arm that drafts with one of its members alone, paired by batch of prompts. "
    "What it learned in cells before stays with it, as it would in a service.",
    "vllm": "vLLM's CPU engine in its own environment, times taken inside it; vllm ngram is its prompt lookup, which "
    "looks for 2 to 4 tokens. It draws its own noise, so at temperature 1 its text differs from ours.",
}


def over_plain(cells: Cells) -> dict[str, str]:
    """Ratio -> the arm that others are held against in runs of one cell: the faster one without a draft."""
    plain = fastest_arm(cells, PLAIN_ARMS)
    return {} if plain is None else {"over_plain": plain}


def conclude(cells: Sequence[Cells], arms: Mapping[str, DraftingArm], seed: int) -> dict[str, Any]:
    """Both answers, by cell; `cells` holds each cell in every run."""
    return {"which_when": which_when(cells, arms, seed), "mixtures": mixtures(cells, arms, seed)}


def which_when(cells: Sequence[Cells], arms: Mapping[str, DraftingArm], seed: int) -> list[dict[str, Any]]:
    """By cell the fastest of our ways, plain decoding among them, and the fastest that nothing was trained for; each
    {"arm", "over_plain", "over_plain_ci95", "as_good"}, where the arm of plain decoding is that which was faster, and
    `as_good` is None where too few batches tell."""
    return [
        {
            **_about(runs),
            "best": _best(runs, _ran(runs, arms), seed),
            "best_without_training": _best(
                runs, [name for name in _ran(runs, arms) if not arms[name].has_weights], seed
            ),
        }
        for runs in cells
    ]


def mixtures(cells: Sequence[Cells], arms: Mapping[str, DraftingArm], seed: int) -> list[dict[str, Any]]:
    """By cell and mixture its speed over that of the fastest arm that drafts with one member alone; nothing where no
    such arm ran."""
    found = []
    for runs in cells:
        ran = _ran(runs, arms)
        for name in [name for name in ran if arms[name].members]:
            members = [one for one in ran if arms[one].draft in arms[name].members]
            best = fastest_arm(runs, map(our_name, members))
            if best is not None:
                ratio = described("over_member", ratio_over(runs, our_name(name), best, seed))
                found.append({**_about(runs), "arm": name, "member": _setting(best, members), **ratio})
    return found


def _best(runs: Cells, names: Sequence[str], seed: int) -> dict[str, Any] | None:
    plain = fastest_arm(runs, PLAIN_ARMS)
    known = [*([] if plain is None else [plain]), *map(our_name, names)]
    best = fastest_arm(runs, known)
    if plain is None or best is None:
        return None
    over = {other: ratio_over(runs, best, other, seed) for other in known if other != best}
    is_told = len(runs[0]["arms"][0]["seconds_per_token"]) >= FEWEST
    as_good = [_setting(other, names) for other, ratio in over.items() if _is_no_slower(ratio)]
    return {
        "arm": _setting(best, names),
        **described("over_plain", ratio_over(runs, best, plain, seed)),
        "as_good": as_good if is_told else None,
    }


def _is_no_slower(ratio: Estimate | None) -> bool:
    """Of the other arm, by the best one's speed over its."""
    return ratio is not None and ratio.ci95 is not None and ratio.ci95[0] <= 1


def _ran(runs: Cells, arms: Mapping[str, Any]) -> list[str]:
    timed = {one["arm"] for one in runs[0]["arms"]}
    return [name for name in arms if our_name(name) in timed]


def _setting(arm: str, names: Sequence[str]) -> str:
    """Our own name for one of our ways; that of the arm where it drafts nothing."""
    return next((name for name in names if our_name(name) == arm), arm)


def _about(runs: Cells) -> dict[str, Any]:
    return {key: runs[0][key] for key in ("text", "batch_size", "temperature")}
