"""The prompts of a run: drawn from the corpus once, by one rank, and read from the run's folder by all others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from decode.common.checked_json import read_json
from decode.common.errors import InputError
from decode.config import ModelConfig
from decode.models.load import describe_model
from distill.config import DataConfig, DistillConfig, PromptConfig
from distill.corpora import Document, configured
from distill.corpora.bad_rows import BadRow
from distill.prompts.drawn_prompts import DrawnPrompt, digest
from distill.prompts.prompt_texts import PromptTexts, file_stamp, write_prompts
from distill.stage import run
from tests.distill.runs import shard_files, tiny_config
from tests.distill.test_drafted_responses import Stopped, stop_at

SAID = [{"role": "user", "content": "Größe?\n"}, {"role": "assistant", "content": "\u2028 3"}]
PROMPTS = [
    DrawnPrompt(0, "a:1", "train", ids=[5, 70_000, 2]),
    DrawnPrompt(1, "b", "train", messages=SAID),
    DrawnPrompt(2, "ç", "validation", ids=[]),
]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A line for every pass over the corpus."""
    passes: list[str] = []
    read = configured.FILE_READERS["jsonl"]

    def counted(path: Path, config: DataConfig) -> Iterator[Document | BadRow]:
        passes.append(str(path))
        yield from read(path, config)

    monkeypatch.setitem(configured.FILE_READERS, "jsonl", counted)
    return passes


def stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> DistillConfig:
    """A run that ended when it had written two shards of four."""
    with monkeypatch.context() as patch:
        stop_at(2, patch)
        with pytest.raises(Stopped):
            run(tiny_config(folder))
    return tiny_config(folder, resume="auto")


def test_prompts_come_back_as_they_were_written(tmp_path: Path) -> None:
    found = write_prompts(iter(PROMPTS), tmp_path / "prompts")
    assert list(found) == PROMPTS
    assert found[1:] == PROMPTS[1:]
    assert found[:100] == PROMPTS
    assert digest(found) == digest(PROMPTS)


def test_the_corpus_is_read_by_the_first_run_and_not_by_one_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[str]
) -> None:
    config = stopped(tmp_path, monkeypatch)
    assert len(reads) == 3  # two splits, and what is held out
    reads.clear()
    run(config)
    assert not reads
    run(tiny_config(tmp_path, "whole"))
    assert shard_files(tmp_path / "records") == shard_files(tmp_path / "whole")
    ours, theirs = (read_json(tmp_path / name / "manifest.json") for name in ("records", "whole"))
    for told in ("shards", "prompts_sha256", "held_out"):
        assert ours[told] == theirs[told]
    assert not (tmp_path / "records" / "prompts").exists()  # the records hold them now


def test_a_plan_is_of_its_own_corpus_whatever_the_folder_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped(tmp_path, monkeypatch)
    run(tiny_config(tmp_path, plan=True, prompts=PromptConfig(tokens=6, per_document=2, count=7, validation_count=2)))
    assert "prompts               7 train, 2 validation" in capsys.readouterr().out


def touch(folder: Path) -> None:
    os.utime(folder / "corpus.jsonl", ns=(1, 1))


def truncate(folder: Path) -> None:
    file = folder / "records/prompts/prompts.jsonl"
    file.write_bytes(file.read_bytes()[:-7])


def alter(folder: Path) -> None:
    file = folder / "records/prompts/prompts.jsonl"
    file.write_bytes(file.read_bytes().replace(b"corpus.jsonl:", b"corpus.jsonx:", 1))


def lose(folder: Path) -> None:
    (folder / "records/prompts/starts.npy").unlink()


@pytest.mark.parametrize("change", [touch, truncate, alter, lose])
def test_what_may_have_changed_is_read_again_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[str], change: Callable[[Path], None]
) -> None:
    config = stopped(tmp_path, monkeypatch)
    change(tmp_path)
    reads.clear()
    run(config)
    assert len(reads) == 3
    run(tiny_config(tmp_path, "whole"))
    assert shard_files(tmp_path / "records") == shard_files(tmp_path / "whole")


def test_a_corpus_that_changed_is_refused_though_its_prompts_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = stopped(tmp_path, monkeypatch)
    lines = (tmp_path / "corpus.jsonl").read_text().splitlines()
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines[::-1]))
    with pytest.raises(InputError, match="the corpus or the tokenizer changed"):
        run(config)


def test_ranks_that_are_not_the_first_read_no_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[str]
) -> None:
    config = stopped(tmp_path, monkeypatch)
    target = describe_model(ModelConfig(path=str(tmp_path / "target")))
    with PromptTexts(config, target) as first:
        first.read(tmp_path / "records")
        reads.clear()
        other = PromptTexts(config, target)
        other.open(tmp_path / "records")
        assert list(other.prompts) == list(first.prompts)
        assert other.num_prompts == 13
    assert not reads


def test_a_stamp_tells_of_sizes_times_and_names(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, ns=(5, 5))
    config = DataConfig("text", str(tmp_path))
    seen = [file_stamp(config)]
    os.utime(tmp_path / "a.txt", ns=(6, 6))
    seen.append(file_stamp(config))
    (tmp_path / "a.txt").write_text("longer")
    os.utime(tmp_path / "a.txt", ns=(6, 6))
    seen.append(file_stamp(config))
    (tmp_path / "a.txt").rename(tmp_path / "aa.txt")  # in the same order
    seen.append(file_stamp(config))
    assert len(set(seen)) == 4
    assert file_stamp(config) == seen[-1]
    assert file_stamp(DataConfig("hub", "some/dataset")) is None
    assert file_stamp(DataConfig()) == file_stamp(DataConfig("tasks"))  # both are made of the library
