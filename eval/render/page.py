"""index.html: one file without a script, a font, a picture or a style from anywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from eval.render.formatting import best_peer, headline_row, losslessness, number, share, uncached, with_interval
from eval.render.plots import acceptance_plot, draft_length_plot, temperature_plot, training_plot
from eval.render.summary import headline, method_facts
from eval.render.tables import Table, tables
from eval.results.training_curves import Curves

_STYLE = """
:root { color-scheme: light; --ink: #111827; --soft: #4b5563; --line: #e5e7eb; --tint: #f3f6fb; --mark: #1f5fbf; }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: #fff;
  font: 16px/1.55 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 2.5rem 1.5rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .6rem; padding-top: 1.2rem; border-top: 1px solid var(--line); }
p.lead, p.note { color: var(--soft); margin: .3rem 0 1rem; max-width: 52rem; }
p.note { font-size: .9rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); gap: .9rem;
  margin: 1.4rem 0 .6rem; }
.card { background: var(--tint); border-radius: .6rem; padding: .9rem 1.1rem; }
.card b { display: block; font-size: 1.75rem; line-height: 1.2; color: var(--mark);
  font-variant-numeric: tabular-nums; }
.card span { display: block; font-size: .88rem; color: var(--soft); }
.card .name { color: var(--ink); font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { text-align: left; padding: .38rem .8rem .38rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
.plots { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1.6rem 2rem; }
figure { margin: 0; }
figure.wide { grid-column: 1 / -1; }
figcaption { color: var(--soft); font-size: .9rem; }
svg.plot { width: 100%; height: auto; display: block; }
svg.plot text { font-family: inherit; }
dl { display: grid; grid-template-columns: minmax(9rem, max-content) 1fr; gap: .35rem 1.4rem; font-size: .92rem;
  margin: 0; }
dt { font-weight: 600; }
dd { margin: 0; color: var(--soft); overflow-wrap: anywhere; }
code { font-size: .9em; background: var(--tint); padding: .1rem .3rem; border-radius: .25rem; }
@media (max-width: 46rem) { .plots, dl { grid-template-columns: 1fr; } dd { margin-bottom: .6rem; } }
"""


def render_page(results: dict[str, Any], curves: Curves) -> str:
    """The whole page: headline figures, plots, tables, method, definitions."""
    parts = [
        f"<h1>{escape(results.get('name') or results['suite'])}: {escape(results['target']['path'])}</h1>",
        f'<p class="lead">{_lead(results)}</p>',
        _cards(results),
        _plots(results, curves),
        *(html_table(table) for table in tables(results)),
        "<h2>How it was measured</h2>",
        facts_list(method_facts(results)),
        "<h2>Definitions</h2>",
        facts_list(results["definitions"]),
    ]
    return document(f"{results.get('name') or results['suite']} · draftsmith report", parts)


def document(title: str, parts: Sequence[str]) -> str:
    """A page of its own that needs nothing from outside itself; `parts` are HTML."""
    body = "\n".join(parts)
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f"<head>{meta}<title>{escape(title)}</title><style>{_STYLE}</style></head>"
    return f'<!doctype html>\n<html lang="en">{head}<body><main>\n{body}\n</main></body></html>\n'


def _lead(results: dict[str, Any]) -> str:
    target = results["target"]
    size = f"{target['num_parameters'] / 1e6:,.1f}M parameters, {target['dtype']}"
    drafts = ", ".join(results["drafts"])
    return escape(
        f"A target of {size}, served with the drafts {drafts}; its output does not change. Sampled decoding first."
    )


def _cards(results: dict[str, Any]) -> str:
    row = headline_row(results)
    if row is None:
        return f'<p class="note">{escape(headline(results)[0])}</p>'
    where = f"{row['draft']}, T={row['temperature']:g}, batch {row['batch_size']}, k={row['num_draft_tokens']}"
    cards = [
        ("speedup", number(row["speedup"], 2, "×"), f"95% interval {_interval(row['speedup_ci95'])}; {where}"),
        (
            "tokens per second",
            number(row["tokens_per_s"], 0),
            f"{number(row['baseline_tokens_per_s'], 0)} without a draft ({row['baseline']})",
        ),
        ("alpha", number(row["alpha"], 3), f"{_interval(row['alpha_ci95'], 3)}{_other_alphas(results, row)}"),
        (
            "tokens per target pass",
            number(row["tau"]),
            f"{_interval(row['tau_ci95'])}; {share(row['realised'])} of the predicted speedup realised",
        ),
        *_peer_card(results, row),
        (
            "mismatches",
            number(row["mismatches"], 0),
            losslessness(row) if row["mismatches"] is not None else "not counted with this verifier",
        ),
        *_uncached_card(row),
    ]
    return '<div class="cards">' + "".join(_card(*card) for card in cards) + "</div>"


def _other_alphas(results: dict[str, Any], row: dict[str, Any]) -> str:
    others = [
        f"; {other['draft']} {with_interval(other['alpha'], other['alpha_ci95'], 3)}"
        for other in results["rows"]
        if other["category"] is None and other["temperature"] == row["temperature"] and other["draft"] != row["draft"]
    ]
    return "".join(others)


def _peer_card(results: dict[str, Any], row: dict[str, Any]) -> list[tuple[str, str, str]]:
    peer = best_peer(results, row["temperature"])
    if peer is None:
        return []
    tried = [one for one in results["peers"] if not one["best"] and one["temperature"] == row["temperature"]]
    text = f"{_interval(peer['ratio_ci95'])}; at its best of {len(tried)} settings"
    return [("over transformers assisted", number(peer["ratio_ours_over_peer"], 2, "×"), text)]


def _uncached_card(row: dict[str, Any]) -> list[tuple[str, str, str]]:
    text = uncached(row)
    if text is None:
        return []
    return [
        ("mismatches, uncached", number(row["uncached_mismatches"], 0), f"{text}, against a forward without a cache")
    ]


def _card(name: str, value: str, detail: str) -> str:
    name, value, detail = escape(name), escape(value), escape(detail)
    return f'<div class="card"><span class="name">{name}</span><b>{value}</b><span>{detail}</span></div>'


def _interval(ci95: list[float] | None, digits: int = 2) -> str:
    return "no interval" if ci95 is None else f"[{ci95[0]:.{digits}f}, {ci95[1]:.{digits}f}]"


def _plots(results: dict[str, Any], curves: Curves) -> str:
    figures = []
    if results["sweeps"]["num_draft_tokens"]["points"]:
        caption = "Speedup against draft length, measured in the interleaved run, and predicted from component times."
        figures.append(figure(draft_length_plot(results), caption))
    figures.append(figure(acceptance_plot(results), "Acceptance by position in the draft, counted in the timed run."))
    if results["sweeps"]["temperature"]["points"]:
        caption = (
            "alpha and the speedup it promises, teacher-forced, against temperature. The coupled "
            "verifier accepts slightly less than alpha, so this prediction is an upper estimate."
        )
        figures.append(figure(temperature_plot(results), caption, wide=True))
    if curves:
        caption = "Training curves. Losses of different objectives are on different scales; alpha and tau compare."
        figures.append(figure(training_plot(results, curves), caption, wide=True))
    return '<h2>Plots</h2><div class="plots">' + "".join(figures) + "</div>"


def figure(svg: str, caption: str, wide: bool = False) -> str:
    """A plot with its caption."""
    kind = ' class="wide"' if wide else ""
    return f"<figure{kind}>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def html_table(table: Table) -> str:
    """A table below its title."""
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    body = (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>' if rows else ""
    )
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return f"<h2>{escape(table.title)}</h2>{body}{note}"


def facts_list(facts: dict[str, str]) -> str:
    """Names and what they mean."""
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{_code(text)}</dd>" for name, text in facts.items()) + "</dl>"


def _code(text: str) -> str:
    return (
        f"<code>{escape(text[1:-1])}</code>"
        if text.startswith("`") and text.endswith("`")
        else escape(text).replace("`", "")
    )
