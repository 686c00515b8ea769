"""The vLLM runtime by proxy: a worker of a few lines in place of the engine, and what is refused before any is asked."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from decode.common.checked_json import read_json
from decode.common.errors import ConfigError, InputError, RunError
from decode.common.typed_config import build
from decode.models.load import describe_model
from distill import __main__ as cli
from distill.config import DistillConfig, FeatureConfig, RecordsConfig, TargetConfig
from distill.records.record_folder import RecordFolder
from distill.runtimes import vllm_runtime
from distill.runtimes.chosen import open_runtime
from distill.stage import run
from tests.distill.runs import tiny_config
from tests.tiny import save_tiny_target, tiny_tokenizer

WORKER = """
import json, pathlib, sys
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
settings = json.loads(sys.stdin.readline())
here = pathlib.Path(__file__).parent
def note(content):
    with (here / "asked.jsonl").open("a") as file:
        file.write(json.dumps(content) + chr(10))
note(settings)
model = AutoModelForCausalLM.from_pretrained(settings["target"]).eval()
raw = {}
model.model.layers[-1].register_forward_hook(lambda m, given, made: raw.update(last=made[0] if isinstance(made, tuple) else made))
print(json.dumps({"ready": "0.fake"}), flush=True)
def states(ids, number):
    with torch.no_grad():
        found = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    last = len(model.model.layers)
    layers = settings["states"]["layers"]
    kept = torch.stack([raw["last"][0] if i == last else found[i][0] for i in layers], 1)
    folder = pathlib.Path(settings["states"]["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    told = ids[::-1] if (here / "other_text").exists() else ids
    save_file({"hidden_states": kept.contiguous(), "token_ids": torch.tensor(told)}, folder / f"{number}.safetensors")
    return str(folder / f"{number}.safetensors")
for line in sys.stdin:
    call = json.loads(line)
    note({name: call[name] for name in call if name != "rows"})
    if (here / "die").exists():
        sys.exit("no room on the device")
    if "rows" in call:
        print(json.dumps({"files": [states(ids, n) for n, ids in enumerate(call["rows"])]}), flush=True)
        continue
    new = [[(seed + n) % 200 + 5 for n in range(call["max_new_tokens"])] for seed in call["seeds"]]
    new[0] = new[0][:2] + call["eos"]
    reasons = ["stop"] + ["length"] * (len(new) - 1)
    print(json.dumps({"new_ids": new, "finish_reasons": reasons}), flush=True)
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the proxy, which notes there what it is asked."""
    folder = tmp_path / "worker"
    folder.mkdir()
    (folder / "worker.py").write_text(WORKER)
    monkeypatch.setattr(vllm_runtime, "WORKER", folder / "worker.py")
    monkeypatch.setattr(vllm_runtime, "check_python", lambda *_: "0.fake")
    return folder


def config_of(folder: Path, output: str = "records", **changes: object) -> DistillConfig:
    features = FeatureConfig([2, -1, 0])
    own = {
        "target": TargetConfig(str(folder / "target"), runtime="vllm", vllm_python=sys.executable),
        "records": RecordsConfig(["head_tail", "full"], shard_size=5, features=features),
    }
    return tiny_config(folder, output, **own | changes)


def asked(worker: Path) -> list[dict]:
    return [json.loads(line) for line in (worker / "asked.jsonl").read_text().splitlines()]


def test_texts_p_and_states_are_those_that_transformers_gives_of_them(tmp_path: Path, worker: Path) -> None:
    """The proxy runs the very model, so all that is done around an engine has to come out as if it were not there."""
    config = config_of(tmp_path)
    run(config)
    again = {"responses": "records", "from_records": config.output_dir, "data": None, "prompts": None, "sampling": None}
    plain = {name: value for name, value in again.items() if value is not None}
    usual = DistillConfig(
        target=TargetConfig(str(tmp_path / "target")),
        records=config.records,
        batch_size=3,
        output_dir=str(tmp_path / "here"),
        **plain,
    )
    run(usual)
    target = describe_model(TargetConfig(str(tmp_path / "target")))
    ours, theirs = (RecordFolder.open(tmp_path / name, target) for name in ("records", "here"))
    assert len(ours) == 13
    for index in range(len(ours)):
        one, other = ours.read(index), theirs.read(index)
        assert one.ids.tolist() == other.ids.tolist()
        np.testing.assert_allclose(one.payload["full.log_p"], other.payload["full.log_p"], atol=2e-2, rtol=2e-3)
        for name, bits in one.features.items():
            assert np.abs(bits.astype(np.int32) - other.features[name]).max() <= 1, name  # one place of bfloat16
    assert {ours.read(index).meta["finish_reason"] for index in range(13)} == {"eos", "length"}
    told = ours.manifest.runtime
    assert told is not None
    assert (told.name, told.version, told.dtype) == ("vllm", "0.fake", "float32")
    assert ours.manifest.target.weights is None
    assert theirs.manifest.runtime is not None
    assert theirs.manifest.runtime.name == "transformers"


def test_one_engine_writes_everything_then_another_reads(tmp_path: Path, worker: Path) -> None:
    run(config_of(tmp_path))
    lines = asked(worker)
    starts = [index for index, line in enumerate(lines) if "target" in line]
    assert len(starts) == 2
    writing, reading = (lines[index] for index in starts)
    assert (writing["max_model_len"], writing["max_num_seqs"], writing["dtype"]) == (14, 3, "float32")
    assert "states" not in writing
    assert reading["max_model_len"] == 15  # a token behind the longest text, thrown away
    assert reading["states"]["layers"] == [0, 2]
    calls = lines[1 : starts[1]]
    assert [len(call["prompts"]) for call in calls] == [5, 5, 3]
    assert all(call["eos"] == [tiny_tokenizer().eos_token_id] for call in calls)
    assert len({seed for call in calls for seed in call["seeds"]}) == 13
    assert not {file.name for file in (tmp_path / "records").iterdir()} & {"responses", "states"}


def test_what_was_written_before_an_engine_died_is_not_asked_again(tmp_path: Path, worker: Path) -> None:
    """It dies as it reads; the run that goes on writes nothing anew, and ends as one that was not interrupted."""
    broken, whole = config_of(tmp_path, resume="auto"), config_of(tmp_path, "whole")
    (worker / "other_text").touch()
    with pytest.raises(RunError, match="would be that of another text"):
        run(broken)
    (worker / "other_text").unlink()
    (worker / "asked.jsonl").unlink()
    run(broken)
    assert not [line for line in asked(worker) if "prompts" in line]
    run(whole)
    ours, theirs = (read_json(tmp_path / name / "manifest.json") for name in ("records", "whole"))
    assert ours["shards"] == theirs["shards"]


def test_an_engine_that_dies_is_quoted(tmp_path: Path, worker: Path) -> None:
    (worker / "die").touch()
    with pytest.raises(RunError, match="no room on the device"):
        run(config_of(tmp_path))


def test_records_of_two_engines_are_not_mixed(tmp_path: Path, worker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, resume="auto")
    (worker / "die").touch()
    with pytest.raises(RunError):
        run(config)
    monkeypatch.setattr(vllm_runtime, "check_python", lambda *_: "0.other")
    with pytest.raises(InputError, match=r"0\.fake.*0\.other.*records of both would be mixed"):
        run(config)


@pytest.mark.parametrize("given", ["dtype: float64", "device: cpu", "device_map: auto", "attn_implementation: eager"])
def test_settings_of_transformers_alone_are_refused(given: str) -> None:
    name, _, value = given.partition(": ")
    with pytest.raises(ConfigError, match=rf"target\.{name}={value}.*target\.runtime=transformers"):
        build(TargetConfig, {"path": "some/target", "runtime": "vllm", name: value})
    build(TargetConfig, {"path": "some/target", name: value})


def quantised(folder: Path) -> None:
    _changed(save_tiny_target(folder), {"quantization_config": {"quant_method": "gptq", "bits": 4}})


def latent(folder: Path) -> None:
    _changed(save_tiny_target(folder), {"kv_lora_rank": 16})


def qwen2(folder: Path) -> None:
    shape = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    Qwen2ForCausalLM(Qwen2Config(**shape, num_attention_heads=2, num_key_value_heads=2)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def _changed(folder: Path, fields: dict) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(read_json(file) | fields))


@pytest.mark.parametrize(
    ("make", "said"),
    [(quantised, "is quantised"), (latent, r"latent attention \(MLA\)"), (qwen2, "qwen2 model.*llama and qwen3")],
)
def test_targets_that_the_engine_does_not_take_are_refused(
    tmp_path: Path, worker: Path, make: Callable[[Path], None], said: str
) -> None:
    make(tmp_path / "target")
    with pytest.raises(InputError, match=said):
        run(config_of(tmp_path))
    assert not (tmp_path / "records").exists()
    assert not (worker / "asked.jsonl").exists()


def test_several_processes_are_refused(tmp_path: Path, worker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = config_of(tmp_path)
    with pytest.raises(ConfigError, match="2 processes"):
        open_runtime(config, describe_model(config.target))


def test_a_missing_environment_ends_with_2_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_target(tmp_path / "target")
    arguments = [f"target.path={tmp_path / 'target'}", "target.runtime=vllm", "target.vllm_python=nowhere/bin/python"]
    monkeypatch.setattr(sys, "argv", ["distill", *arguments, f"output_dir={tmp_path / 'records'}"])
    with pytest.raises(SystemExit) as error:
        cli.main()
    assert error.value.code == 2
    assert "scripts/vllm_env.sh" in capsys.readouterr().err
    assert not (tmp_path / "records").exists()
