"""Record folders: what lies on disk, number by number; the damaged, unfinished or those of others are refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load

from decode.common.checked_json import read_json, write_json
from decode.common.errors import ConfigError, InputError
from decode.common.run_folder import RunFolder
from decode.common.typed_config import build
from decode.config import ModelConfig, Scheme
from decode.models.describe import describe_model
from distill.config import TargetConfig
from distill.records import file_checks, record_shards
from distill.records.record_folder import IDENTITIES, RecordFolder, RecordWriter
from distill.records.record_shards import FINISH_REASONS, Record, shard_bytes, summary
from distill.records.safetensors_file import array_places
from distill.sequences import record_sequences
from distill.stage import run
from tests.distill.folders import FULL, WITH_STATES, folder_of, record
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
            "is 9, and this program reads version 2",
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

    def counted(file: Path, known: dict[str, str]) -> None:
        hashed.append(Path(file).stem)
        file_checks.check_arrays(file, known)

    monkeypatch.setattr(record_shards, "check_arrays", counted)
    records = RecordFolder.open(folder / "records")
    assert len(records) == 13
    assert not hashed
    for _ in range(2):  # it stays refused
        with pytest.raises(
            InputError, match=r"shard-00000.safetensors: \S+ has SHA-256 [0-9a-f]{64}, and the manifest says"
        ):
            records.read(3)
    assert hashed == ["shard-00000"] * 2
    assert [records.read(index).meta["prompt"] for index in (4, 12, 5, 8, 4)] == [4, 12, 5, 8, 4]
    assert hashed[2:] == ["shard-00001", "shard-00003", "shard-00002"]


def test_what_is_not_read_is_not_looked_at(folder: Path) -> None:
    """Counting the tokens of a corpus looked at every byte of its hidden states, 7 TB of an 8B target's."""
    file = first_shard(folder)
    with file.open("rb") as opened:
        before, places = file.read_bytes(), array_places(opened)
    begin, end = places["head_tail.codes"]
    file.write_bytes(before[:begin] + bytes(one ^ 1 for one in before[begin:end]) + before[end:])
    records = RecordFolder.open(folder / "records")
    assert records.read(0, stores=(), layers=()).ids.tolist()
    for _ in range(2):
        with pytest.raises(InputError, match=r"head_tail\.codes has SHA-256"):
            records.read(0)


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


ABOUT = {
    "seed": 7,
    "runtime": {"name": "transformers", "version": "5", "dtype": "float32"},
    "spent": {},
    "responses": "target",
    "sampling": {},
    "prompts_sha256": "0" * 64,
    "config": {
        "data": {"name": "jsonl", "path": "rows", "subset": None, "validation_share": 0.1, "heldout_share": 0.1},
        "prompts": {},
        "sampling": {},
        "records": {"store": ["full"], "head": 2, "tail": 1, "topk": 2, "shard_size": 8},
        "batch_size": 1,
        "seed": 7,
    },
}


def three() -> list[Record]:
    return [
        record(0, [4, 3, 2], [1, 2], finish_reason="eos"),
        record(1, [1], [], split="validation", finish_reason="stop"),
        record(3, [0, 1, 2, 3], [2, 3], turn=1, prompt_end=2, finish_reason="corpus"),
    ]


def test_the_numbers_of_a_shard() -> None:
    arrays = {name: array.tolist() for name, array in load(shard_bytes(three(), FULL)).items()}
    assert [row.index(0.0) for row in arrays.pop("full.log_p")] == [0, 1, 3, 4]
    assert bytes(arrays.pop("documents")).decode() == '["d0", "d1", "d3"]'
    assert arrays == {
        "ids": [4, 3, 2, 1, 0, 1, 2, 3],
        "loss_mask": [0, 1, 1, 0, 0, 0, 1, 1],
        "token_start": [0, 3, 4, 8],
        "row_start": [0, 2, 2, 4],
        "split": [0, 1, 0],
        "finish_reason": [1, 2, 3],
        "prompt": [0, 1, 3],
        "turn": [0, 0, 1],
        "prompt_end": [1, 1, 2],
    }
    assert FINISH_REASONS.index("length") == 0


def test_the_summary_of_a_shard() -> None:
    records = three()
    for one, errors in zip(records, ([[1, 2]] * 3, [[3, 4]], [[0.5, 0]] * 4), strict=True):
        one.feature_errors = np.array(errors, dtype=np.float32)
    known = summary(b"1234567", records)
    assert known.pop("sha256") == "8bb0cf6eb9b17d0f7d22b456f121257dc1254e1f01665370476383ea776df414"
    assert known == {
        "bytes": 7,
        "records": 3,
        "tokens": 8,
        "learned_tokens": 4,
        "finish_reasons": {"corpus": 1, "eos": 1, "stop": 1},
        "feature_errors": [3 + 3 + 2, 6 + 4],
    }


def test_records_are_found_across_shards_of_which_some_are_empty(tmp_path: Path) -> None:
    records = three()
    folder = folder_of(tmp_path, [[], records[:2], [], records[2:], []])
    assert len(folder) == 3
    assert folder.lengths.tolist() == [3, 1, 4]
    assert folder.prompts.tolist() == [0, 1, 3]
    assert folder.indices("train").tolist() == [0, 2]
    assert [folder.split_of(index) for index in range(3)] == ["train", "validation", "train"]
    for index, one in enumerate(records):
        found = folder.read(index)
        assert found.ids.tolist() == one.ids.tolist()
        assert found.loss_mask.tolist() == one.loss_mask.tolist()
        assert found.payload["full.log_p"].tolist() == one.payload["full.log_p"].tolist()
        assert found.meta == one.meta | {"seed": 7}


def test_states_are_read_for_every_token_and_rows_of_p_for_learned_ones(tmp_path: Path) -> None:
    records = [record(0, [4, 3, 2], [1, 2], WITH_STATES), record(2, [0, 1, 2, 3], [3], WITH_STATES)]
    found = folder_of(tmp_path, [records], WITH_STATES).read(1, layers=(0,))
    assert {name: rows.tolist() for name, rows in found.features.items()} == {
        "features.0.bits": [[200, 0], [201, 0], [202, 0], [203, 0]]
    }
    assert found.payload["full.log_p"].tolist() == [[-20, -20, 0, -20, -20]]


def test_a_manifest_adds_its_shards_up(tmp_path: Path) -> None:
    """The error of a layer is the root of the mean over tokens: sqrt((2 + 6) / (3 + 1)) and sqrt((12 + 4) / 4)."""
    first, second = record(0, [4, 3, 2], [1, 2], WITH_STATES), record(1, [1], [], WITH_STATES, finish_reason="eos")
    first.feature_errors, second.feature_errors = np.array([[1, 4], [1, 4], [0, 4]]), np.array([[6, 4]])
    writer = RecordWriter(RunFolder(tmp_path, "distill"), WITH_STATES)
    sizes = [writer.write(number, records).bytes for number, records in enumerate([[first], [], [second]])]
    target = SimpleNamespace(path="t", **dict.fromkeys(IDENTITIES, "0" * 64) | {"vocab_size": 5})
    manifest = writer.finish(3, target, None, ABOUT)  # type: ignore[arg-type]
    assert manifest["counts"] == {"bytes": sum(sizes), "records": 2, "tokens": 4, "learned_tokens": 2}
    assert manifest["finish_reasons"] == {"length": 1, "eos": 1}
    assert manifest["feature_errors"] == {"3": pytest.approx(2**0.5), "0": pytest.approx(2.0)}
    assert sizes == [(tmp_path / shard["file"]).stat().st_size for shard in manifest["shards"]]


def test_a_shard_of_an_earlier_run_is_kept_if_its_bytes_are_those_of_its_note(tmp_path: Path) -> None:
    writer = RecordWriter(RunFolder(tmp_path, "distill"), FULL)
    known = writer.write(0, three())
    assert writer.existing(0) == known
    assert writer.existing(1) is None
    file = tmp_path / known.file
    content = file.read_bytes()
    for damaged in (content[:-1], content[:-1] + bytes([content[-1] ^ 1])):
        file.write_bytes(damaged)
        assert writer.existing(0) is None


def test_bytes_a_token() -> None:
    """Two bytes of id and one of mask; 5 halves; two layers of 2 channels in bfloat16."""
    assert (FULL.unlearned_bytes_per_token, FULL.bytes_per_token) == (3, 3 + 10)
    assert (WITH_STATES.unlearned_bytes_per_token, WITH_STATES.bytes_per_token) == (3 + 8, 3 + 8 + 10)
    large = replace(FULL, store=["topk", "last_hidden"], vocab_size=70_000, topk=4)
    assert large.bytes_per_token == (3 + 1) + (4 * 3 + 6) + 2 * 4  # ids in three bytes, 12-bit codes, float32


def recorded(folder: Path, scheme: Scheme | None) -> RecordFolder:
    target = TargetConfig(path=str(folder / "target"), quantization=scheme)
    run(tiny_config(folder, f"records of {scheme}", target=target))
    return RecordFolder.open(folder / f"records of {scheme}", describe_model(target))


@pytest.mark.slow
def test_records_name_the_quantisation_and_fit_no_other(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    plain, rounded = recorded(tmp_path, None), recorded(tmp_path, "int8")
    assert (plain.manifest.target.quantization, rounded.manifest.target.quantization) == (None, "int8")
    assert plain.manifest.target.fingerprint == rounded.manifest.target.fingerprint
    (kind, *_), path = str(rounded.manifest.target.weights).split(":"), str(tmp_path / "target")
    assert kind == "torchao-int8"
    schemes: tuple[tuple[RecordFolder, Scheme | None, str], ...] = (
        (plain, "int8", "with quantization None, .* has int8"),
        (rounded, None, "with quantization int8, .* has None: .* rounded otherwise"),
        (rounded, "int8_dynamic", "with quantization int8, .* has int8_dynamic"),
    )
    for records, scheme, words in schemes:
        with pytest.raises(InputError, match=words):
            RecordFolder.open(records.path, describe_model(ModelConfig(path=path, quantization=scheme)))


def test_each_runtime_has_words_of_its_own() -> None:
    assert build(TargetConfig, {"path": "t", "quantization": "int4"}).quantization == "int4"
    assert build(TargetConfig, {"path": "t", "runtime": "vllm", "quantization": "fp8"}).quantization == "fp8"
    with pytest.raises(ConfigError, match="use one of int8, int4, int8_dynamic, or set target.runtime=vllm"):
        build(TargetConfig, {"path": "t", "quantization": "fp8"})
