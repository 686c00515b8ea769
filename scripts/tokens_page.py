"""Write docs/results/smollm2_tokens.md, its figures and its chart, from runs of `python -m train` that read more and
more tokens of the same records, or train other families on them:

    python scripts/tokens_page.py "First sentences." REPORT/results.json RUN1 RUN2 ...

A run's figures are those of its last validation; the report judges heads of few and of many tokens on other questions.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from decode.common.markdown import table
from train.metrics_log import METRICS, read_metrics

ROOT = Path(__file__).resolve().parents[1]
FILE, FIGURES = ROOT / "docs/results/smollm2_tokens", ROOT / "docs/results/smollm2/tokens.json"
STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "tokens", "font.family": "sans-serif"}
KEYS = ("alpha", "alpha_greedy", "tau", "tau_greedy")


def read_run(folder: Path) -> dict[str, Any]:
    """What one run says of itself: what was trained on how many tokens, and what came of it."""
    rows = read_metrics(folder / METRICS)
    config = json.loads((folder / "model/draftsmith.json").read_text())["config"]
    trained, judged = ([row for row in rows if row["kind"] == kind] for kind in ("train", "validation"))
    read = {row["step"]: row["tokens"] for row in trained}
    head, family = config["draft"]["head"], config["draft"]["family"]
    return {
        "family": "dflash" if family == "dspark" and not head["markov_rank"] else family,
        "steps": config["steps"],
        "depth": head["depth"],
        "vocab": head["vocab"],
        "rows": config["batch_size"],
        "row_tokens": config["sequence_length"],
        "objective": config["objective"]["name"],
        "seed": config["seed"],
        "tokens": trained[-1]["tokens"],
        "validation_tokens": judged[-1]["tokens"],
        **{key: round(judged[-1][key], 4) for key in KEYS},
        "course": [[read[row["step"]], round(row["alpha"], 4)] for row in judged if row["step"] in read],
    }


def read_report(file: Path) -> dict[str, Any]:
    """Each draft's greedy acceptance in a report, and the command that measured it."""
    found = json.loads(file.read_text())
    rows = [row for row in found["rows"] if row["category"] is None and row["temperature"] == 0]
    kept = ("draft", "num_draft_tokens", "alpha", "alpha_ci95", "tau", "tau_ci95")
    heads = [{key: row[key] for key in kept} | {"texts": len(row["alpha_by_document"])} for row in rows]
    return {"command": found["environment"]["command"], "heads": heads}


def slope(runs: list[dict[str, Any]]) -> float:
    """Alpha that ten times the tokens add: least squares over the runs."""
    pairs = [(math.log10(one["tokens"]), one["alpha"]) for one in runs]
    x, y = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
    return sum((a - x) * (b - y) for a, b in pairs) / sum((a - x) ** 2 for a, _ in pairs)


def by_then(run: dict[str, Any], tokens: int) -> str:
    """The alpha that a run had on its way, when it had read as many tokens or a little less."""
    return next((f"{alpha:.3f}" for read, alpha in reversed(run["course"]) if read <= tokens), "")


def page_of(found: dict[str, Any]) -> str:
    """The page, from the content of the JSON alone."""
    runs: list[dict[str, Any]] = found["runs"]
    line = [one for one in runs if one["family"] == runs[0]["family"]]
    most = max(line, key=lambda one: one["tokens"])
    lines = ["# Alpha over tokens", "", "<!-- Written by `python scripts/tokens_page.py`. -->", "", found["note"], ""]
    lines += [f"![alpha over tokens]({FILE.name}.svg)", ""]
    first = most["family"]
    heads = ["draft", "k", "tokens read", "rows x steps", "alpha", "at T=0", "tau estimate", "at T=0"]
    rows = [
        [
            *(one["family"], str(one["depth"]), f"{one['tokens']:,}", f"{one['rows']} x {one['steps']}"),
            *(f"{one[key]:.{digits}f}" for key, digits in zip(KEYS, (3, 3, 2, 2), strict=True)),
            "" if one["family"] == first else by_then(most, one["tokens"]),
        ]
        for one in runs
    ]
    lines.append(table([*heads, f"{first} of the longest run by then"], rows))
    judged = found["report"]["heads"]
    told = [
        f"`{one['draft']}` {one['alpha']:.2f} [{', '.join(f'{end:.2f}' for end in one['alpha_ci95'])}]"
        for one in judged
    ]
    gain = slope(line)
    wanted = {alpha: most["tokens"] * 10 ** ((alpha - most["alpha"]) / gain) for alpha in (0.6, 0.7)}
    lines += [
        "",
        f"Ten times the tokens add {gain:.2f} to the alpha of `{first}`, by one line through all of its runs. Were "
        "that to go on, it would reach "
        + " and ".join(f"{alpha} at {tokens / 1e6:.0f} million tokens" for alpha, tokens in wanted.items())
        + ". Nobody has looked.",
        "",
        f"Judged on {most['validation_tokens']:,} tokens of prompts that no run has read; one seed ({most['seed']}): "
        f"differences of 0.01 mean nothing. A row has {most['row_tokens']} tokens. The longest "
        f"run: `python -m train experiment=smollm2_head target_source=live objective={most['objective']} "
        f"objective.chunk_rows=4096 engine.deterministic=false batch_size={most['rows']} steps={most['steps']} "
        f"draft={most['family']} draft.head.depth={most['depth']}`.",
        "",
        f"On {judged[0]['texts']} questions of the report, at T=0: alpha "
        f"{' and '.join(told)}. `{found['report']['command']}`",
    ]
    return "\n".join([*lines, ""])


def draw(runs: list[dict[str, Any]], destination: Path) -> None:
    """Alpha over the tokens read, on a logarithmic axis; the SVG names the SHA-256 of the figures."""
    source = f"{FIGURES.name}, SHA-256 {hashlib.sha256(FIGURES.read_bytes()).hexdigest()}"
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6, 3), layout="constrained")
        axes = figure.subplots()
        for family in dict.fromkeys(one["family"] for one in runs):
            own = sorted((one for one in runs if one["family"] == family), key=lambda one: one["tokens"])
            axes.plot([one["tokens"] for one in own], [one["alpha"] for one in own], marker="o", label=family)
        axes.set_xscale("log")
        axes.set_xlabel("tokens read")
        axes.set_ylabel("alpha, held-out prompts")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
        figure.savefig(destination, format="svg", facecolor="white", metadata={"Date": None, "Source": source})


if __name__ == "__main__":
    note, report, *folders = sys.argv[1:]
    found = {"note": note, "report": read_report(Path(report)), "runs": [read_run(Path(one)) for one in folders]}
    FIGURES.write_text(json.dumps(found, indent=2) + "\n")
    FILE.with_suffix(".md").write_text(page_of(found))
    draw(found["runs"], FILE.with_suffix(".svg"))
