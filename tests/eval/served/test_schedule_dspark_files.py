"""SGLang's files for DSpark: steps/s by tokens of a step, and temperatures for the weights that are exported."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from decode.drafters.dspark import DSparkConfig
from eval.modes.served.schedule.dspark_files import cost_table, engine_probes, temperature_file
from tests.decode.heads import random_head
from tests.tiny import tiny_llama


@cache
def calibrated() -> DSparkConfig:
    """The shape of a head whose temperatures were fitted."""
    found = random_head("dspark", tiny_llama(60)).config
    assert isinstance(found, DSparkConfig)
    return replace(found, temperatures=tuple(2.0**i for i in range(found.depth)))


def test_steps_are_counted_by_the_tokens_that_they_verify() -> None:
    assert cost_table([(4, 0.01), (1, 0.005), (8, 0.02)]) == {
        "sample_batch_tokens": [1, 4, 8],
        "sample_steps_per_sec": pytest.approx([200.0, 100.0, 50.0]),
        "max_batch_tokens": 8,
    }


def test_equal_tokens_are_one_entry_and_more_tokens_never_take_less_time() -> None:
    # SGLang refuses equal entries, and a cheaper longer step would have it draft for nothing.
    table = cost_table([(2, 0.010), (2, 0.014), (2, 0.012), (4, 0.010), (8, 0.020)])
    assert table["sample_batch_tokens"] == [2, 4, 8]
    first, second, third = table["sample_steps_per_sec"]
    assert first == second == pytest.approx(1 / ((3 * 0.012 + 0.010) / 4))
    assert third == pytest.approx(50.0)


def test_a_step_of_the_engine_is_what_a_round_of_its_whole_batch_took() -> None:
    rows = [
        # 4 requests at 2.5 tokens a round, 100 tokens/s: 10 steps/s, each over 4 * (3 + 1) tokens
        {
            "draft": "x",
            "num_draft_tokens": 3,
            "batch_size": 4,
            "tokens_per_s": [90.0, 100.0, 120.0],
            "tokens_per_draft": 2.5,
        },
        {"draft": "x", "num_draft_tokens": 0, "batch_size": 2, "tokens_per_s": [50.0, 50.0], "tokens_per_draft": None},
        {"draft": "y", "num_draft_tokens": 1, "batch_size": 1, "tokens_per_s": [1.0, 1.0], "tokens_per_draft": 1.5},
        {"draft": None, "num_draft_tokens": 0, "batch_size": 1, "tokens_per_s": [1.0, 1.0], "tokens_per_draft": None},
    ]
    assert engine_probes(rows, "x") == [(16, pytest.approx(0.1)), (2, pytest.approx(0.04))]


def test_temperatures_go_with_the_exported_weights() -> None:
    config = calibrated()
    written = {
        "data": {"name": "text", "path": "some/texts"},
        "measured": {"confidence_ece_raw": 0.08, "confidence_ece": 0.02, "confidence_rounds": 96},
    }
    found = temperature_file(config, written)
    assert found is not None
    common = 2.0 ** ((config.depth - 1) / 2)  # the geometric mean, by which the weights are divided
    assert found["temperatures"] == pytest.approx([one / common for one in config.temperatures])
    assert len(found["temperatures"]) == config.depth
    assert (found["dataset"], found["num_samples"]) == ("some/texts", 96)
    assert (found["ece_before"], found["ece_after"]) == ([0.08], [0.02])


def test_a_draft_without_temperatures_has_no_file() -> None:
    assert temperature_file(replace(calibrated(), temperatures=()), {}) is None
