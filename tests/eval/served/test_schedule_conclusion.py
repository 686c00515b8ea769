"""From rows of speeds to a conclusion for results.json, and the commands of other engines for drafts of ours."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from decode.config import ModelConfig
from eval.modes.served.schedule.conclusion import concluded, has_speeds, launch_commands, measured_of
from eval.render.page import Page, as_html, as_markdown
from tests.train.export.saved_heads import save_head, save_padded_target

LOADS = ["--speculative-config", json.dumps({"method": "eagle3", "model": "exports/x", "num_speculative_tokens": 1})]


def row(
    draft: str | None, k: int, batch_size: int, speed: float, tokens_per_draft: float | None = None
) -> dict[str, Any]:
    """A speed of results.json, of two rounds."""
    return {
        "draft": draft,
        "num_draft_tokens": k,
        "batch_size": batch_size,
        "tokens_per_s": [speed, speed * 1.001],
        "tokens_per_draft": tokens_per_draft,
    }


ROWS = [
    *[row(None, 0, 1, 100.0), row(None, 0, 4, 400.0)],
    *[row("x", 0, 1, 90.0), row("x", 0, 4, 380.0)],
    *[row("x", 3, 1, 200.0, 3.0), row("x", 3, 4, 300.0, 3.2)],
    *[row("y", 3, 1, 500.0, 3.0), row("y", 3, 4, 900.0, 3.2)],
]


def test_rows_are_told_apart_by_draft_and_become_a_schedule() -> None:
    measured = measured_of(ROWS, "x", "a/target", "eagle3", LOADS, ["--dtype", "float32"])
    found = concluded(measured, "x", {})
    assert found.schedule == [[1, 1, 3], [2, 4, 0]]
    assert [(one.batch_size, one.num_draft_tokens, round(one.over_alone, 2)) for one in found.lengths] == [
        (1, 3, 2.0),
        (4, 0, 0.95),
    ]
    (vllm,) = found.pastes
    assert vllm.text.startswith("vllm serve a/target --speculative-config ")
    assert json.loads(json.dumps(found.model_dump())) == found.model_dump()


def test_a_schedule_takes_the_target_alone_and_two_rounds() -> None:
    assert has_speeds(ROWS, "x")
    assert not has_speeds(ROWS, "z")
    assert not has_speeds([one for one in ROWS if one["draft"]], "x")
    assert not has_speeds([{**one, "tokens_per_s": one["tokens_per_s"][:1]} for one in ROWS], "x")


def test_engines_that_load_a_draft_are_given_it_whole(tmp_path: Path) -> None:
    target = save_padded_target(tmp_path / "target")
    save_head(tmp_path / "eagle3", target, "eagle3", taps=(2, 3, 4))
    commands = launch_commands(str(tmp_path / "eagle3"), ModelConfig(path=str(target)), "exports/x")
    assert {"sglang", "trtllm"} <= commands.keys()
    assert not {"vllm", "tgi", "transformers"} & commands.keys()
    export, launch = commands["sglang"](5).splitlines()
    assert export == (
        f"python -m train.export draft.path={tmp_path / 'eagle3'} format=sglang num_draft_tokens=5 "
        "output_dir=exports/x-sglang"
    )
    assert "--speculative-draft-model-path exports/x-sglang " in launch
    assert "--speculative-num-steps 5 " in launch
    assert "max_draft_len: 4" in commands["trtllm"](4)


def page_of(schedules: list[Any]) -> Page:
    """A page with nothing on it but what is to be pasted."""
    return Page(title="t", results={"schedules": schedules}, method="facts.md.j2", every_table=[])


def test_the_page_ends_with_what_to_paste() -> None:
    found = concluded(measured_of(ROWS, "x", "a/<target>", "eagle3", LOADS, []), "x", {"sglang": str})
    page, none = page_of([found.model_dump()]), page_of([])
    vllm, sglang = found.pastes
    text = as_markdown(page, "served.md.j2", no_schedule="")
    assert f"### x: vLLM 0.32\n\n```\n{vllm.text}\n```\n\nbatch size 1: k=3, 2.00 times" in text
    assert f"### x: SGLang 0.5.23\n\n```\n{sglang.text}\n```\n\nover all batch sizes: k=3, 1.22 times" in text
    shown = as_html(page, "served.html.j2", no_schedule="")
    assert (
        f"<pre><code>{html.escape(vllm.text).replace('&#x27;', '&#39;').replace('&quot;', '&#34;')}</code></pre>"
        in shown
    )
    assert "a/<target>" not in shown
    assert "time it twice" in as_markdown(none, "served.md.j2", no_schedule="time it twice")
    assert "time it twice" in as_html(none, "served.html.j2", no_schedule="time it twice")
