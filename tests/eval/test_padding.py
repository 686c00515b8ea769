"""What strict decoding costs: which calls are counted, and what of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decode.stats import Round, Stats
from eval.measure import certificate_parts
from eval.measure.certificate_parts import measure_padding
from tests.eval.samples import config, prompts

MODEL: Any = SimpleNamespace(device=torch.device("cpu"))
DRAFTER: Any = object()


def measured(monkeypatch: pytest.MonkeyPatch, later_s: list[float]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Of calls of two rows in which 3 + 1 tokens come at first and 9 + 11 later, in `later_s` seconds of its turn."""
    calls: list[dict[str, Any]] = []

    def generate(model: object, drafter: object, ids: torch.Tensor, **settings: Any) -> Any:
        turn = len(calls) // 4
        calls.append({"drafts": drafter is not None, "ids": ids.tolist(), **settings})
        rounds = [Round(0, 2, 2, 3), Round(1, 2, 0, 1), Round(0, 2, 2, 9), Round(1, 2, 2, 11)]
        return SimpleNamespace(stats=Stats(2, rounds=rounds, arrival_s=[5.0, 5.5, 5.0 + later_s[turn]]))

    monkeypatch.setattr(certificate_parts, "generate", generate)
    monkeypatch.setattr(certificate_parts, "PADDING_ROUNDS", len(later_s) - 1)
    cfg = config(timing={"batch_size": 2}, temperatures=[0.5, 1.0], seed=4)
    return measure_padding(cfg, MODEL, DRAFTER, prompts(3)), calls


def test_the_speed_is_the_median_of_the_rounds_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = measured(monkeypatch, [100.0, 1.0, 2.0, 8.0])
    arms = ("plain", "plain_padded", "speculative", "speculative_padded")
    assert found["tokens_per_s"] == dict.fromkeys(arms, 10.0)  # 20 tokens in the 2 seconds after the first arrival
    assert (found["temperature"], found["batch_size"], found["rows"]) == (0.5, 2, 3)


def test_every_turn_asks_all_four_for_the_same_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    _, calls = measured(monkeypatch, [1.0, 1.0])
    assert [(call["drafts"], call["strict"]) for call in calls[:4]] == [
        (False, False),
        (False, True),
        (True, False),
        (True, True),
    ]
    a, b, c = (list(prompt.ids) for prompt in prompts(3))
    assert [call["ids"] for call in calls] == [[a, b]] * 4 + [[c, a]] * 4
    assert all((call["temperature"], call["seed"]) == (0.5, 4) for call in calls)


def test_what_came_at_once_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = Stats(2, rounds=[Round(0, 2, 2, 3), Round(1, 2, 2, 3)], arrival_s=[1.0])
    monkeypatch.setattr(certificate_parts, "generate", lambda *_, **__: SimpleNamespace(stats=stats))
    found = measure_padding(config(timing={"batch_size": 2}), MODEL, DRAFTER, prompts(2))
    assert set(found["tokens_per_s"].values()) == {None}
