"""Damaged folders: a mutation of what a run wrote is refused by the name of its file, or changes nothing of what is
read."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
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
from decode.models.load import ModelDescription, describe_model
from distill.config import DistillConfig
from distill.records.record_folder import RecordFolder, RecordWriter
from distill.records.record_shards import Record
from tests.mutations import Mutant, header_mutants, json_mutants
from tests.train.toy import data_settings, head_config, tiny_config, write_records
from train.checkpoint import check_whole, read_state
from train.metrics_log import read_metrics
from train.stage import run


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
AT_ONCE = 4  # of each in the default tier, from different places than the first of the whole


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


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.file)
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


@pytest.mark.parametrize("file", UNSUMMED)
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
