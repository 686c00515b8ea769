"""What lies on disk, number by number: folders of years ago are read by the codes that they were written with."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load

from decode.common.run_folder import RunFolder
from distill.records.record_folder import IDENTITIES, RecordWriter
from distill.records.record_shards import FINISH_REASONS, Record, shard_bytes, summary
from tests.distill.folders import FULL, WITH_STATES, folder_of, record

ABOUT = {
    "seed": 7,
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
