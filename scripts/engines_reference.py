"""Write docs/reference/engines.md and the table of the README from the engines' own tables: `python
scripts/engines_reference.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run from anywhere, as a script

from decode.common.markdown import fenced, plain, table  # noqa: E402
from train.export.engines import ENGINES  # noqa: E402
from train.export.engines.base import FORMS, Engine, Launch, Loads  # noqa: E402

PAGE = ROOT / "docs/reference/engines.md"
README = ROOT / "README.md"
MARK = "<!-- Written by `python scripts/engines_reference.py`. -->\n"
SERVING = ("vllm", "sglang", "trtllm", "tgi", "llamacpp", "transformers")
"""Engines with a page in docs/how-to/serving; folders of the speculators library are served by vLLM."""
HEAD = """# Engines and drafts

<!-- Written by `python scripts/engines_reference.py` from train/export/engines/; edit the tables there. -->

```
python -m train.export draft.path=runs/x/draft format=vllm output_dir=exports/x
```

writes a trained draft in the form that an engine loads ([how to serve it](../how-to/serving/export.md)). **run**: our
tests load such folders in the engine, and the tokens that it accepts at each position are those of draftsmith's own
decoder, one for one. **checked**: the folder follows the engine's source, which was read and not run. A dash: it
has no such drafts; why, and what to do instead, stands below. `mtp` is the layer of exaone_moe targets alone: for other
targets train `eagle3`. `pard` counts as `lm`, `jetspec` as `dflash`. A single draft can be refused for more than its
form; the message says why.
"""
HOW = Launch(target="TARGET", draft=Path("FOLDER"), num_draft_tokens=4)


def page() -> str:
    """The whole page."""
    rows = [[form, *(_cell(engine, form) for engine in ENGINES.values())] for form in FORMS]
    matrix = table(["draft", *(f"{name}" for name in ENGINES)], rows)
    return "\n".join([HEAD, matrix, "", *(line for engine in ENGINES.values() for line in _engine(engine))])


def readme() -> str:
    """The README with its table: forms that some engine loads, by engine."""
    before, rest = README.read_text(encoding="utf-8").split(MARK)
    rows = [
        [form, *cells] for form in FORMS if set(cells := [_tried(ENGINES[name], form) for name in SERVING]) != {"-"}
    ]
    return before + MARK + table(["draft", *SERVING], rows) + "\n\n" + rest.split("\n\n", 1)[1]


def _tried(engine: Engine, form: str) -> str:
    how = engine.forms[form]
    return how.tried if isinstance(how, Loads) else "-"


def _cell(engine: Engine, form: str) -> str:
    how = engine.forms[form]
    return f"{how.tried}, from {how.since}" if isinstance(how, Loads) else "-"


def _engine(engine: Engine) -> Iterator[str]:
    yield from (f"## format={engine.name}", "", f"{plain(engine.title)}.", "")
    reasons: dict[str, list[str]] = {}
    for form, how in engine.forms.items():
        if isinstance(how, Loads):
            yield from (f"{form}:", "", fenced("bash", how.launch(HOW).splitlines()), "")
        else:
            reasons.setdefault(how, []).append(form)
    for why, forms in reasons.items():
        yield from (f"- {', '.join(forms)}: {plain(why)}.",)
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    README.write_text(readme(), encoding="utf-8")
