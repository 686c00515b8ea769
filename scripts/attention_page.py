"""Time and memory of EAGLE-3's attention by the length of the text, merged and under the dense mask.

    python scripts/attention_page.py    # adds a run to docs/results/attention/, and writes the page anew

Each measurement has a process of its own, so that its peak is its own. Two minutes, of a machine without other work.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run from anywhere, as a script
PAGE, FIGURES = ROOT / "docs/results/attention.md", ROOT / "docs/results/attention/runs.json"
COMMAND = "python scripts/attention_page.py"
STEPS, HEADS, KV_HEADS, WIDTH, SEED = 7, 9, 3, 64, 0
"""Of SmolLM2-135M's shape, as EAGLE-3 unrolls it."""
LENGTHS = {"dense": (512, 1024, 2048), "merged": (512, 1024, 2048, 4096, 8192)}
HEAD = """# Attention by the length of the text

EAGLE-3 and MTP are trained over several steps, and a slot of step s sees the true tokens before it and its own slot of
each step before. As one dense mask that is a matrix of T x s T scores. Merged, the true tokens are the fused kernel's,
and the steps add a score each (`decode/forward/merged_attention.py`): memory grows with the text, not with its square.

"""


def measured(way: str, length: int) -> dict[str, float]:
    """Seconds of a forward and backward pass of all steps, and bytes that they took at most above what they were given;
    in this process."""
    import torch

    from decode.drafters.layers import under
    from decode.drafters.unrolled import Unrolled

    torch.manual_seed(SEED)
    document = torch.zeros(1, length, dtype=torch.long)
    unrolled = Unrolled(document, torch.arange(length)[None], None)
    leaves = [torch.randn(1, HEADS + 2 * KV_HEADS, length, WIDTH, requires_grad=True) for _ in range(STEPS)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, found, known = time.perf_counter(), [], list[torch.Tensor]()
    for step, leaf in enumerate(leaves):
        query, key, value = leaf.split([HEADS, KV_HEADS, KV_HEADS], 1)
        known += [key, value]
        mix = unrolled.mix(*known)
        if way == "dense":
            mix = under(torch.cat(known[0::2], 2), torch.cat(known[1::2], 2), unrolled.visible(step))
        found.append(mix(query))
    torch.stack(found).sum().backward()
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "bytes": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)}


def run() -> dict[str, Any]:
    """Every length, each in a process of its own."""
    from decode.common.environment import environment

    found: dict[str, dict[str, Any]] = {way: {} for way in LENGTHS}
    for length in sorted({length for lengths in LENGTHS.values() for length in lengths}):
        for way in (way for way, lengths in LENGTHS.items() if length in lengths):
            words = [sys.executable, __file__, way, str(length)]
            found[way][str(length)] = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
            sys.stderr.write(f"{way} {length} {found[way][str(length)]}\n")
    return found | {"date": date.today().isoformat(), "machine": f"{environment()['cpu']}, {os.cpu_count()} cores"}


def page_of(found: dict[str, Any]) -> str:
    """Medians over the runs, with the least and the greatest."""
    from decode.common.markdown import table

    runs = found["runs"]

    def cell(way: str, length: int, what: str, unit: float) -> str:
        values = [one[way][str(length)][what] / unit for one in runs if str(length) in one[way]]
        return f"{median(values):.2f} [{min(values):.2f}, {max(values):.2f}]" if values else "not run"

    rows = [
        [
            str(length),
            *(cell(way, length, what, unit) for what, unit in (("seconds", 1), ("bytes", 1e9)) for way in LENGTHS),
        ]
        for length in LENGTHS["merged"]
    ]
    heads = ["tokens", "dense, s", "merged, s", "dense, GB", "merged, GB"]
    machines = sorted({one["machine"] for one in runs})
    how = (
        f"\n{STEPS} steps, {HEADS} heads of {WIDTH} over {KV_HEADS} groups, float32, one text in a row, forward and "
        f"backward; {len(runs)} processes a cell, median [least, greatest]; seed {SEED}; memory is what a process took "
        f"at most above its inputs. Machine: {'; '.join(machines)}. By `{COMMAND}`, "
        f"{', '.join(sorted({one['date'] for one in runs}))}.\n"
    )
    return HEAD + table(heads, rows) + "\n" + how


def main() -> None:
    """A run more, or one measurement of it."""
    if len(sys.argv) > 1:
        sys.stdout.write(json.dumps(measured(sys.argv[1], int(sys.argv[2]))))
        return
    found = json.loads(FIGURES.read_text()) if FIGURES.is_file() else {"command": COMMAND, "runs": []}
    found["runs"].append(run())
    FIGURES.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(page_of(found))


if __name__ == "__main__":
    main()
