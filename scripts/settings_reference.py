"""Write docs/reference/settings.md from the configuration classes: `python scripts/settings_reference.py`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run from anywhere, as a script

from decode.common.compose import groups  # noqa: E402
from decode.common.setting_docs import Setting, setting_docs  # noqa: E402
from decode.common.stage_help import choices  # noqa: E402
from decode.config import DecodeConfig  # noqa: E402
from distill.config import DistillConfig  # noqa: E402
from distill.datastore.config import DatastoreConfig  # noqa: E402
from eval.config import EvalConfig  # noqa: E402
from train.check.config import CheckConfig  # noqa: E402
from train.config import TrainConfig  # noqa: E402
from train.export.config import ExportConfig  # noqa: E402

PAGE = ROOT / "docs/reference/settings.md"
STAGES = {
    "distill": DistillConfig,
    "datastore": DatastoreConfig,
    "train": TrainConfig,
    "decode": DecodeConfig,
    "eval": EvalConfig,
    "export": ExportConfig,
    "check": CheckConfig,
}
MODULES = {"datastore": "distill.datastore", "export": "train.export", "check": "train.check"}
HEAD = """# Settings

<!-- Written by `python scripts/settings_reference.py` from the configuration classes; edit the docstrings there. -->

```
python -m train target.path=TARGET records=runs/x/records draft=eagle3 draft.head.depth=7 output_dir=runs/x/draft
```

`draft=eagle3` names a YAML of the group `draft` in `conf/`; `draft.head.depth=7` sets one value. An unknown key
is an error that names those that may have been meant. Values with commas, brackets or spaces are quoted for the shell:
`'temperatures=[1.0, 0.0]'`. Text is taken as it stands, whatever it holds (`prompt="What's 2+2, and why?"`): only
`null`, quotes around all of it and interpolations that lead somewhere (`${oc.env:DATA}/chats.jsonl`) are Hydra's.
`--multirun lr=1e-3,3e-3` runs one job for each combination; a value with a comma of its own is then quoted once more,
`prompt="'a, b',c"`.

The defaults below are the classes' own. A group's YAML may set others; what a run used stands in its `run.json`.
`python -m train --help` shows the same in the terminal, `--help draft` one group or section.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(line for stage, config in STAGES.items() for line in _stage(stage, config))])


def _stage(stage: str, config: type) -> list[str]:
    settings = setting_docs(config)
    lines = [f"## python -m {MODULES.get(stage, stage)}", "", *_groups(stage, settings)]
    sections: list[tuple[Setting | None, list[Setting]]] = [(None, [])]
    for one in settings:
        if one.kind:
            inside = one.key.rpartition(".")[0]
            next(rows for head, rows in reversed(sections) if (head.key if head else "") == inside).append(one)
        else:
            sections.append((one, []))
    for head, rows in sections:
        if head is not None:
            lines += [f"### {stage}: `{head.key}.`", "", _cell(head.text), ""]
        lines += _table(rows)
    return lines


def _groups(stage: str, settings: list[Setting]) -> list[str]:
    """Groups of the stage, with the YAMLs that each may name; experiments are whole commands."""
    lines = ["| group | default | YAMLs |", "|---|---|---|"]
    for group, default in groups(stage).items():
        names = ", ".join(f"`{name}`" for name in choices(stage, group, settings) if name != "null")
        if names:
            lines.append(f"| `{group}=` | {f'`{default}`' if default else 'none'} | {names} |")
    return [*lines, ""]


def _table(rows: list[Setting]) -> list[str]:
    if not rows:
        return []
    lines = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for one in rows:
        kind = _cell(one.kind.replace(" | ", " or "))
        lines.append(f"| `{one.key}` | {kind} | {_code(one.default)} | {_cell(one.text)} |")
    return [*lines, ""]


def _code(text: str) -> str:
    return text if text == "required" else f"`{text}`".replace("|", "\\|")


def _cell(text: str) -> str:
    text = re.sub(r"\bNone\b", "`null`", text)  # as a YAML says it
    for mark in ("|", "*", "<"):
        text = text.replace(mark, f"\\{mark}")
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
