"""Progress off a terminal: plain lines, rank 0 only."""

import time

import pytest

from decode.common.progress import get_logger, progress


def test_progress_is_written_as_lines_with_rate(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(total=4, unit="tokens", label="record") as bar:
        for _ in range(4):
            bar.update(1, loss=0.5)
    lines = capsys.readouterr().err.splitlines()
    assert "record: 100%" in lines[-1]
    assert "4/4" in lines[-1]
    assert "loss=0.5" in lines[-1]
    assert len(lines) == 1


def test_the_last_state_is_shown_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.common.progress._LINE_INTERVAL_S", 0.0)
    with progress(total=None, unit="steps", label="train") as bar:
        time.sleep(0.01)
        bar.update(1)
        bar.update(1)
    assert [line.count("steps/s") for line in capsys.readouterr().err.splitlines()] == [1, 1]


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with progress(total=2, unit="steps", label="train") as bar:
        bar.update(2, loss=1)
    assert capsys.readouterr().err == ""


def test_log_lines_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    get_logger("test").info("hello %d", 3)
    shown = capsys.readouterr()
    assert shown.err.rstrip().endswith("] hello 3")
    assert shown.out == ""
