"""tau by length of the context, against sums worked out by hand."""

from __future__ import annotations

import pytest
import torch

from decode import generate
from decode.drafters.lm import LMDraft
from decode.stats import Round
from eval.render.report_page import page_of
from eval.results.by_context import bucket, tau_by_context
from tests.eval.reports import report, row
from tests.tiny import tiny_llama


@pytest.mark.parametrize(
    ("context", "least"),
    [(1, 0), (255, 0), (256, 256), (511, 256), (512, 512), (1023, 512), (1024, 1024), (4095, 2048), (4096, 4096)],
)
def test_buckets_double_from_256_on(context: int, least: int) -> None:
    assert bucket(context) == least


def test_passes_are_summed_in_the_bucket_they_began_in() -> None:
    first = [Round(0, 4, 4, 5, 254), Round(0, 4, 1, 2, 259), Round(0, 4, 3, 4, 600)]
    second = [Round(0, 4, 0, 1, 100), Round(0, 4, 1, 2, 300)]
    found = tau_by_context([first, second], seed=0)
    shown = [(one["context_from"], one["context_below"], one["prompts"], one["passes"], one["tau"]) for one in found]
    assert shown == [(0, 256, 2, 2, 3.0), (256, 512, 2, 2, 2.0), (512, 1024, 1, 1, 4.0)]
    assert found[0]["tau_ci95"] == [1.0, 5.0]
    assert found[1]["tau_ci95"] == [2.0, 2.0]
    assert found[2]["tau_ci95"] is None  # a single prompt says nothing of others


def test_short_runs_have_one_bucket_and_unknown_contexts_none() -> None:
    assert [one["context_from"] for one in tau_by_context([[Round(0, 2, 1, 2, 8), Round(0, 2, 0, 1, 10)]], 0)] == [0]
    assert tau_by_context([[Round(0, 2, 1, 2)]], 0) == []


def test_every_pass_tells_how_long_its_row_was() -> None:
    """In a batch of different lengths, where rows end and others take their place."""
    target = tiny_llama(seed=3)
    ids = torch.tensor([[0, 0, 5, 9], [1, 8, 3, 2]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    out = generate(target, LMDraft(tiny_llama(seed=3)), ids, attention_mask=mask, max_new_tokens=12, eos_token_id=())
    for place, prompt in enumerate((2, 4)):
        length = prompt
        for one in (one for one in out.stats.rounds if one.row == place):
            assert one.context == length
            length += one.emitted
        assert length == prompt + 12


def test_the_report_has_a_table_where_contexts_differ() -> None:
    each = [
        {"context_from": least, "context_below": below, "prompts": 2, "passes": 10, "tau": tau, "tau_ci95": [1.0, 4.0]}
        for least, below, tau in ((0, 256, 3.25), (256, 512, 2.5))
    ]
    summary = page_of(report([row(tau_by_context=each), row("head", tau_by_context=each[:1])])).markdown()
    _, table = summary.split("## By length of the context")
    lines = [line for line in table.split("\n## ")[0].splitlines() if line.startswith("|")][2:]
    assert [line.split(" | ")[1:3] for line in lines] == [["mine", "0 to 255"], ["mine", "256 to 511"]]
    assert "3.25 [1.00, 4.00]" in lines[0]
    assert "By length of the context" not in page_of(report([row(tau_by_context=each[:1])])).markdown()
