"""The table of a sweep, from folders written by hand."""

import time
from pathlib import Path

import pytest

from decode.common.errors import ConfigError
from decode.common.run_folder import MANIFEST, open_run
from decode.common.sweep import plan_sweep
from decode.common.sweep_table import RESUMED, Figures, Row, comparison
from tests.commands import config_class
from tests.common.test_run_folder import Config

TRAINING = Figures({"alpha": "alpha", "tau": "tau", "loss": "loss"}, highest="tau", lowest="loss")


def job(folder: Path, status: str = "finished", seconds: float | None = 12.34, **figures: object) -> Row:
    """A job that swept its folder's name."""
    folder.mkdir()
    head = {"schema": 1, "stage": "train", "finished": "2026-01-01T00:00:00+00:00"}
    timed = {} if seconds is None else {"seconds": seconds}
    MANIFEST.write(folder / "manifest.json", head | timed | figures)
    return Row({"lr": folder.name}, folder, status)


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.split("\n\n")[0].splitlines()]


def test_jobs_are_ranked_by_tau_then_by_loss_and_those_without_figures_come_last(tmp_path: Path) -> None:
    rows = [
        job(tmp_path / "a", "skipped", tau=2.0, alpha=0.5, loss=1.0),
        Row({"lr": "b"}, tmp_path / "b", "failed, exit code 1"),
        job(tmp_path / "c", tau=None, loss=0.5),
        job(tmp_path / "d", tau=2.51239, alpha=None, loss=9),
        job(tmp_path / "e", tau=None, loss=0.25, seconds=None),
        job(tmp_path / "f", tau=float("nan"), loss=None),
    ]
    table = cells(comparison(rows, TRAINING))
    assert table[0] == ["lr", "alpha", "tau", "loss", "seconds", "folder", "status"]
    assert table[2:] == [
        ["d", "-", "2.512", "9", "12.3", str(tmp_path / "d"), "finished"],
        ["a", "0.5", "2", "1", "12.3", str(tmp_path / "a"), "skipped"],
        ["e", "-", "-", "0.25", "-", str(tmp_path / "e"), "finished"],
        ["c", "-", "-", "0.5", "12.3", str(tmp_path / "c"), "finished"],
        ["b", "-", "-", "-", "-", str(tmp_path / "b"), "failed, exit code 1"],
        ["f", "-", "nan", "-", "12.3", str(tmp_path / "f"), "finished"],
    ]


def test_without_a_best_the_order_is_that_of_the_jobs_and_columns_are_aligned(tmp_path: Path) -> None:
    rows = [job(tmp_path / "a", counts={"tokens": 1000}), job(tmp_path / "b|", counts={"tokens": 20_000_000})]
    table = comparison(rows, Figures({"tokens": "counts.tokens"}))
    assert [row[:2] for row in cells(table)[2:]] == [["a", "1,000"], ["b\\|", "20,000,000"]]
    assert len({len(line) for line in table.splitlines()}) == 1


def test_a_failed_job_has_no_figures_of_what_was_in_its_way(tmp_path: Path) -> None:
    row = job(tmp_path / "a", "failed, exit code 2", tau=3.0)
    assert cells(comparison([row], TRAINING))[2][:4] == ["a", "-", "-", "-"]


def test_a_resumed_job_says_that_its_time_is_of_the_last_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = str(tmp_path / "run")
    with open_run(place, "train", Config()):
        pass  # killed
    clock = iter([100.0, 107.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    with open_run(place, "train", Config(), "auto") as folder:
        folder.finish({"tau": 2.0})
    ended = MANIFEST.read(tmp_path / "run" / "manifest.json")
    assert (ended.seconds, ended.resumed) == (7.5, True)
    table = comparison([Row({}, tmp_path / "run", "finished")], TRAINING)
    assert "| 7.5+ " in table
    assert table.endswith(RESUMED)


def test_a_run_in_one_go_is_timed_whole(tmp_path: Path) -> None:
    with open_run(str(tmp_path / "run"), "train", Config()) as folder:
        folder.finish({})
    ended = MANIFEST.read(tmp_path / "run" / "manifest.json")
    assert not ended.resumed
    assert ended.seconds is not None
    assert RESUMED not in comparison([Row({}, tmp_path / "run", "finished")], TRAINING)


def test_a_sweep_without_a_folder_is_refused() -> None:
    """Decoding prints to the terminal where no output_dir is set."""
    with pytest.raises(ConfigError, match="set output_dir=FOLDER"):
        plan_sweep("decode", config_class("decode"), ["-m", "target.path=t", "prompt=x", "seed=0,1"])
