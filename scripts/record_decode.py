"""Record `python -m decode` as a picture of its terminal, docs/NAME.svg.

python scripts/record_decode.py decode                                                  # the quickstart's chat
python scripts/record_decode.py edit                                                    # a file that is edited
python scripts/record_decode.py decode target.path=TARGET draft.path=DRAFT prompt=Hello # any overrides of the stage
"""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RECORDINGS = {
    "decode": (
        "target=smollm2",
        "draft=mixture",
        "draft.settings.members=[ngram,runs/quickstart/head/model]",
        "decode=greedy",
        "chat=true",
        "prompt_file=scripts/quickstart_prompt.txt",
    ),
    "edit": (
        "target=toy",
        "target.path=runs/toy/tasks_target/model",
        "draft=edit",
        "decode=greedy",
        "decode.num_draft_tokens=8",
        "prompt_file=scripts/edit_prompt.txt",
    ),
}
"""Picture -> the settings of its command."""
COLUMNS = 100
# Rich's picture asks a server for its font, which a reader's browser would then do; without it, it takes a local one.
REMOTE_FONTS = re.compile(r"@font-face\s*\{.*?\}\s*", re.DOTALL)


def main(name: str, overrides: list[str]) -> int:
    """Run the command and write the picture; the command's own exit code where it fails."""
    command = ["-m", "decode", *(overrides or RECORDINGS[name])]
    done = subprocess.run(
        [sys.executable, *command, "color=always"], cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8", check=False
    )
    if done.returncode == 0:
        path = DOCS / f"{name}.svg"
        path.write_text(picture(done.stdout, shlex.join(["python", *command])), encoding="utf-8")
        sys.stdout.write(f"{path.name}\n")
    return done.returncode


def picture(output: str, command: str) -> str:
    """SVG of a terminal of COLUMNS columns that shows `command` and the coloured text that it printed."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text(f"$ {command}\n"))
    console.print(Text.from_ansi(output.rstrip()))
    svg = console.export_svg(title="python -m decode", unique_id="decode")
    return REMOTE_FONTS.sub("", svg)


if __name__ == "__main__":
    if sys.argv[1:2] == [] or sys.argv[1] not in RECORDINGS:
        sys.exit(f"name a picture first: {', '.join(RECORDINGS)}")
    sys.exit(main(sys.argv[1], sys.argv[2:]))
