"""Speeds of servers: which are started, what each is asked, and what is kept of a run that was cut short."""

import json
import os
import sys
from pathlib import Path

import pytest

from decode.common.run_folder import RunFolder
from eval.measure.cells import Results
from eval.modes.served.engine.metrics import Counters
from eval.modes.served.engine.server import PORT, ServerGoneError
from eval.modes.served.schedule import speeds
from eval.modes.served.schedule.arms import Engine
from eval.modes.served.schedule.speeds import Arm, Timing, measure_speeds
from tests.eval.served import fake_server

SERVER = [sys.executable, str(Path(fake_server.__file__)), "--port", PORT]
DRAFT = ["--speculative-config", json.dumps({"method": "eagle3", "model": "a/draft", "num_speculative_tokens": 5})]
MEDUSA = ["--speculative-config", json.dumps({"method": "medusa", "model": "a/draft"}), "--other", "option"]


def timing(rounds: int = 2) -> Timing:
    """Two batch sizes, three prompts."""
    return Timing([1, 3], [[5], [6, 7], [8]], 7, rounds, 0, dict(os.environ), 60.0)


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(RunFolder(tmp_path, "eval"))


def test_each_length_has_a_server_that_is_held_at_it_and_none_is_drafted_with_the_draft_loaded() -> None:
    engine = Engine("python", "a/target", ["--dtype", "float32"])
    arms = engine.drafting("x", DRAFT, [1, 4])
    assert [(arm.name, arm.k) for arm in arms] == [("x-k0", 0), ("x-k1", 1), ("x-k4", 4)]
    spoken = [json.loads(arm.command[arm.command.index("--speculative-config") + 1]) for arm in arms]
    assert [one["num_speculative_tokens"] for one in spoken] == [4, 4, 4]
    assert [one["num_speculative_tokens_per_batch_size"] for one in spoken] == [[[1, 1, k]] for k in (0, 1, 4)]
    assert all(arm.command[-2:] == ["--dtype", "float32"] for arm in arms)
    assert "--speculative-config" not in engine.alone().command


def test_medusa_follows_no_schedule() -> None:
    arms = Engine("python", "a/target", []).drafting("m", MEDUSA, [1, 3])
    spoken = [json.loads(arm.command[arm.command.index("--speculative-config") + 1]) for arm in arms]
    assert [one["num_speculative_tokens"] for one in spoken] == [1, 3]
    assert all("num_speculative_tokens_per_batch_size" not in one for one in spoken)
    assert all("--other" in arm.command for arm in arms)


def test_every_arm_is_started_in_every_round_and_timed_at_every_batch_size(results: Results) -> None:
    found = measure_speeds([Arm("one", 0, SERVER), Arm("two", 2, SERVER)], timing(), results)
    assert [timed.arm.name for timed in found] == ["one", "two"]
    assert [[(one.batch_size, one.k, len(one.tokens_per_s)) for one in timed.speeds] for timed in found] == [
        [(1, 0, 2), (3, 0, 2)],
        [(1, 2, 2), (3, 2, 2)],
    ]
    assert {path.name for path in (results.folder.path / "logs").iterdir()} == {
        f"{name}-{turn}.log" for name in ("one", "two") for turn in (0, 1)
    }


def test_counters_are_of_what_was_timed_alone(results: Results) -> None:
    # 8 requests at batch size 1, 9 at 3 (three for each place), two rounds; 6 tokens after the first, two a draft.
    (timed,) = measure_speeds([Arm("one", 2, SERVER)], timing(), results)
    drafts = (8 + 9) * 3 * 2
    assert timed.counters == Counters(drafts, 2 * drafts, (drafts, 0))


def test_all_arms_are_asked_alike() -> None:
    assert timing().asked(3) == [[5], [6, 7], [8]] * 3
    assert len(timing().asked(1)) == 8
    assert len(timing().asked(16)) == 32


def test_a_run_that_was_cut_short_goes_on(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = [Arm("one", 0, SERVER), Arm("two", 0, [*SERVER, "--dies-after", "3"])]
    with pytest.raises(ServerGoneError, match="(?s)two.*EngineDeadError: out of memory|ended with code 7"):
        measure_speeds(arms, timing(), results)
    kept = {path.name: path.read_bytes() for path in (results.folder.path / "speeds").glob("*.json")}
    found = measure_speeds([arms[0], Arm("two", 0, SERVER)], timing(), results)
    assert len(found) == 2
    assert all((results.folder.path / "speeds" / name).read_bytes() == content for name, content in kept.items())
    monkeypatch.setattr(speeds, "running", None)  # nothing is left to be started
    assert measure_speeds([arms[0], Arm("two", 0, SERVER)], timing(), results) == found
