"""Pages: what one holds, and the templates that write it as HTML or Markdown, where every value is escaped."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from decode.common import markdown
from eval.render import formatting
from eval.render.formatting import Column, Table, columns, with_interval
from eval.results.schema import Energy

_FORMATS = "number with_interval interval whole thousands short share count losslessness uncached hardware software"
_FORMATS += " named size folders batches spread machines"
_ENERGY_NOTE = (
    "Joules of whole calls over emitted tokens, the median over batches of prompts, or over rounds of the same ones; "
    "brackets are 95% intervals over these. Counters see the whole processor or GPU, other programs included."
)


class Code(str):
    """A text that is shown as code, such as a command."""


def render_html(name: str, **values: Any) -> str:
    """The HTML template `name`; jinja2.UndefinedError where it shows what `values` lack."""
    return _HTML.get_template(name).render(values) + "\n"


def render_markdown(name: str, **values: Any) -> str:
    """The Markdown template `name`, its parts one empty line apart; raises as `render_html`."""
    text = _MARKDOWN.get_template(name).render(values)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _environment(plain: Callable[[str], str], code: Callable[[str], str]) -> Environment:
    def shown(value: Any) -> Markup:
        if isinstance(value, Markup):
            return value
        return Markup(code(value) if isinstance(value, Code) else plain(str(value)))

    environment = Environment(
        loader=PackageLoader("eval.render"),
        autoescape=True,  # what `shown` returns passes through it as it is
        finalize=shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update({name: getattr(formatting, name) for name in _FORMATS.split()}, code=Code)
    return environment


def _table(table: Table) -> Markup:
    return Markup(markdown.table(table.headers, table.cells))


_HTML = _environment(escape, lambda text: f"<code>{escape(text)}</code>")
_MARKDOWN = _environment(markdown.plain, markdown.code)
_HTML.filters["fenced"] = lambda text: Markup("<pre><code>{}</code></pre>").format(text)
_MARKDOWN.filters["fenced"] = lambda text: Markup(markdown.fenced("", text.splitlines()))
_MARKDOWN.filters["table"] = _table


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
    results: dict[str, Any]
    method: str
    """Template of how it was measured, for both formats."""
    every_table: Sequence[Table]
    lead: str = ""
    headline_title: str = ""
    headline: Sequence[str] = ()
    """What a reader should take away, a sentence each."""
    plots: Sequence[Plot] = ()
    template: str = "page"
    """Stem of its two templates."""
    shown: Mapping[str, Any] = field(default_factory=dict)
    """What else they show."""

    def html(self) -> str:
        """The page with its plots."""
        return render_html(f"{self.template}.html.j2", page=self, results=self.results, **self.shown)

    def markdown(self, is_published: bool = False) -> str:
        """The page without them; published, also without details and definitions, which stand in the JSON beside it."""
        return render_markdown(
            f"{self.template}.md.j2", page=self, results=self.results, is_published=is_published, **self.shown
        )

    @property
    def tables(self) -> list[Table]:
        """Those that have something to show, energy last."""
        return [table for table in [*self.every_table, energy_table(self.results)] if table.rows or table.reason]

    @property
    def beside(self) -> str:
        """What a published page leaves to its JSON."""
        return "; ".join(["what each figure means", *(table.title for table in self.tables if table.is_detail)])


def energy_table(results: Mapping[str, Any]) -> Table:
    """Every arm's; why there is none, in a line, where nothing was metered; nothing for results of earlier versions."""
    entries = [Energy.model_validate(one) for one in results.get("energy") or []]
    known = [one for one in entries if one.joules_per_token is not None]
    reasons = "; ".join(dict.fromkeys(one.reason for one in entries if one.reason))
    without = f"Not measured: {reasons}." if reasons else ""
    if not known:
        return Table("Energy", columns("arm"), [], without, reason=without)
    shown = columns("where", "arm", Column("J/token", _joules), Column("from", _source))
    return Table("Energy", shown, known, " ".join(filter(None, (_ENERGY_NOTE, _marked(known), without))))


def _joules(one: Energy) -> str:
    figure = with_interval(one.joules_per_token, one.joules_per_token_ci95, digits=3)
    return f"{figure} (estimate)" if one.kind == "estimate" else figure


def _source(one: Energy) -> str:
    return f"estimate: {one.source}" if one.kind == "estimate" else str(one.source)


def _marked(known: Sequence[Energy]) -> str:
    is_estimated = any(one.kind == "estimate" for one in known)
    return (
        "An estimate is the stated power times the seconds of a call: it says what times say." if is_estimated else ""
    )
