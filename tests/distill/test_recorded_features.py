"""Hidden states from a run to a batch, and texts of one run scored again by another."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from decode.common.checked_json import read_json, write_json
from decode.common.errors import ConfigError, InputError
from distill.config import (
    DataConfig,
    DistillConfig,
    FeatureCodeName,
    FeatureConfig,
    PromptConfig,
    RecordsConfig,
    TargetConfig,
)
from distill.records.feature_fitting import CODE_FILE
from distill.records.record_folder import RecordFolder
from distill.sequences import record_sequences
from distill.stage import run
from tests.commands import built
from tests.distill.runs import LAYERS, check_alike, kept, shard_files, tiny_config
from tests.tiny import save_tiny_target, tiny_tokenizer
from train.batches import PackedSource

CODES: list[FeatureCodeName] = ["bf16", "int8", "pca"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of every code, and one without hidden states."""
    folder = tmp_path_factory.mktemp("features")
    run(tiny_config(folder, "none"))
    for code in CODES:
        run(tiny_config(folder, code, records=kept(code)))
    return folder


def again(folder: Path, source: str, output: str, **fields: object) -> DistillConfig:
    """A run that scores the texts in `source` again."""
    own = {
        "target": TargetConfig(path=str(folder / "target")),
        "responses": "records",
        "from_records": str(folder / source),
        "batch_size": 3,
        "output_dir": str(folder / output),
    }
    return DistillConfig(**own | fields)  # type: ignore[arg-type]


def exact(folder: Path, ids: np.ndarray) -> torch.Tensor:  # (T, layers, d)
    model = AutoModelForCausalLM.from_pretrained(folder / "target").eval()
    with torch.no_grad():
        states = model(torch.from_numpy(ids)[None], output_hidden_states=True).hidden_states
    return torch.stack([states[layer][0] for layer in LAYERS], 1)  # the last of transformers' states is the normed one


@pytest.mark.parametrize(("code", "error"), [("bf16", 0.004), ("int8", 0.03), ("pca", 0.9)])
def test_every_token_has_the_states_of_the_target(folder: Path, code: FeatureCodeName, error: float) -> None:
    records = RecordFolder.open(folder / code)
    source = record_sequences(records, "train", 64, layers=LAYERS)
    sequence, other = source[0], source[3]
    states = source.features([(sequence, 1, 4), (other, 0, 0)], (2, 20), LAYERS)
    assert states is not None
    assert states.dtype == torch.bfloat16
    assert states.shape == (2, 20, len(LAYERS), 32)
    length = len(sequence.ids)
    wanted = exact(folder, sequence.ids)
    found = states[1, 4 : 4 + length].float()
    gaps = (found - wanted).square().sum(-1) / wanted.square().sum(-1)
    assert gaps.mean().sqrt() < error
    assert not states[1, :4].any()
    assert not states[1, 4 + length :].any()
    some = source.features([(sequence, 0, 0)], (1, length), [-1, 0])
    assert some is not None
    torch.testing.assert_close(some[0].float(), found[:, [2, 0]], rtol=1e-2, atol=1e-2)
    assert source.features([(sequence, 0, 0)], (1, length), ()) is None
    told = records.manifest.feature_errors
    assert list(told) == ["0", "1", "-1"]
    assert 0 < max(told.values()) < error


def test_bf16_is_the_state_of_the_recording_pass_to_the_bit(folder: Path) -> None:
    """last_hidden keeps it in float32."""
    records = RecordFolder.open(folder / "bf16")
    for index in range(len(records)):
        record = records.read(index)
        hidden = torch.from_numpy(record.payload["last_hidden.bits"]).view(torch.float32)
        bits = torch.from_numpy(record.features["features.-1.bits"])
        places = np.flatnonzero(record.loss_mask) - 1
        assert torch.equal(bits[places].view(torch.bfloat16), hidden.bfloat16())
        assert len(bits) == len(record.ids)


def test_hidden_states_change_neither_texts_nor_distributions(folder: Path) -> None:
    plain, more = (RecordFolder.open(folder / name) for name in ("none", "pca"))
    for index in range(len(plain)):
        before, after = plain.read(index), more.read(index)
        assert (before.ids == after.ids).all()
        assert all((rows == after.payload[name]).all() for name, rows in before.payload.items())


def test_a_batch_brings_the_layers_that_were_asked_for(folder: Path) -> None:
    source = record_sequences(RecordFolder.open(folder / "int8"), "train", 9, layers=(1, -1))
    packed = PackedSource.of(source, 32, seed=0, layers=(-1, 1))
    batch = packed.batch([0, 1])
    assert batch.features is not None
    assert batch.features.shape == (2, 32, 2, 32)
    assert (batch.features.abs().sum((2, 3)) > 0).tolist() == (batch.document >= 0).tolist()
    first = source[packed.rows[1][0]]
    alone = source.features([(first, 0, 0)], (1, len(first.ids)), (-1, 1))
    assert alone is not None
    assert len(first.ids) == 9
    assert torch.equal(batch.features[1, :9], alone[0])
    assert PackedSource.of(source, 32, seed=0).batch([0]).features is None


@pytest.mark.parametrize("code", CODES)
def test_texts_scored_again_give_what_their_writing_gave(folder: Path, code: FeatureCodeName) -> None:
    run(again(folder, "none", f"again_{code}", records=kept(code)))
    check_alike(folder / f"again_{code}", folder / code)
    ours, theirs = (read_json(folder / name / "manifest.json") for name in (f"again_{code}", code))
    assert (ours["code_file"] is None) == (theirs["code_file"] is None)
    assert ours["config"]["data"] == theirs["config"]["data"]  # by which other stages know what was held out
    assert ours["responses"] == "target"
    assert ours["from_records"]["path"] == str(folder / "none")
    assert len(RecordFolder.open(folder / f"again_{code}")) == len(RecordFolder.open(folder / code))


def test_scoring_again_can_be_killed_and_plans_first(folder: Path, capsys: pytest.CaptureFixture) -> None:
    config = again(folder, "none", "half", records=kept("pca"), resume="auto")
    run(config)
    shutil.copytree(folder / "half", folder / "whole")
    for name in ("manifest.json", "shards/shard-00001.json", "shards/shard-00002.safetensors", CODE_FILE):
        (folder / "half" / name).unlink()
    run(config)
    assert shard_files(folder / "half") == shard_files(folder / "whole")
    config = again(folder, "none", "planned", records=kept("pca"), plan=True, show=1)
    run(config)
    told = capsys.readouterr().out
    assert not Path(config.output_dir).exists()
    assert "prompts               10 train, 3 validation" in told
    assert "pca features of 3 layers 18 of every token, text 3)" in told
    assert "in 4 shards" in told
    assert told.startswith("--- corpus.jsonl:")


def test_shards_of_another_code_are_written_again(folder: Path) -> None:
    shutil.copytree(folder / "int8", folder / "recoded")
    (folder / "recoded" / "manifest.json").unlink()
    shards = folder / "recoded" / "shards"
    for note in shards.glob("*.json"):
        write_json(note, read_json(note) | {"code_file": {"file": CODE_FILE, "sha256": "another"}})
    for shard in shards.glob("*.safetensors"):
        os.utime(shard, (0, 0))
    run(tiny_config(folder, "recoded", records=kept("int8"), resume="auto"))
    assert shard_files(folder / "recoded") == shard_files(folder / "int8")
    assert all(shard.stat().st_mtime > 0 for shard in shards.glob("*.safetensors"))


def test_conversations_without_a_record_leave_their_shards_as_they_are(tmp_path: Path) -> None:
    """Shards hold prompts by their number, of which some have no record."""
    save_tiny_target(tmp_path / "target")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "target")
    contents = [f"{number}" * (200 if number % 3 else 4) for number in range(1, 30)]
    lines = [json.dumps({"messages": [{"role": "user", "content": content}]}) for content in contents]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    data = DataConfig(name="jsonl", path=str(tmp_path / "chat.jsonl"), validation_share=0.1, heldout_share=0.0)
    fields = {"data": data, "prompts": PromptConfig(count=20, validation_count=0), "records": kept("bf16")}
    run(tiny_config(tmp_path, **fields))
    records = RecordFolder.open(tmp_path / "records")
    assert len(records) < 20
    run(again(tmp_path, "records", "again", records=kept("bf16")))
    check_alike(tmp_path / "again", tmp_path / "records")


def test_a_folder_without_the_layers_names_the_remedy(folder: Path) -> None:
    records = RecordFolder.open(folder / "bf16")
    with pytest.raises(InputError, match=r"holds the hidden states \[0, 1, -1\], and the draft reads \[0, 2\]") as told:
        record_sequences(records, "train", 64, layers=(0, 2))
    assert "records.features.layers=[0,1,-1,2]" in str(told.value)
    assert "records.topk=5" in str(told.value)  # p is kept as it was
    with pytest.raises(InputError, match="of no layer.*target_source=live"):
        record_sequences(RecordFolder.open(folder / "none"), "train", 64, layers=(0,))


@pytest.mark.parametrize("there", ["none", "int8"])
def test_the_command_that_is_named_writes_what_is_missing(folder: Path, tmp_path: Path, there: str) -> None:
    """It used to leave out the target, and to write into the default folder."""
    source = RecordFolder.open(shutil.copytree(folder / there, tmp_path / there))
    with pytest.raises(InputError) as told:
        record_sequences(source, "train", 64, layers=(2, -1))
    command, output_dir = re.findall(r"`(python -m distill .*)` and train with records=(\S+), or", str(told.value))[0]
    cfg = built("distill", shlex.split(command)[3:])
    assert isinstance(cfg, DistillConfig)
    run(cfg)
    found = RecordFolder.open(output_dir)
    store = record_sequences(found, "train", 64, layers=(2, -1)).store
    assert store is not None
    assert store.name == source.layout.store[0]
    assert found.layout.store == source.layout.store
    assert (found.read(3, layers=()).ids == source.read(3, layers=()).ids).all()


def test_records_of_version_1_are_read_as_before(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "none", tmp_path / "old")
    manifest = read_json(tmp_path / "old" / "manifest.json")
    for name in ("code_file", "feature_errors"):
        del manifest[name]
    del manifest["layout"]["features"]
    write_json(tmp_path / "old" / "manifest.json", manifest | {"records_version": 1})
    old, new = RecordFolder.open(tmp_path / "old"), RecordFolder.open(folder / "none")
    assert old.layout == new.layout
    assert (old.read(3).ids == new.read(3).ids).all()


@pytest.mark.parametrize("damage", ["missing", "altered"])
def test_a_code_that_is_not_the_run_s_is_refused(folder: Path, tmp_path: Path, damage: str) -> None:
    shutil.copytree(folder / "int8", tmp_path / "copy")
    file = tmp_path / "copy" / CODE_FILE
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    with pytest.raises(InputError, match=f"{CODE_FILE} is missing" if damage == "missing" else "its bytes changed"):
        RecordFolder.open(tmp_path / "copy")


def test_what_a_target_cannot_give_is_refused_before_it_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.runtimes.transformers_runtime.load_model", None)
    with pytest.raises(InputError, match=r"hidden states \[0, 7\] are asked of .* has 2 layers"):
        run(tiny_config(folder, "refused", records=RecordsConfig(features=FeatureConfig([0, 7]))))
    features = FeatureConfig(LAYERS, "pca", components=96)
    few = tiny_config(folder, "refused", records=RecordsConfig(features=features), prompts=PromptConfig(6, 1, 1, 1))
    with pytest.raises(ConfigError, match="96 components of the hidden states cannot be fitted to 28 tokens"):
        run(few)
    gpt2 = GPT2LMHeadModel(
        GPT2Config(vocab_size=300, eos_token_id=None, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    )
    gpt2.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    with pytest.raises(InputError, match="gpt2 model, whose hidden states heads cannot be built on"):
        run(tiny_config(tmp_path, records=kept("bf16")))
    assert not (tmp_path / "records").exists()
    assert not (folder / "refused").exists()


def test_a_shard_is_as_big_as_its_hidden_states_make_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill.recording_plan.MAX_SHARD_BYTES", 10_000)
    own = {"store": ["head_tail"], "shard_size": 4}
    run(tiny_config(folder, "refused", plan=True, records=RecordsConfig(**own)))  # type: ignore[arg-type]
    own["features"] = FeatureConfig(LAYERS)
    with pytest.raises(ConfigError, match=r"use records.shard_size=\d or less, or keep less than .*hidden states"):
        run(tiny_config(folder, "refused", plan=True, records=RecordsConfig(**own)))  # type: ignore[arg-type]


def test_texts_of_another_target_are_refused(folder: Path, tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "target", seed=1)
    config = again(folder, "none", "refused", target=TargetConfig(path=str(tmp_path / "target")))
    with pytest.raises(InputError, match="was recorded from .* with fingerprint"):
        run(config)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"responses": "records"}, "needs from_records"),
        ({"from_records": "some/records"}, "set responses=records"),
        (
            {"responses": "records", "from_records": "some/records", "prompts": PromptConfig(count=3)},
            r"prompts\.\* was set",
        ),
    ],
)
def test_texts_come_from_one_place(fields: dict, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        DistillConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"layers": [1, 1]}, "names a layer twice"),
        ({"code": "int8"}, "keeps none"),
        ({"layers": [1], "components": 4}, "is for code=pca"),
        ({"layers": [1], "calibration_prompts": 0}, "calibration_prompts=0"),
        ({"layers": [1], "code": "pca", "components": 0}, "components=0"),
    ],
)
def test_bad_settings_of_features_are_refused(fields: dict, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        FeatureConfig(**fields)
