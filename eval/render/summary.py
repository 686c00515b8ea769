"""The report as Markdown: summary.md beside the page, and the pages under docs/results."""

from __future__ import annotations

from typing import Any

from decode.common.markdown import bullets, code, definitions, facts, plain, table
from eval.render.formatting import (
    best_peer,
    hardware,
    headline_row,
    losslessness,
    number,
    share,
    uncached,
    with_interval,
)
from eval.render.tables import Table, main_table, tables


def render_summary(results: dict[str, Any]) -> str:
    """Headline sentences, every table, the definitions, and how it was measured."""
    parts = [
        f"# Report: {plain(results.get('name') or results['suite'])}",
        *headline(results),
        *(markdown_table(one, heading="##") for one in tables(results)),
        "## How it was measured",
        facts(method_facts(results)),
        "## Definitions",
        definitions(results["definitions"]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def render_block(results: dict[str, Any]) -> str:
    """The short form for README.md: headline, main table, machine and command."""
    environment = results["environment"]
    figures = markdown_table(main_table(results), heading=None)
    source = f"{plain(hardware(environment))}; seed {environment['seed']}; {code(environment['command'])}"
    return "\n\n".join([*headline(results), figures, source])


def headline(results: dict[str, Any]) -> list[str]:
    """What a reader should take away, from the first row at a temperature above 0."""
    row = headline_row(results)
    if row is None:
        return [
            "Greedy decoding only: figures at temperature 0 depend on how much the text repeats itself, "
            "so none is a headline."
        ]
    lines = [
        f"At T={row['temperature']:g}, batch {row['batch_size']}, {code(row['draft'])} makes the target "
        f"**{with_interval(row['speedup'], row['speedup_ci95'])} times as fast** as without a draft "
        f"({number(row['tokens_per_s'], 0)} against {number(row['baseline_tokens_per_s'], 0)} tokens/s, "
        f"{row['baseline']}): "
        f"alpha {with_interval(row['alpha'], row['alpha_ci95'], 3)}, "
        f"{with_interval(row['tau'], row['tau_ci95'])} tokens per target pass, "
        f"{share(row['realised'])} of the speedup that its component times predict.",
        f"The output is the target's own: {losslessness(row)}.",
    ]
    alone = uncached(row)
    if alone is not None:
        lines.append(f"Its text held against a plain forward of the model, without a cache: {alone}.")
    peer = best_peer(results, row["temperature"])
    if peer is not None:
        ratio = with_interval(peer["ratio_ours_over_peer"], peer["ratio_ci95"])
        lines.append(
            f"It is {ratio} times as fast as {peer['name']} generation with the same draft at its best setting."
        )
    return [bullets(lines)]


def method_facts(results: dict[str, Any]) -> dict[str, str]:
    """How it was measured, as name -> words."""
    environment, prompts = results["environment"], results["prompts"]
    drafts = ", ".join(f"{name} ({path})" for name, path in results["drafts"].items())
    return {
        **setup_facts(results),
        "Drafts": drafts,
        "Prompts": f"{prompts['source']}: {prompts['timed']} timed ({prompts['mean_tokens']:.0f} tokens on average, "
        f"up to {prompts['max_new_tokens']} new ones, {prompts['rounds']} rounds), {prompts['reported']} checked for "
        f"losslessness and alpha, {prompts['screening']} others for warm-up and for choosing the peer's setting",
        **_length(results.get("length_choice")),
        "Timing": "all arms answer each prompt one after another in an order drawn anew each round, after a warm-up; "
        "same prompt ids, same limit on new tokens; only emitted ids are counted",
        "Seed": str(environment["seed"]),
        "Command": f"`{environment['command']}`",
        "Time": f"{environment['report_seconds']:.0f} s for this report",
    }


def setup_facts(results: dict[str, Any]) -> dict[str, str]:
    """Machine, software and target, as every suite's results.json has them."""
    environment, target = results["environment"], results["target"]
    packages = environment.get("packages", {})
    return {
        "Machine": hardware(environment),
        "Software": f"torch {packages.get('torch')}, transformers {packages.get('transformers')}, "
        f"Python {environment['python']}",
        "Target": f"{target['path']}, {target['num_parameters'] / 1e6:,.1f}M parameters, {target['dtype']}",
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


def markdown_table(one: Table, heading: str | None) -> str:
    """A Markdown table with its note, and its title as a heading where one is wanted."""
    title = f"{heading} {plain(one.title)}" if heading else ""
    body = table(one.columns, one.rows) if one.rows else ""
    return "\n\n".join(part for part in (title, body, plain(one.note)) if part)
