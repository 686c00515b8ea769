"""Record folders refuse what is damaged, unfinished or of another target, and name both values."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from decode.common.checked_json import read_json, write_json
from decode.common.errors import ConfigError, InputError
from decode.common.run_folder import sha256_file
from decode.config import ModelConfig
from decode.models.load import describe_model
from distill.records import file_checks
from distill.records.record_folder import RecordFolder
from distill.sequences import record_sequences
from distill.stage import run
from tests.distill.runs import shard_files, tiny_config
from tests.tiny import save_tiny_target, tiny_tokenizer


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    run(tiny_config(folder))
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished run that a test may damage."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path


def first_shard(folder: Path) -> Path:
    return folder / "records" / "shards" / "shard-00000.safetensors"


def truncate(folder: Path) -> None:
    first_shard(folder).write_bytes(first_shard(folder).read_bytes()[:-1])


def flip_a_bit(folder: Path) -> None:
    content = bytearray(first_shard(folder).read_bytes())
    content[-100] ^= 4
    first_shard(folder).write_bytes(content)


def edit_manifest(folder: Path, **fields: object) -> None:
    path = folder / "records" / "manifest.json"
    write_json(path, read_json(path) | fields)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (truncate, r"shard-00000.safetensors has \d+ bytes, and the manifest says \d+"),
        (lambda folder: first_shard(folder).unlink(), "shard-00000.safetensors is missing"),
        (lambda folder: (folder / "records" / "manifest.json").unlink(), "resume=auto"),
        (lambda folder: (folder / "records" / "manifest.json").write_text("{"), "not valid JSON"),
        (lambda folder: shutil.rmtree(folder / "records"), "no such record folder"),
        (
            lambda folder: edit_manifest(folder, stage="train"),
            "stage is 'train', and records are written by",
        ),
        (
            lambda folder: edit_manifest(folder, records_version=9),
            "is 9, and this program reads version 1 and 2",
        ),
    ],
)
def test_a_damaged_folder_is_refused(folder: Path, damage: Callable[[Path], None], told: str) -> None:
    damage(folder)
    with pytest.raises(InputError, match=told):
        RecordFolder.open(folder / "records")


def test_a_shard_is_held_against_its_checksum_when_it_is_first_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and not when the folder is opened: one of many shards would take hours to open."""
    flip_a_bit(folder)
    hashed: list[str] = []

    def counted(file: Path) -> str:
        hashed.append(Path(file).stem)
        return sha256_file(file)

    monkeypatch.setattr(file_checks, "sha256_file", counted)
    records = RecordFolder.open(folder / "records")
    assert len(records) == 13
    assert not hashed
    for _ in range(2):  # it stays refused
        with pytest.raises(
            InputError, match=r"shard-00000.safetensors has SHA-256 [0-9a-f]{64}, and the manifest says"
        ):
            records.read(3)
    assert hashed == ["shard-00000"] * 2
    assert [records.read(index).meta["prompt"] for index in (4, 12, 5, 8, 4)] == [4, 12, 5, 8, 4]
    assert hashed[2:] == ["shard-00001", "shard-00003", "shard-00002"]


@pytest.mark.parametrize("change", ["fingerprint", "token_map_hash", "chat_template_hash", "vocab_size"])
def test_records_of_another_target_are_refused(folder: Path, change: str) -> None:
    other = folder / "other"
    size = 310 if change == "vocab_size" else 300
    save_tiny_target(other, seed=1 if change == "fingerprint" else 0, vocab_size=size)
    if change == "token_map_hash":
        tokenizer = tiny_tokenizer(299)
        tokenizer.save_pretrained(other)
    if change == "chat_template_hash":
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = "{{ messages }}"
        tokenizer.save_pretrained(other)
    target = describe_model(ModelConfig(path=str(other)))
    manifest = read_json(folder / "records" / "manifest.json")
    if change == "vocab_size":  # whose weights differ too: let only the size speak
        manifest["target"]["fingerprint"] = target.fingerprint
        write_json(folder / "records" / "manifest.json", manifest)
    there, here = manifest["target"][change], getattr(target, change)
    with pytest.raises(InputError) as caught:
        RecordFolder.open(folder / "records", target)
    assert change in str(caught.value)
    assert f"{there}" in str(caught.value)
    assert f"{here}" in str(caught.value)


def test_the_same_target_elsewhere_is_accepted(folder: Path) -> None:
    moved = folder / "moved"
    (folder / "target").rename(moved)
    assert len(RecordFolder.open(folder / "records", describe_model(ModelConfig(path=str(moved))))) == 13


def test_a_killed_run_is_finished_from_its_last_shard(tmp_path: Path) -> None:
    """Whatever a kill leaves (no manifest, a half-written shard, a shard without its note), the end is the same."""
    run(tiny_config(folder := tmp_path))
    before = shard_files(folder / "records")
    shards = folder / "records" / "shards"
    (folder / "records" / "manifest.json").unlink()
    (shards / "shard-00001.json").unlink()
    (shards / "shard-00002.safetensors").unlink()
    (shards / ".shard-00002.safetensors.tmp").write_bytes(b"half")
    flip_a_bit(folder)
    run(tiny_config(folder, resume="auto"))
    assert shard_files(folder / "records") == before
    assert not list(shards.glob(".*.tmp"))
    assert len(RecordFolder.open(folder / "records")) == 13


def test_a_corpus_that_changed_under_a_killed_run_is_refused(tmp_path: Path) -> None:
    run(tiny_config(folder := tmp_path))
    (folder / "records" / "manifest.json").unlink()
    lines = (folder / "corpus.jsonl").read_text().splitlines()
    (folder / "corpus.jsonl").write_text("\n".join(lines[::-1]))
    with pytest.raises(InputError, match="the corpus or the tokenizer changed"):
        run(tiny_config(folder, resume="auto"))


def test_a_resumed_run_of_another_configuration_is_refused(folder: Path) -> None:
    (folder / "records" / "manifest.json").unlink()
    with pytest.raises(ConfigError, match="seed: 0 there, 5 now"):
        run(tiny_config(folder, resume="auto", seed=5))


def test_records_that_are_cut_are_counted(finished: Path, caplog: pytest.LogCaptureFixture) -> None:
    records = RecordFolder.open(finished / "records")
    with caplog.at_level("INFO"):
        assert len(record_sequences(records, "train", 14)) == 10
        assert not caplog.records
        assert max(record_sequences(records, "train", 8).lengths) == 8
    assert "10 of 10 train records" in caplog.text
