"""The report: index.html, summary.md, and the short form for README.md."""

from __future__ import annotations

from typing import Any

from eval.render.facts import drafts, origin_facts, setup_facts, size, title_of
from eval.render.formatting import losslessness, number, share, uncached, with_interval
from eval.render.page import Card, Page, Plot, as_html, as_markdown
from eval.render.plots import acceptance_plot, draft_length_plot, temperature_plot, training_plot
from eval.render.report_tables import main_table, report_tables
from eval.results.training_curves import Curves

_GREEDY = (
    "Greedy decoding only: figures at temperature 0 depend on how much the text repeats itself, so none is a headline."
)


def render_page(results: dict[str, Any], curves: Curves) -> str:
    """The whole page: headline figures, plots, tables, method, definitions."""
    return as_html(_page(results, curves))


def render_summary(results: dict[str, Any]) -> str:
    """Headline sentences, every table, how it was measured, and the definitions."""
    return _markdown(results, "report.md.j2")


def render_block(results: dict[str, Any]) -> str:
    """The short form for README.md: headline, main table, machine and command."""
    return _markdown(results, "block.md.j2", main=main_table(results)).strip()


def headline_row(results: dict[str, Any]) -> dict[str, Any] | None:
    """The first draft's row over all prompts at the first temperature above 0; a greedy row is never a headline."""
    return next((row for row in results["rows"] if row["category"] is None and row["temperature"] > 0), None)


def _best_peer(results: dict[str, Any], row: dict[str, Any] | None) -> dict[str, Any] | None:
    """The peer at its best setting at the row's temperature."""
    temperature = None if row is None else row["temperature"]
    return next((one for one in results["peers"] if one["best"] and one["temperature"] == temperature), None)


def _markdown(results: dict[str, Any], template: str, **more: Any) -> str:
    row = headline_row(results)
    lossless, alone = (None, None) if row is None else (losslessness(row), uncached(row))
    more |= {"row": row, "peer": _best_peer(results, row), "lossless": lossless, "uncached": alone}
    return as_markdown(_page(results, {}), template, **more)


def _page(results: dict[str, Any], curves: Curves) -> Page:
    target = results["target"]
    return Page(
        title=f"Report: {title_of(results)}",
        lead=f"A target of {size(target)}, {target['dtype']} ({target['path']}), served with the drafts "
        f"{', '.join(results['drafts'])}; its output does not change. Sampled decoding first.",
        headline=[_GREEDY],
        cards=_cards(results),
        plots=_plots(results, curves),
        every_table=report_tables(results),
        method=_method(results),
        definitions=results["definitions"],
    )


def _cards(results: dict[str, Any]) -> list[Card]:
    row = headline_row(results)
    if row is None:
        return []
    where = f"{row['draft']}, T={row['temperature']:g}, batch {row['batch_size']}, k={row['num_draft_tokens']}"
    baseline = f"{number(row['baseline_tokens_per_s'], 0)} without a draft ({row['baseline']})"
    realised = f"{share(row['realised'])} of the predicted speedup realised"
    return [
        Card("speedup", number(row["speedup"], 2, "×"), f"95% interval {_interval(row['speedup_ci95'])}; {where}"),
        Card("tokens per second", number(row["tokens_per_s"], 0), baseline),
        Card("alpha", number(row["alpha"], 3), _interval(row["alpha_ci95"], 3) + _other_alphas(results, row)),
        Card("tokens per target pass", number(row["tau"]), f"{_interval(row['tau_ci95'])}; {realised}"),
        *_peer_card(results, row),
        *_mismatch_cards(row),
    ]


def _mismatch_cards(row: dict[str, Any]) -> list[Card]:
    counted = "not counted with this verifier" if row["mismatches"] is None else losslessness(row)
    cards, alone = [Card("mismatches", number(row["mismatches"], 0), counted)], uncached(row)
    if alone is not None:
        held = f"{alone}, against a forward without a cache"
        cards.append(Card("mismatches, uncached", number(row["uncached_mismatches"], 0), held))
    return cards


def _other_alphas(results: dict[str, Any], row: dict[str, Any]) -> str:
    others = [
        f"; {other['draft']} {with_interval(other['alpha'], other['alpha_ci95'], 3)}"
        for other in results["rows"]
        if other["category"] is None and other["temperature"] == row["temperature"] and other["draft"] != row["draft"]
    ]
    return "".join(others)


def _peer_card(results: dict[str, Any], row: dict[str, Any]) -> list[Card]:
    peer = _best_peer(results, row)
    if peer is None:
        return []
    tried = [one for one in results["peers"] if not one["best"] and one["temperature"] == row["temperature"]]
    text = f"{_interval(peer['ratio_ci95'])}; at its best of {len(tried)} settings"
    return [Card("over transformers assisted", number(peer["ratio_ours_over_peer"], 2, "×"), text)]


def _interval(ci95: list[float] | None, digits: int = 2) -> str:
    return "no interval" if ci95 is None else f"[{ci95[0]:.{digits}f}, {ci95[1]:.{digits}f}]"


def _plots(results: dict[str, Any], curves: Curves) -> list[Plot]:
    lengths = "Speedup against draft length, measured in the interleaved run, and predicted from component times."
    acceptance = "Acceptance by position in the draft, counted in the timed run."
    temperatures = (
        "alpha and the speedup it promises, teacher-forced, against temperature. The coupled verifier accepts "
        "slightly less than alpha, so this prediction is an upper estimate."
    )
    training = "Training curves. Losses of different objectives are on different scales; alpha and tau compare."
    sweeps = results["sweeps"]
    plots = [
        (sweeps["num_draft_tokens"]["points"], Plot(lambda: draft_length_plot(results), lengths)),
        (True, Plot(lambda: acceptance_plot(results), acceptance)),
        (sweeps["temperature"]["points"], Plot(lambda: temperature_plot(results), temperatures, is_wide=True)),
        (curves, Plot(lambda: training_plot(results, curves), training, is_wide=True)),
    ]
    return [plot for has_points, plot in plots if has_points]


def _method(results: dict[str, Any]) -> dict[str, str]:
    """How it was measured, as name -> words."""
    prompts = results["prompts"]
    return {
        **setup_facts(results),
        "Drafts": drafts(results),
        "Prompts": f"{prompts['source']}: {prompts['timed']} timed ({prompts['mean_tokens']:.0f} tokens on average, "
        f"up to {prompts['max_new_tokens']} new ones, {prompts['rounds']} rounds), {prompts['reported']} checked for "
        f"losslessness and alpha, {prompts['screening']} others for warm-up and for choosing the peer's setting",
        **_length(results.get("length_choice")),
        "Timing": "all arms answer each prompt one after another in an order drawn anew each round, after a warm-up; "
        "same prompt ids, same limit on new tokens; only emitted ids are counted",
        **origin_facts(results),
        "Time": f"{results['environment']['report_seconds']:.0f} s for this report",
    }


def _length(choice: dict[str, Any] | None) -> dict[str, str]:
    """How the draft length was chosen, where the report chose it."""
    if choice is None:
        return {}
    tried = ", ".join(f"k={k} {number(speed, 0)}" for k, speed in choice["tokens_per_s"].items())
    return {
        "Draft length": f"k={choice['num_draft_tokens']}, the fastest at T={choice['temperature']:g} on "
        f"{choice['prompts']} prompts of the {choice['source']}, none of them reported ({tried} tokens/s)"
    }
