"""docs/results/training_peers.md, from its figures."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE, FIGURES = ROOT / "docs/results/training_peers.md", ROOT / "docs/results/training_peers/runs.json"
COMMAND = "python scripts/training_peers TARGET CHATS OUTPUT"
OURS, OWN = "draftsmith", "draftsmith, its own choices"
HEAD = """# Training beside other tools

The same draft on the same texts, tokens, weights to begin with, optimizer (AdamW), rates and precision, the target read
beside it. A draft LM is trained by `python -m train`, by transformers' Trainer with forward KL written by hand, and by
TRL's GKDTrainer (lmbda=0, beta=0: the same loss); an EAGLE-3 head by ours and by the speculators library.

"""
NOTES = """
Ratios are of ours over the tool's, run by run. Tokens are those of the texts, padding aside; memory is the most that a
process took, imports and target included. All keep the memory that they free, as `python -m train` does by itself on a
CPU and other tools do not. alpha is the chance of acceptance at T=1 on held-out chats, of all drafts by the same code.
"Its own choices" are the weights to begin with, optimizer (Muon) and rates of a plain `python -m train`. The
speculators library's own kernels (flex_attention, Triton losses) want a GPU: here it runs by its reference paths, so
that its time says nothing of a GPU.
"""


def spread(values: list[float], digits: int) -> str:
    """Median, least and greatest."""
    return f"{median(values):.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


def row_of(arm: str, of_arm: list[dict[str, float]], of_ours: list[dict[str, float]]) -> list[str]:
    """An arm's runs beside ours."""
    faster = [own["tokens_per_s"] / one["tokens_per_s"] for one, own in zip(of_arm, of_ours, strict=True)]
    smaller = [own["bytes"] / one["bytes"] for one, own in zip(of_arm, of_ours, strict=True)]
    ours = arm == OURS
    return [
        arm,
        spread([one["tokens_per_s"] for one in of_arm], 0),
        "" if ours else spread(faster, 2),
        spread([one["bytes"] / 1e9 for one in of_arm], 1),
        "" if ours else spread(smaller, 2),
        spread([one["alpha"] for one in of_arm], 3) if "alpha" in of_arm[0] else "",
    ]


def page_of(found: dict[str, Any]) -> str:
    """Medians over the runs, with the least and the greatest."""
    from decode.common.markdown import table

    runs, heads = found["runs"], ["tool", "tokens/s", "our tokens/s over it", "GB", "our GB over it", "alpha"]
    parts = []
    for case in runs[0]["cases"]:
        arms = {arm: [one["cases"][case][arm] for one in runs] for arm in runs[0]["cases"][case]}
        parts += [f"## {case}\n", table(heads, [row_of(arm, of, arms[OURS]) for arm, of in arms.items()]), ""]
    how = (
        f"\n{len(runs)} runs, seeds {', '.join(str(one['seed']) for one in runs)}: median [least, greatest]. Machine: "
        f"{'; '.join(sorted({one['machine'] for one in runs}))}. By `{found['command']}`, "
        f"{', '.join(sorted({one['date'] for one in runs}))}.\n"
    )
    return HEAD + "\n".join(parts) + how + NOTES
