"""A page: one content, written as one HTML file that needs nothing from outside itself, and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from eval.render.columns import Table
from eval.render.templates import render_html, render_markdown


class Plot(NamedTuple):
    """A picture that is drawn when a page shows it."""

    draw: Callable[[], str]
    """Gives an <svg> element."""
    caption: str
    is_wide: bool = False


@dataclass(frozen=True)
class Page:
    """Everything that a page holds; all of it is plain text. The definitions are those of `results`."""

    title: str
    results: Mapping[str, Any]
    method: str
    """Template of how it was measured, for both formats."""
    every_table: Sequence[Table]
    lead: str = ""
    headline_title: str = ""
    headline: Sequence[str] = ()
    """What a reader should take away, a sentence each."""
    plots: Sequence[Plot] = ()

    @property
    def tables(self) -> list[Table]:
        """Those that have something to show."""
        return [table for table in self.every_table if table.rows or table.reason]


def as_html(page: Page, template: str = "page.html.j2", **more: Any) -> str:
    """The page with its plots; `more` is what another template shows."""
    return render_html(template, page=page, results=page.results, **more)


def as_markdown(page: Page, template: str = "summary.md.j2", **more: Any) -> str:
    """The page without them."""
    return render_markdown(template, page=page, results=page.results, **more)
