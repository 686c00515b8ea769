"""Damaged folders: a mutation, drawn from a seed, of what a run wrote is refused by the name of its file, or changes
nothing of what is read."""

from __future__ import annotations

import copy
import json
import pickle
import random
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from decode import load_drafter
from decode.common.errors import ConfigError, InputError, UserError
from decode.common.run_folder import open_run, sha256_file
from decode.common.typed_config import build
from decode.config import ModelConfig
from decode.drafters.provenance import read_provenance
from decode.drafters.saved_draft import describe_draft
from decode.models.describe import ModelDescription, describe_model
from distill.config import DistillConfig
from distill.records.record_folder import RecordFolder, RecordWriter
from distill.records.record_shards import Record
from tests.tiers import spread
from tests.train.toy import data_settings, head_config, tiny_config, write_records
from train.checkpoints.resuming import check_whole
from train.checkpoints.state import read_state
from train.metrics_log import read_metrics
from train.stage import run

Mutant = tuple[str, bytes]
"""What was done, and the file's new content."""
_DEEP = 3000  # levels: three times what Python's parser bears


def json_mutants(content: Any, seed: str, count: int) -> Iterator[Mutant]:
    """`count` damaged versions of a JSON object, every kind in turn, each at a place drawn from `seed`."""
    rng, names = random.Random(seed), [*_OF_VALUES, *_OF_FILES]
    for name in islice(cycle(names), count):
        if name in _OF_FILES:
            yield name, _OF_FILES[name](json.dumps(content), rng)
            continue
        damaged = copy.deepcopy(content)
        holder, key, where = rng.choice(list(_places(damaged)))
        told = _OF_VALUES[name](holder, key, rng)
        text = json.dumps(damaged) if told is None else json.dumps(damaged).replace(json.dumps(_MARK), told)
        yield f"{name} at {where}", text.encode()


def header_mutants(content: bytes, seed: str, count: int) -> Iterator[Mutant]:
    """`count` versions of a safetensors file with a damaged header."""
    rng = random.Random(seed)
    for name, damage in islice(cycle(_OF_HEADERS.items()), count):
        yield name, damage(content, rng)


def _places(value: Any, where: str = "") -> Iterator[tuple[Any, Any, str]]:
    """(list or object, key in it, path) of every value inside `value`."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key, f"{where}/{key}"
        yield from _places(value[key], f"{where}/{key}")


_MARK = "the place of what json.dumps cannot write"


def _set(new: Callable[[Any], Any]) -> Callable[[Any, Any, random.Random], None]:
    def damage(holder: Any, key: Any, rng: random.Random) -> None:
        holder[key] = new(holder[key])

    return damage


def _written(text: str) -> Callable[[Any, Any, random.Random], str]:
    def damage(holder: Any, key: Any, rng: random.Random) -> str:
        holder[key] = _MARK
        return text

    return damage


def _delete(holder: Any, key: Any, rng: random.Random) -> None:
    del holder[key]


def _twice(holder: Any, key: Any, rng: random.Random) -> str | None:
    """An entry of a list again, or a key of an object with another value."""
    if isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
        return None
    before, holder[key] = holder[key], _MARK
    return f"{json.dumps(before)}, {json.dumps(key)}: null"


def _other_type(value: Any) -> Any:
    if isinstance(value, bool):
        return "yes"
    return {str: 7, int: "7", float: "x", list: {"a": 1}, dict: [value], type(None): {}}[type(value)]


_OF_VALUES: dict[str, Callable[[Any, Any, random.Random], str | None]] = {
    "deleted": _delete,
    "null": _set(lambda _: None),
    "another type": _set(_other_type),
    "true": _set(lambda _: True),
    "negative": _set(lambda value: -1 if isinstance(value, int) else -2.5 if isinstance(value, float) else [-1]),
    "huge": _set(lambda value: 10**30 if isinstance(value, int) else 1e300),
    "a number of 5,000 digits": _written("9" * 5000),
    "empty": _set(lambda value: type(value)() if isinstance(value, str | list | dict) else ""),
    "nested deep": _written("[" * _DEEP + "]" * _DEEP),
    "nested": _set(lambda value: [[[[value]]]]),
    "a path with ..": _set(lambda value: f"../../{value}"),
    "an absolute path": _set(lambda value: f"/etc/{value}"),
    "NaN": _written("NaN"),
    "infinity": _written("1e999"),
    "half a surrogate pair": _written('"\\ud800"'),
    "twice": _twice,
    "a list in place of an object": _set(lambda value: list(value) if isinstance(value, dict) else [value]),
}


def _flipped(text: str, rng: random.Random) -> bytes:
    content = bytearray(text.encode())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(content)


_OF_FILES: dict[str, Callable[[str, random.Random], bytes]] = {
    "cut short": lambda text, rng: text.encode()[: rng.randrange(len(text))],
    "a list": lambda text, rng: f"[{text}]".encode(),
    "null as a whole": lambda text, rng: b"null",
    "an empty object": lambda text, rng: b"{}",
    "not UTF-8": lambda text, rng: b"\xff\xfe" + text.encode(),
    "a flipped bit": _flipped,
    "a byte-order mark": lambda text, rng: b"\xef\xbb\xbf" + text.encode(),
    "another file": lambda text, rng: rng.choice([b'{"model_type": "llama"}', b'{"stage": "train"}', b'"text"', b"1"]),
}


def _header(content: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _with_header(change: Callable[[dict[str, Any], str, random.Random], None]) -> Callable:
    def damage(content: bytes, rng: random.Random) -> bytes:
        header, rest = _header(content)
        change(header, rng.choice(sorted(set(header) - {"__metadata__"})), rng)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + rest

    return damage


def _flip_header(content: bytes, rng: random.Random) -> bytes:
    (length,) = struct.unpack("<Q", content[:8])
    at = rng.randrange(8 + length)
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]


def _rename(header: dict[str, Any], name: str, rng: random.Random) -> None:
    header[f"{name}x"] = header.pop(name)


def _swap(header: dict[str, Any], name: str, rng: random.Random) -> None:
    other = rng.choice(sorted(set(header) - {"__metadata__", name}))
    header[name], header[other] = header[other], header[name]


_TYPES = {"F32": "I32", "I64": "U64", "U8": "I8", "U16": "I16", "I32": "U32", "I16": "BF16", "I8": "U8", "F16": "I16"}
_OF_HEADERS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "a flipped bit": _flip_header,
    "another dtype": _with_header(lambda h, name, rng: h[name].update(dtype=_TYPES.get(h[name]["dtype"], "F64"))),
    "another shape": _with_header(lambda h, name, rng: h[name].update(shape=[1, *h[name]["shape"]])),
    "offsets outside": _with_header(lambda h, name, rng: h[name].update(data_offsets=[0, 1 << 40])),
    "a missing array": _with_header(lambda h, name, rng: h.pop(name)),
    "another name": _with_header(_rename),
    "swapped arrays": _with_header(_swap),
    "a negative size": _with_header(lambda h, name, rng: h[name].update(shape=[-1])),
    "nested deep": lambda content, rng: struct.pack("<Q", 2 * _DEEP) + b"[" * _DEEP + b"]" * _DEEP,
    "a huge header": lambda content, rng: struct.pack("<Q", 1 << 60) + content[8:],
    "cut short": lambda content, rng: content[: rng.randrange(len(content))],
    "empty": lambda content, rng: b"",
}


@dataclass(frozen=True)
class World:
    """What tiny runs wrote: records with coded hidden states, a head and a language model as drafts."""

    folder: Path
    model: PreTrainedModel
    distilled: DistillConfig

    @property
    def target(self) -> ModelDescription:
        """Read anew."""
        return describe_model(ModelConfig(path=str(self.folder / "target")))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, target: Path, corpus: Path) -> World:
    folder = tmp_path_factory.mktemp("world")
    shutil.copytree(target, folder / "target")
    features = {"layers": [0, 1, -1], "code": "int8", "calibration_prompts": 4}
    write_records(folder / "records", folder / "target", corpus, ["head_tail", "topk"], features)
    run(head_config(folder / "head", folder / "target", data=data_settings(corpus), steps=2, checkpoint_every=1))
    live: dict[str, Any] = {"data": data_settings(corpus), "target_source": "live", "steps": 1}
    run(tiny_config(folder / "lm", folder / "target", **live))
    distilled = build(DistillConfig, json.loads((folder / "records/run.json").read_text())["config"])
    return World(folder, AutoModelForCausalLM.from_pretrained(folder / "target"), distilled)


# What each kind of folder gives its readers: the same function that the stages call, and all that they are told.


def records(world: World) -> object:
    folder = RecordFolder.open(world.folder / "records", world.target)
    read = [_plain(folder.read(index)) for index in range(len(folder))]
    fitted = {name: tensor.numpy().tobytes() for name, tensor in folder.feature_code.fitted.items()}
    manifest = folder.manifest
    told = [manifest.config.data, manifest.config.records, manifest.config.batch_size, manifest.seed, manifest.counts]
    return folder.layout, folder.prompts.tolist(), folder.lengths.tolist(), read, fitted, told


def _plain(record: Record) -> object:
    arrays = {**record.payload, **record.features, "ids": record.ids, "mask": record.loss_mask}
    return record.meta, {name: (array.shape, array.tobytes()) for name, array in arrays.items()}


def resumed_records(world: World) -> object:
    folder = RecordFolder.open(world.folder / "records", world.target)
    with open_run(str(folder.path), "distill", world.distilled, resume="auto") as opened:
        writer = RecordWriter(opened, folder.layout)
        summary = writer.existing(1)  # None: it is written again
        return opened.is_finished, folder.manifest.shards[1] if summary is None else summary


def head(world: World) -> object:
    return _draft(world, "head")


def lm(world: World) -> object:
    return _draft(world, "lm")


def _draft(world: World, name: str) -> object:
    folder = world.folder / name / "model"
    described = describe_draft(str(folder), world.target)
    drafter: Any = load_drafter(folder, target=world.model)
    provenance = read_provenance(folder)
    assert provenance is not None
    weights = {key: tensor.numpy().tobytes() for key, tensor in drafter.state_dict().items()}
    config = drafter.config if name == "head" else drafter.model.config.to_dict()
    ends = None if name == "head" else drafter.model.generation_config.eos_token_id
    return described, weights, config, ends, provenance.family, provenance.data


def described_target(world: World) -> object:
    """The target by itself, and by the records that know its fingerprint."""
    RecordFolder.open(world.folder / "records", world.target)
    ends = GenerationConfig.from_pretrained(world.folder / "target").eos_token_id
    return ends, describe_draft(str(world.folder / "head/model"), world.target)


def checkpoint(world: World) -> object:
    newest = world.folder / "head/checkpoints/step_00000002"
    check_whole(newest)
    return read_state(newest).world_size, read_state(newest).state


def log(world: World) -> object:
    return read_metrics(world.folder / "head/metrics.jsonl")


@dataclass(frozen=True)
class Subject:
    """A file, and who reads it."""

    file: str
    view: Callable[[World], object]
    count: int


SUBJECTS = [
    Subject("records/manifest.json", records, 96),
    Subject("records/run.json", resumed_records, 48),
    Subject("records/shards/shard-00001.json", resumed_records, 24),
    Subject("records/shards/shard-00000.safetensors", records, 48),
    Subject("records/features.safetensors", records, 24),
    Subject("head/model/draftsmith.json", head, 48),
    Subject("head/model/config.json", head, 48),
    Subject("head/model/model.safetensors", head, 24),
    Subject("lm/model/draftsmith.json", lm, 24),
    Subject("lm/model/config.json", lm, 24),
    Subject("lm/model/generation_config.json", lm, 24),
    Subject("target/config.json", described_target, 24),
    Subject("target/generation_config.json", described_target, 24),
    Subject("head/checkpoints/step_00000002/state.json", checkpoint, 48),
]
AT_ONCE = 4  # of each that the default tier tries, from different places than the first of the whole


def mutants_of(subject: Subject, content: bytes, salt: str = "") -> Iterator[Mutant]:
    if subject.file.endswith(".safetensors"):
        return header_mutants(content, subject.file + salt, subject.count)
    return json_mutants(json.loads(content), subject.file + salt, subject.count)


def judge(subject: Subject, world: World, mutants: Iterator[Mutant]) -> int:
    """How many mutants were refused; the others must be harmless."""
    file = world.folder / subject.file
    content, whole, refused = file.read_bytes(), pickle.dumps(subject.view(world)), 0
    try:
        for name, damaged in mutants:
            file.write_bytes(damaged)
            found = outcome(subject, world, name)
            refused += found != whole
            assert found == whole or isinstance(found, UserError), f"{file.name}, {name}: accepted, and not the same"
    finally:
        file.write_bytes(content)
    assert pickle.dumps(subject.view(world)) == whole
    return refused


def outcome(subject: Subject, world: World, name: str) -> bytes | UserError:
    """All that the reader is told, or the refusal, which names the file; any other exception fails the test."""
    file = world.folder / subject.file
    try:
        return pickle.dumps(subject.view(world))
    except UserError as error:
        told, kind = str(error), ConfigError if subject.file.endswith("run.json") else InputError
        if isinstance(error, InputError | kind) and (file.name in told or str(file.parent) in told):
            return error
        raise AssertionError(f"{file.name}, {name}: {type(error).__name__}: {told}") from error
    except Exception as error:
        raise AssertionError(f"{file.name}, {name}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("subject", spread(5, SUBJECTS), ids=lambda subject: subject.file)
def test_a_sample_of_mutations_is_refused_or_harmless(world: World, subject: Subject) -> None:
    content = (world.folder / subject.file).read_bytes()
    every = list(mutants_of(subject, content, "sample"))
    refused = judge(subject, world, islice(every[:: max(1, len(every) // AT_ONCE)], AT_ONCE))
    assert refused or subject.file.endswith("shard-00001.json"), "a damaged summary alone is made anew"


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.file)
def test_500_mutations_are_refused_or_harmless(world: World, subject: Subject) -> None:
    assert sum(one.count for one in SUBJECTS) >= 500
    refused = judge(subject, world, mutants_of(subject, (world.folder / subject.file).read_bytes()))
    assert refused > subject.count / 3 or subject.file.endswith("shard-00001.json"), (
        "a damaged summary alone is made anew"
    )


def summed(world: World) -> None:
    """The manifest's checksums are those of the files as they are now."""
    file = world.folder / "records/manifest.json"
    manifest = json.loads(file.read_text())
    for known in [*manifest["shards"], manifest["code_file"]]:
        damaged = world.folder / "records" / known["file"]
        known |= {"bytes": max(1, damaged.stat().st_size), "sha256": sha256_file(damaged)}
    manifest["counts"]["bytes"] = sum(known["bytes"] for known in manifest["shards"])
    file.write_text(json.dumps(manifest))


def unsummed(world: World) -> None:
    """draftsmith.json and what is sealed itself know no checksum, as where the first versions wrote them."""
    for name in (DRAFT, STATE):
        content = json.loads((world.folder / name).read_text())
        content.pop("sha256", None)
        (world.folder / name).write_text(json.dumps(content))


DRAFT = "head/model/draftsmith.json"
STATE = "head/checkpoints/step_00000002/state.json"
UNSUMMED = {
    "records/shards/shard-00000.safetensors": summed,
    "records/features.safetensors": summed,
    "head/model/config.json": unsummed,
    "head/model/model.safetensors": unsummed,
    STATE: unsummed,
}


@pytest.mark.parametrize("file", spread(2, UNSUMMED))
def test_where_no_checksum_helps_every_refusal_is_still_ours(
    world: World, file: str, request: pytest.FixtureRequest
) -> None:
    """A valid value in place of another cannot be told then; what cannot be valid can, and nothing else is raised."""
    subject = next(one for one in SUBJECTS if one.file == file)
    kept = {path: path.read_bytes() for path in [*world.folder.rglob("*.json"), world.folder / file]}
    request.addfinalizer(lambda: [path.write_bytes(content) for path, content in kept.items()])
    unsummed(world) if UNSUMMED[file] is unsummed else None
    every = list(islice(mutants_of(subject, (world.folder / file).read_bytes(), "unsummed"), 24))
    refused = 0
    for name, damaged in every:
        (world.folder / file).write_bytes(damaged)
        summed(world) if UNSUMMED[file] is summed else None
        refused += isinstance(outcome(subject, world, name), UserError)
    assert refused > len(every) / 2


def test_a_damaged_manifest_ends_the_command_with_code_2(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(world.folder / "records", tmp_path / "records")
    manifest = tmp_path / "records/manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"layout": None}))
    given = {"target.path": world.folder / "target", "records": manifest.parent, "output_dir": tmp_path / "out"}
    arguments = ["sequence_length=32", *(f"{key}={value}" for key, value in given.items())]
    monkeypatch.setattr(sys, "argv", ["draftsmith-train", *arguments])
    monkeypatch.setattr("train.stage.load_model", None)
    with pytest.raises(SystemExit) as ended:
        import_module("train.__main__").main()
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert f"{manifest}: layout is None" in told
    assert "Copy the folder again" in told
    assert not (tmp_path / "out").exists()
