"""alpha and losslessness are measured at every temperature on the text of that temperature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from decode.sampling.warp import Sampling
from eval.config import EvalConfig
from eval.inputs import sampling_at, settings_at
from eval.measure import quality
from eval.measure.alpha import Alphas
from eval.measure.continuations import Generate, Job, Text
from eval.measure.losslessness import Check
from eval.measure.quality import measure_curve, measure_quality
from tests.eval.samples import config, prompts

SIZES = {"prompts": 3, "tokens": 6, "other_prompts": 2, "other_tokens": 4}
MODEL: Any = object()
DRAFTERS = {"one": "first drafter", "two": "second drafter"}


def lossless_config(**changes: Any) -> EvalConfig:
    timing = {"prompts": 1, "screening_prompts": 1}
    return config(temperatures=[1.0, 0.0], lossless=SIZES, timing=timing, seed=5, **changes)


def replace_models(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Every token tells the temperature it was written at, and every alpha that of text and of p and q."""
    asked: list[tuple[Any, ...]] = []

    def generator(_: object, drafter: Any, settings: Mapping[str, Any], seed: int, *rest: Any) -> Generate:
        def run(jobs: Sequence[Job]) -> list[Text]:
            asked.append((drafter, settings["temperature"], settings["verifier"], seed, len(jobs)))
            return [Text(job.row, job.prompt, (int(10 * settings["temperature"]),) * job.max_new) for job in jobs]

        return run

    def measure_alpha(_: object, drafters: Any, texts: Sequence[Text], sampling: Sampling) -> dict[str, Alphas]:
        rows = {text.row: np.array(text.new) + 100 * sampling.temperature for text in texts}
        return {name: Alphas(rows) for name in drafters}

    monkeypatch.setattr(quality, "generator", generator)
    monkeypatch.setattr(quality, "measure_alpha", measure_alpha)
    monkeypatch.setattr(quality, "processors_of", lambda *_: None)
    monkeypatch.setattr(quality, "margin_from", lambda *_: lambda *_: 1.0)
    monkeypatch.setattr(quality, "_uncached", lambda *_: None, raising=False)
    return asked


def values(alphas: Alphas) -> dict[int, list[float]]:
    return {row: alpha.tolist() for row, alpha in alphas.by_row.items()}


def test_alpha_is_that_of_text_and_models_at_the_same_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_models(monkeypatch)
    found = measure_quality(lossless_config(), MODEL, DRAFTERS, prompts(3))
    assert set(found) == {(t, name) for t in (1.0, 0.0) for name in DRAFTERS}
    for name in DRAFTERS:
        assert values(found[1.0, name].alphas) == {row: [110.0] * 6 for row in range(3)}
        assert values(found[0.0, name].alphas) == {row: [0.0] * 4 for row in range(2)}


def test_the_first_draft_at_the_first_temperature_is_compared_most(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = replace_models(monkeypatch)
    found = measure_quality(lossless_config(), MODEL, DRAFTERS, prompts(3))
    few = {0: Check(0, 0, 4), 1: Check(0, 0, 4)}
    assert found[1.0, "one"].checks == {row: Check(0, 0, 6) for row in range(3)}
    assert found[1.0, "two"].checks == found[0.0, "one"].checks == found[0.0, "two"].checks == few
    sampled = [(None, 3), ("first drafter", 3), ("second drafter", 2)]
    greedy = [("first drafter", 2), ("second drafter", 2)]
    assert asked == [
        *((drafter, 1.0, "coupled", 5, jobs) for drafter, jobs in sampled),
        (None, 0.0, "coupled", 5, 2),
        *((drafter, 0.0, "greedy", 5, jobs) for drafter, jobs in greedy),
    ]


def test_no_check_where_the_rule_does_not_promise_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = replace_models(monkeypatch)
    found = measure_quality(lossless_config(decode={"verifier": "block"}), MODEL, {"one": "drafter"}, prompts(3))
    assert found[1.0, "one"].checks is None
    assert found[0.0, "one"].checks == {0: Check(0, 0, 4), 1: Check(0, 0, 4)}  # argmaxes are the same by every rule
    assert [one[:3] for one in asked] == [(None, 1.0, "coupled"), (None, 0.0, "coupled"), ("drafter", 0.0, "greedy")]


def test_the_curve_measures_its_own_temperatures_and_takes_over_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_models(monkeypatch)
    cfg = lossless_config(curve_temperatures=[0.0, 0.7, 1.0])
    known = measure_quality(cfg, MODEL, DRAFTERS, prompts(3))
    curve = measure_curve(cfg, MODEL, DRAFTERS, prompts(3), known)
    assert set(curve) == {(t, name) for t in (0.0, 0.7, 1.0) for name in DRAFTERS}
    for name in DRAFTERS:
        assert all(curve[t, name] is known[t, name].alphas for t in (0.0, 1.0))
        assert values(curve[0.7, name]) == {row: [77.0] * 4 for row in range(2)}


def test_the_runs_filters_hold_at_every_temperature() -> None:
    cfg = config(decode={"top_k": 7, "top_p": 0.9, "min_p": 0.05}, temperatures=[0.5])
    assert sampling_at(cfg, 0.5) == Sampling(0.5, top_k=7, top_p=0.9, min_p=0.05)
    for temperature, verifier in ((0.5, "coupled"), (0.0, "greedy")):
        settings = settings_at(cfg, temperature)
        given = [settings[name] for name in ("temperature", "verifier", "top_k", "top_p", "min_p")]
        assert given == [temperature, verifier, 7, 0.9, 0.05]
