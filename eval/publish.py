"""Publish a report: `python -m eval.publish RUN1/results.json RUN2/results.json RUN3/results.json docs/results/NAME`.

Pools the runs, writes docs/results/NAME.json in its small form (eval/results/published.py), renders
docs/results/NAME.md from it, and with three runs or more fills the results block of README.md, so that no published
figure is typed by hand. Fewer runs have their page alone, which says so: one process tells nothing of the next. A block
that is named with --readme is filled from them too. A comparison has its page alone: the README's block is the
report's.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import UndefinedError

from decode.common.checked_json import write_atomically
from decode.common.errors import InputError, UserError
from eval.modes.compare import page as compare
from eval.modes.compare.results import pool_comparisons
from eval.modes.exits import page as exits
from eval.modes.families import page as families
from eval.modes.served import page as served
from eval.render import report_page as report
from eval.results.comparisons import check_comparisons
from eval.results.poolable import check_poolable
from eval.results.pooling import pool
from eval.results.published import small_form
from eval.results.schema import ResultsFile, read_results

Check = Callable[[Sequence[Path], Sequence[dict[str, Any]]], None]
Pool = Callable[[Sequence[dict[str, Any]]], dict[str, Any]]
PAGES = {
    "report": report.page_of,
    "decoders": compare.page_of,
    "drafters": compare.page_of,
    "families": families.page_of,
    "served": served.page_of,
    "exits": exits.page_of,
}
"""Mode -> its page."""
POOLS: dict[str, tuple[Check, Pool]] = {
    "report": (check_poolable, pool),
    "decoders": (check_comparisons, pool_comparisons),
    "drafters": (check_comparisons, pool_comparisons),
}
"""Mode -> whether runs of it may be pooled (InputError), and how."""
START, END = "<!-- results:start -->", "<!-- results:end -->"
README = Path("README.md")
_OTHERWISE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, UndefinedError)
_OTHERWISE += (StopIteration, RuntimeError)  # of a row that is looked for and not there
ENOUGH = 3
"""Runs behind the README's block."""


def publish(sources: Sequence[Path], destination: Path, readme: Path | None = None) -> list[Path]:
    """Write DESTINATION.json and DESTINATION.md from `sources`, of a report also the block of `readme`; the files
    written. InputError for bad input. Without a `readme` that of the project is filled, from ENOUGH runs or more."""
    each = [read_results(source) for source in sources]
    try:
        results, page, block = _rendered(sources, each)
        ResultsFile.model_validate(results)  # before anything is written; its errors are ValueErrors
    except _OTHERWISE as error:
        raise InputError(
            f"{' or '.join(map(str, sources))} lacks what its page shows, or holds it as something else "
            f"({type(error).__name__}: {error}): it was edited or cut, and what it says was not measured. Write the "
            "report again"
        ) from error
    readme = readme or (README if len(results.get("runs", [])) >= ENOUGH else None)
    if block is None or readme is None:
        return _write(results, destination, page)
    text = fill_block(_read(readme), f"{block}\n\n[Full results]({_link(destination, readme)})", readme)
    written = _write(results, destination, page)
    readme.write_text(text, encoding="utf-8")
    return [*written, readme]


def _rendered(sources: Sequence[Path], each: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], str, str | None]:
    """What is published, its page, and of a report its block."""
    results = each[0]
    mode = results["mode"]
    if len(each) > 1:
        check, made_one = POOLS.get(mode, (check_poolable, pool))
        check(sources, each)
        results = made_one(each)
    page = PAGES[mode](results).markdown(is_published=True)
    return results, page, report.render_block(results) if mode == "report" else None


def _write(results: dict[str, Any], destination: Path, page: str) -> list[Path]:
    destination.parent.mkdir(parents=True, exist_ok=True)
    data, text = (_named(destination, suffix) for suffix in (".json", ".md"))
    write_atomically(data, small_form(results).encode())
    text.write_text(page, encoding="utf-8")
    return [data, text]


def fill_block(text: str, block: str, where: Path) -> str:
    """`text` with everything between the marks replaced by `block`; InputError unless both marks are there once, in
    order."""
    if text.count(START) != 1 or text.count(END) != 1 or text.index(START) > text.index(END):
        raise InputError(
            f"{where} must hold the line {START} and, after it, {END}, once each; the results go between them"
        )
    before, rest = text.split(START)
    return f"{before}{START}\n\n{block}\n\n{END}{rest.split(END)[1]}"


def _read(readme: Path) -> str:
    if not readme.is_file():
        raise InputError(f"{readme} does not exist; run from the repository root, or name it with --readme")
    return readme.read_text(encoding="utf-8")


def _link(destination: Path, readme: Path) -> str:
    """From the folder of `readme`, which need not lie above the page."""
    return Path(os.path.relpath(_named(destination, ".md").resolve(), readme.resolve().parent)).as_posix()


def _named(destination: Path, suffix: str) -> Path:
    """A name may hold a dot of its own, as qwen2.5 does."""
    return destination.with_name(destination.name.removesuffix(".json").removesuffix(".md") + suffix)


def main() -> None:
    """Entry point of `python -m eval.publish`; exit code 2 for bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="results.json of each run of a report")
    parser.add_argument("destination", type=Path, help="path of the page without its suffix, e.g. docs/results/toy")
    parser.add_argument("--readme", type=Path, help=f"file whose block is filled; {README}, from {ENOUGH} runs on")
    arguments = parser.parse_args()
    try:
        written = publish(arguments.results, arguments.destination, arguments.readme)
        sys.stdout.write(f"wrote {', '.join(map(str, written))}\n")
    except UserError as error:
        sys.stderr.write(f"draftsmith publish: error: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
