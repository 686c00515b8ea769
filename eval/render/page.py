"""A page: one content, written as one HTML file that needs nothing from outside itself, and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from eval.render.columns import Table
from eval.render.templates import render_html, render_markdown


class Card(NamedTuple):
    """A figure at a glance."""

    name: str
    value: str
    detail: str


class Plot(NamedTuple):
    """A picture that is drawn when a page shows it."""

    draw: Callable[[], str]
    """Gives an <svg> element."""
    caption: str
    is_wide: bool = False


@dataclass(frozen=True)
class Page:
    """Everything that a page holds, in reading order; all of it is plain text."""

    title: str
    lead: str = ""
    headline_title: str = ""
    headline: Sequence[str] = ()
    """What a reader should take away, a sentence each; in HTML the cards say it where there are any."""
    cards: Sequence[Card] = ()
    plots: Sequence[Plot] = ()
    every_table: Sequence[Table] = ()
    method: Mapping[str, str] = field(default_factory=dict)
    definitions: Mapping[str, str] = field(default_factory=dict)

    @property
    def tables(self) -> list[Table]:
        """Those that have something to show."""
        return [table for table in self.every_table if table.rows or table.reason]


def as_html(page: Page) -> str:
    """The page with its cards and plots."""
    return render_html("page.html.j2", page=page)


def as_markdown(page: Page, template: str = "summary.md.j2", **more: Any) -> str:
    """The page without them; `more` is what another template shows."""
    return render_markdown(template, page=page, **more)
