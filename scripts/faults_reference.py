"""Write docs/reference/served_faults.md from the table of faults: `python scripts/faults_reference.py`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run from anywhere, as a script

from decode.common.markdown import table  # noqa: E402
from eval.modes.served.faults.faults import HYPOTHESES  # noqa: E402
from train.export.engines.base import FORMS  # noqa: E402

PAGE = ROOT / "docs/reference/served_faults.md"
HEAD = """# Faults that counters show

<!-- Written by `python scripts/faults_reference.py` from eval/modes/served/faults/; edit the tables there. -->

An engine that reads a draft wrongly writes the right text all the same, and accepts fewer tokens. `mode=served` counts
them beside ours, prompt by prompt; where greedy counters part, it looks for the fault:

1. The target is run over the texts that the engine wrote, for its hidden states.
2. Each fault below is done to our own reading of the folder, in a few variants (a rotary base of 10,000, of 500,000, of
   1,000,000). The draft is computed so along the texts, and rounds and accepted tokens are counted as the engine counts
   them.
3. A fault whose counters are the engine's on every prompt is named: *gives the same counters*. Several can be; counters
   cannot tell them apart. Where none is equal, the three that come nearest are named, if they are at least four times
   as near as ours and differ by ties between tokens, or by chance where the engine's own numbers are random (**).

Our tests break exported folders in these ways, serve them with vLLM 0.32, and see that the fault is named
(`tests/engines/test_counters.py`). Where nothing is named, what the counters say by themselves remains: position 1 as
with us and later ones lower, say, is a fault of what is fed back. A precision that differs, a newer layer of the engine
or two faults at once look like that.

The draft is computed on the CPU in float32, by the lines that `python -m train.check` uses. An engine in half
precision breaks ties otherwise, so serve in float32 to have exact counters (`served.options=[--dtype,float32]`).
"""


def page() -> str:
    """The whole page."""
    rows = [
        [
            f"{one.name}{' **' if one.is_random else ''}",
            ", ".join(form for form in FORMS if form in one.forms),
            one.effect,
            one.remedy,
        ]
        for one in HYPOTHESES
    ]
    return "\n".join([HEAD, table(["fault", "drafts", "what the engine does", "how to mend it"], rows), ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
