"""Run folders: nothing is overwritten, an unfinished run is continued, a changed configuration is refused."""

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from decode.common.checked_json import read_json, write_json
from decode.common.errors import ConfigError, InputError
from decode.common.run_folder import RUN, RunFolder, check_run, free_disk_check, sha256_file
from decode.common.run_folder import open_run as hold_run


@dataclass(frozen=True)
class Config:
    output_dir: str = "somewhere"
    resume: str = "never"
    plan: bool = False
    seed: int = 7
    sizes: tuple[int, ...] = (1, 2)
    nested: dict = field(default_factory=lambda: {"lr": 0.1})


def open_run(*arguments: Any, **named: Any) -> RunFolder:
    """The folder as a process finds it, which ends before the next one opens it."""
    with hold_run(*arguments, **named) as folder:
        return folder


def test_a_new_run_says_how_it_was_made(tmp_path: Path) -> None:
    folder = open_run(str(tmp_path / "a" / "run"), "train", Config())
    run = read_json(folder.path / "run.json")
    assert run["stage"] == "train"
    assert run["config"]["nested"] == {"lr": 0.1}
    assert run["seed"] == 7
    assert set(run["git"]) == {"revision", "dirty"}
    assert "torch" in run["packages"]
    assert run["hardware"]["cores"] >= 1
    assert not folder.is_finished


def test_an_existing_folder_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    for resume in ("never", "auto"):  # which would be refused, too
        with pytest.raises(ConfigError, match=r"no run\.json") as error:
            open_run(str(tmp_path), "train", Config(), resume)
        assert "resume=auto" not in str(error.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.txt"]


def test_auto_continues_and_then_reports_the_finished_run(tmp_path: Path) -> None:
    open_run(str(tmp_path), "train", Config(), "auto")
    again = open_run(str(tmp_path), "train", Config(resume="auto", output_dir="moved"), "auto")
    assert not again.is_finished
    again.finish({"tokens": 3})
    assert read_json(tmp_path / "manifest.json")["tokens"] == 3
    assert open_run(str(tmp_path), "train", Config(), "auto").is_finished


def test_a_changed_configuration_is_refused_with_both_values(tmp_path: Path) -> None:
    open_run(str(tmp_path), "train", Config())
    with pytest.raises(ConfigError, match=r"nested\.lr: 0\.1 there, 0\.2 now"):
        open_run(str(tmp_path), "train", replace(Config(), nested={"lr": 0.2}), "auto")
    with pytest.raises(ConfigError, match="stage 'train'"):
        open_run(str(tmp_path), "distill", Config(), "auto")


def test_a_start_is_told_to_resume_only_where_that_is_taken(tmp_path: Path) -> None:
    begun = RUN.read(open_run(str(tmp_path), "train", Config()).path / "run.json").started
    with pytest.raises(ConfigError, match=rf"begun {re.escape(begun)} and not finished.*Use resume=auto to go on"):
        open_run(str(tmp_path), "train", Config())
    with pytest.raises(ConfigError, match="seed: 7 there, 8 now") as error:
        open_run(str(tmp_path), "train", replace(Config(), seed=8))
    assert "resume=auto" not in str(error.value)
    open_run(str(tmp_path), "train", Config(), "auto").finish({})
    with pytest.raises(ConfigError, match="a finished run, and nothing is overwritten. Use resume=auto to reuse it"):
        open_run(str(tmp_path), "train", Config())


def test_what_a_killed_start_left_behind_does_not_block(tmp_path: Path) -> None:
    (tmp_path / ".run.json.123.tmp").write_text("{")
    (tmp_path / "run.lock").touch()
    assert open_run(str(tmp_path), "train", Config(), "auto").path == tmp_path


def test_resume_from_a_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither never nor auto"):
        open_run(str(tmp_path / "run"), "train", Config(), str(tmp_path / "missing"))
    checkpoint = tmp_path / "old" / "checkpoints" / "step-3"
    checkpoint.mkdir(parents=True)
    folder = open_run(str(tmp_path / "run"), "train", Config(), str(checkpoint))
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        open_run(str(folder.path), "train", Config(), str(checkpoint))
    inside = folder.path / "checkpoints" / "step-1"
    inside.mkdir(parents=True)
    assert not open_run(str(folder.path), "train", Config(), str(inside)).is_finished


def test_a_run_is_looked_at_before_it_is_opened_and_nothing_is_written(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    assert not check_run(run, "train", Config())
    assert not (tmp_path / "run").exists()
    with hold_run(run, "train", Config()) as folder:
        with pytest.raises(ConfigError, match="in use by process"):
            check_run(run, "train", Config(), "auto")
        folder.finish({})
        assert check_run(run, "train", Config(), "auto")  # it is known how that ends
    assert sorted(path.name for path in folder.path.iterdir()) == ["manifest.json", "run.json"]
    with pytest.raises(ConfigError, match="a finished run"):
        check_run(run, "train", Config())


def test_only_the_main_process_writes(tmp_path: Path) -> None:
    folder = open_run(str(tmp_path / "run"), "train", Config(), is_main=False)
    folder.finish({})
    assert not folder.path.exists()


def test_a_place_that_cannot_hold_a_run_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match="output_dir"):
            open_run(str(place), "train", Config())


def test_json_is_replaced_whole_and_read_with_clear_errors(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"ü": [1, 2]})
    with pytest.raises(TypeError):
        write_json(path, {"bad": object()})
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]
    assert read_json(path) == {"ü": [1, 2]}
    with pytest.raises(InputError, match=r"missing\.json"):
        read_json(tmp_path / "missing.json")
    path.write_text(json.dumps({"a": 1})[:-1])
    with pytest.raises(InputError, match=r"a\.json is not valid JSON"):
        read_json(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"a\.json"):
        read_json(path)


def test_writers_with_one_process_id_do_not_share_a_temporary_file(tmp_path: Path, monkeypatch) -> None:
    """Two containers on one disk: both are process 1, and one would rename the file that the other still writes."""
    names = []
    monkeypatch.setattr("os.getpid", lambda: 1)
    monkeypatch.setattr("os.fsync", lambda _: names.append(next(tmp_path.glob(".*.tmp")).name))
    for content in (1, 2):
        write_json(tmp_path / "a.json", content)
    assert len(set(names)) == 2


def test_checksum_and_disk_check(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert sha256_file(tmp_path / "x").startswith("ba7816bf")
    free_disk_check(tmp_path / "new" / "folder", 1)
    with pytest.raises(ConfigError, match="GB free"):
        free_disk_check(tmp_path / "new", 10**18)
