"""`mode=runtimes`: the same records by several ways, timed, kept over a kill, and pooled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from decode.common.errors import ConfigError, InputError
from decode.config import ModelConfig
from distill.time_spent import Stopwatch
from eval.config import EvalConfig
from eval.modes.runtimes import arms, mode
from eval.modes.runtimes.config import RuntimesConfig
from eval.modes.runtimes.page import render_summary
from eval.modes.runtimes.results import speeds
from eval.publish import publish
from eval.stage import run
from tests.distill.runs import write_corpus
from tests.eval.energy_checks import check_energy
from tests.tiny import save_tiny_target


def config(folder: Path, **fields: Any) -> EvalConfig:
    """Two ways that write the same text, on a target that is made where it is missing."""
    target = folder / "tar'get"
    if not target.exists():
        save_tiny_target(target)
    common = [
        "data=jsonl",
        f"data.path={write_corpus(folder)}",
        *("data.validation_share=0.2", "data.heldout_share=0.2"),
        *("prompts.count=4", "prompts.validation_count=1", "prompts.tokens=6", "sampling.max_new_tokens=8"),
    ]
    own = {"arms": {"today": [], "narrow": ["batch_size=2"]}, "common": common, "rounds": 1}
    return EvalConfig(
        mode="runtimes",
        target=ModelConfig(path=str(target)),
        output_dir=str(folder / "out"),
        runtimes=RuntimesConfig(**{**own, **fields}),
        resume="auto",
    )


def made(arm: str, seconds: float, number: int = 0, texts: str = "ab") -> dict[str, Any]:
    known = {"round": str(number), "kind": "text", "arm": arm, "wall_s": 9.0 + seconds, "starting_s": 5.0, "tokens": 60}
    return {**known, "writing_s": seconds, "reading_s": 1.0, "texts": list(texts), "equal_texts": 1.0}


@pytest.mark.slow
def test_a_whole_run_counts_tokens_compares_texts_and_goes_on_after_what_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(tmp_path)
    run(cfg)
    found = json.loads((tmp_path / "out/results.json").read_text())
    assert [(one["arm"], one["kind"], one["equal_texts"]) for one in found["speeds"]] == [
        ("today", "text", 1.0),
        ("narrow", "text", 1.0),
    ]
    for one in found["made"]:
        assert one["tokens"] == 5 * 8
        assert 0 < one["writing_s"] + one["reading_s"] + one["starting_s"] < one["wall_s"]
        assert one["starting_s"] > 0
    assert not (tmp_path / "out/records").exists()
    check_energy(found, ["today", "narrow"])
    assert "narrow" in (tmp_path / "out/summary.md").read_text()
    (tmp_path / "out/manifest.json").unlink()
    (tmp_path / "out/made/text-narrow-0.json").unlink()
    asked = []
    monkeypatch.setattr(mode, "make", lambda cfg, arm, *_: asked.append(arm) or made(arm, 2.0, texts="abcde"))
    run(cfg)
    assert asked == ["narrow"]


def test_speed_is_without_starting_and_held_against_the_first_arm_of_the_same_round() -> None:
    every = [made("one", 5.0), made("two", 2.0), made("two", 1.0, 1), made("one", 2.0, 1)]
    first, second = speeds(every, ["one", "two"])
    assert first["tokens_per_s"] == [10, 20]
    assert second["tokens_per_s"] == [20, 30]
    assert (first["ratios"], second["ratios"]) == ([1, 1], [2, 1.5])


def test_arms_take_turns_and_another_one_begins_each_round(tmp_path: Path) -> None:
    cfg = config(tmp_path, rounds=2)
    assert list(mode.turns(cfg, ["a", "b"])) == [(0, "text", "a"), (0, "text", "b"), (1, "text", "b"), (1, "text", "a")]


def test_bad_arms_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    for overrides, said in (
        (["no.such=3"], "runtimes.arms.bad"),
        (["records.features.layers=[99]"], "runtimes.arms.bad"),
        (["from_records=nowhere"], "runtimes.arms.bad"),
    ):
        with pytest.raises((ConfigError, InputError), match=said):
            run(config(tmp_path, arms={"today": [], "bad": overrides}))
    assert not (tmp_path / "out").exists()
    wrongs: list[dict[str, Any]] = [
        {"arms": {"a/b": []}},
        {"arms": {"a": ["output_dir=x"]}},
        {"kinds": {}},
        {"rounds": 0},
    ]
    for wrong in wrongs:
        with pytest.raises(ConfigError):
            RuntimesConfig(**wrong)


def test_vllm_is_left_out_unless_it_is_asked_for_and_then_has_to_be_there(tmp_path: Path) -> None:
    cfg = config(tmp_path, arms={"today": [], "vllm": ["target.runtime=vllm"]})
    assert arms.check_arms(cfg, tmp_path / "out/records") == {"vllm": arms.NO_VLLM}
    cfg.peers.vllm_python = str(tmp_path / "no-python")
    with pytest.raises((ConfigError, InputError), match="no-python"):
        run(cfg)
    only = config(tmp_path, arms={"vllm": ["target.runtime=vllm"]})
    with pytest.raises(ConfigError, match="held against"):
        run(only)


def test_a_part_within_another_counts_for_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 4.0, 6.0])
    monkeypatch.setattr("distill.time_spent.time.perf_counter", lambda: next(times))
    watch = Stopwatch()
    with watch.part("writing"), watch.part("starting"):
        pass
    assert watch.seconds == {"starting": 3.0, "writing": 3.0, "reading": 0.0}


def test_runs_are_pooled_by_their_rounds_and_one_run_is_not_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = []
    for number, seconds in enumerate((2.0, 1.0)):
        monkeypatch.setattr(mode, "make", lambda cfg, arm, *_, s=seconds: made(arm, s if arm == "narrow" else 5.0))
        cfg = config(tmp_path)
        cfg.output_dir = str(tmp_path / f"run{number}")
        run(cfg)
        files.append(tmp_path / f"run{number}/results.json")
    data, page = publish(files, tmp_path / "page")
    pooled = json.loads(data.read_text())
    assert [one["ratios"] for one in pooled["speeds"]] == [[1, 1], [2, 3]]
    assert page.read_text() == render_summary(pooled)
    with pytest.raises(InputError, match="one run"):
        publish([files[0], files[0]], tmp_path / "page")
