"""Publish a report: `python -m eval.publish runs/quickstart/report/results.json docs/results/quickstart`.

Copies the JSON to docs/results/quickstart.json, renders docs/results/quickstart.md from it, and fills the results
block of README.md, so that no published figure is typed by hand. A comparison has its page alone: the README's block is
the report's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from jinja2 import UndefinedError

from decode.common.checked_json import write_json
from decode.common.errors import InputError, UserError
from eval.modes.decoders import page as decoders
from eval.modes.families import page as families
from eval.render import report_page as report
from eval.results.schema import read_results

PAGES = {
    "report": report.render_summary,
    "decoders": decoders.render_summary,
    "families": families.render_summary,
}
"""Mode -> its page."""
START, END = "<!-- results:start -->", "<!-- results:end -->"


def publish(source: Path, destination: Path, readme: Path) -> None:
    """Write DESTINATION.json and DESTINATION.md from `source`, and for a report fill the block of `readme`; InputError
    for bad input."""
    results = read_results(source)
    try:
        mode = results["mode"]
        page = PAGES[mode](results)
        block = report.render_block(results) if mode == "report" else None
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, UndefinedError) as error:
        raise InputError(
            f"{source} lacks what its page shows, or holds it as something else ({type(error).__name__}: {error}): it "
            "was edited or cut, and what it says was not measured. Write the report again"
        ) from error
    if block is None:
        _write(results, destination, page)
        return
    text = fill_block(_read(readme), f"{block}\n\n[Full results]({_link(destination, readme)})", readme)
    _write(results, destination, page)
    readme.write_text(text, encoding="utf-8")


def _write(results: dict[str, Any], destination: Path, page: str) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    write_json(destination.with_suffix(".json"), results)
    destination.with_suffix(".md").write_text(page, encoding="utf-8")


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
    page = destination.with_suffix(".md").resolve()
    return (
        page.relative_to(readme.resolve().parent).as_posix()
        if page.is_relative_to(readme.resolve().parent)
        else page.name
    )


def main() -> None:
    """Entry point of `python -m eval.publish`; exit code 2 for bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="results.json of a report")
    parser.add_argument(
        "destination", type=Path, help="path of the page without its suffix, e.g. docs/results/quickstart"
    )
    parser.add_argument("--readme", type=Path, default=Path("README.md"), help="file whose results block is filled")
    arguments = parser.parse_args()
    try:
        publish(arguments.results, arguments.destination, arguments.readme)
    except UserError as error:
        sys.stderr.write(f"draftsmith publish: error: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
