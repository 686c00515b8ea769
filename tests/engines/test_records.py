"""Records made by vLLM's engine against those of transformers: the same texts, p and hidden states."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from decode.common.checked_json import read_json
from decode.common.errors import RunError
from decode.config import ModelConfig
from decode.models.describe import describe_model
from distill.config import ResponseDraftConfig, ResponseSampling, TargetConfig
from distill.records.config import FeatureConfig, RecordsConfig
from distill.records.record_folder import RecordFolder
from distill.runtimes import vllm_runtime
from distill.stage import run
from tests.distill.runs import shard_files, tiny_config
from tests.engines.environment import vllm_python
from tests.tiny import tiny_tokenizer
from tests.train.export.saved_heads import export, save_head

pytestmark = pytest.mark.engines
ROOT = Path(__file__).resolve().parents[2]
EAGER = Path(__file__).with_name("eager_worker.py")
SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the smallest that vLLM's attention has on a CPU
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}
LONG = {"rope_type": "longrope", "short_factor": [1.5] * 16, "long_factor": [4.0] * 16, "rope_theta": 1e4}
LONG |= {"original_max_position_embeddings": 64}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": EXPERTS | {"num_experts": 4, "moe_intermediate_size": 32},
    "gpt_oss": EXPERTS | {"num_local_experts": 4, "sliding_window": 16},
    "granite": {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "mistral": {"sliding_window": 16},
    "phi3": {"sliding_window": 16, "max_position_embeddings": 128, "rope_parameters": LONG},
    "qwen2": {"vocab_size": 304},  # transformers gives its tokenizer an entry more
    "qwen3": {},
}
"""Model type -> what it adds to SHAPE."""
RARELY = [pytest.param(kind, marks=pytest.mark.exhaustive) for kind in [*KINDS][2:]]
LAYERS = [3, 0, -1, 1]
"""The last raw state too, and out of order."""


def save_target(folder: Path, kind: str, layers: int = 3) -> None:
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    shape = SHAPE | KINDS[kind] | {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    shape["num_hidden_layers"] = layers
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape))
    for name, weight in model.named_parameters():  # else norms of ones hide which norm was used
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    with torch.no_grad():  # some texts are to end
        model.lm_head.weight[tokenizer.eos_token_id] *= 2
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def settings(runtime: str, folder: Path, **changes: Any) -> dict[str, Any]:
    kept = RecordsConfig(["head_tail", "full"], shard_size=5, features=FeatureConfig(list(LAYERS)))  # type: ignore[arg-type]
    target = TargetConfig(str(folder / "target"), runtime=runtime, vllm_python=vllm_python())  # type: ignore[arg-type]
    own = {"target": target, "records": kept, "sampling": ResponseSampling(0.0, max_new_tokens=12), "batch_size": 4}
    return own | changes


def recorded(folder: Path, output: str, runtime: str, **changes: Any) -> RecordFolder:
    config = tiny_config(folder, output, **settings(runtime, folder, **changes))
    run(config)
    return RecordFolder.open(config.output_dir, describe_model(ModelConfig(path=str(folder / "target"))))


def assert_agree(ours: RecordFolder, theirs: RecordFolder) -> None:
    """The same texts, and p and states but for rounding."""
    assert ours.layout == theirs.layout
    assert len(ours) == len(theirs) == 13
    for index in range(len(ours)):
        one, other = ours.read(index), theirs.read(index)
        assert one.ids.tolist() == other.ids.tolist()
        assert one.meta == other.meta
        assert one.loss_mask.tolist() == other.loss_mask.tolist()
        np.testing.assert_allclose(one.payload["full.log_p"], other.payload["full.log_p"], rtol=2e-3, atol=1e-2)
        head = one.payload["head_tail.ids"][:, :8] == other.payload["head_tail.ids"][:, :8]
        assert head.mean() > 0.98  # near-ties may change places
        for layer in LAYERS:
            states = [
                ours.feature_code.decode({n: torch.from_numpy(a) for n, a in read.features.items()}, [layer])
                for read in (one, other)
            ]
            torch.testing.assert_close(*states, rtol=0.02, atol=0.01)  # both rounded to bfloat16


@pytest.mark.parametrize("kind", [*[*KINDS][:2], *RARELY])
def test_records_of_both_runtimes_agree(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Llama with the engine as it is used, the others without the minute that compiling takes."""
    if kind != "llama":
        monkeypatch.setattr(vllm_runtime, "WORKER", EAGER)
    save_target(tmp_path / "target", kind)
    ours, theirs = (recorded(tmp_path, runtime, runtime) for runtime in ("transformers", "vllm"))
    assert_agree(ours, theirs)
    assert theirs.manifest.finish_reasons == ours.manifest.finish_reasons
    told = theirs.manifest.runtime
    assert told is not None
    assert (told.name, told.dtype) == ("vllm", "float32")
    assert told.version.startswith("0.")
    left = {file.name for file in (tmp_path / "vllm").iterdir()}
    assert not left & {"responses", "states"}


def save_lm(folder: Path, target: Path) -> None:
    """Near the target, so that some of its tokens are accepted."""
    model = AutoModelForCausalLM.from_pretrained(target)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * weight.std() * torch.randn_like(weight) if weight.dim() > 1 else 0
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


@pytest.mark.parametrize("family", ["lm", "eagle3"])
def test_the_engine_writes_with_a_draft_what_it_writes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """At temperature 0, where its noise does not matter."""
    monkeypatch.setattr(vllm_runtime, "WORKER", EAGER)
    target, draft = tmp_path / "target", tmp_path / "draft"
    save_target(target, "llama", layers=4)  # a head is handed the states between layers, and vLLM's read three
    if family == "lm":
        save_lm(draft, target)
    else:
        save_head(tmp_path / "head", target, "eagle3", taps=(1, 2, 3), head_dim=32, heads=2, kv_heads=1)
        export(tmp_path / "head", draft)
    asked = ResponseDraftConfig(str(draft), num_draft_tokens=3)
    recorded(tmp_path, "alone", "vllm")
    drafted = recorded(tmp_path, "drafted", "vllm", sampling=ResponseSampling(0.0, max_new_tokens=12, draft=asked))
    assert shard_files(tmp_path / "drafted") == shard_files(tmp_path / "alone")
    (saved,) = drafted.manifest.drafting
    told = drafted.manifest.runtime
    assert told is not None
    assert told.draft == saved.draft
    assert (saved.draft.family, saved.draft.path) == (family, str(draft))
    assert saved.tokens == sum(len(one.ids) - one.meta["prompt_end"] for one in map(drafted.read, range(13)))
    assert (1.2 if family == "lm" else 1.0) <= saved.tokens_per_pass <= 4


def test_at_temperature_1_a_run_with_a_draft_is_repeated_to_the_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which a run that goes on rests upon."""
    monkeypatch.setattr(vllm_runtime, "WORKER", EAGER)
    save_target(tmp_path / "target", "llama")
    save_lm(tmp_path / "draft", tmp_path / "target")
    asked = ResponseDraftConfig(str(tmp_path / "draft"), num_draft_tokens=3)
    for name in ("first", "second"):
        recorded(tmp_path, name, "vllm", sampling=ResponseSampling(max_new_tokens=12, draft=asked))
    assert shard_files(tmp_path / "first") == shard_files(tmp_path / "second")


def test_more_prompts_than_a_step_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's engine on a CPU died of a prompt that was cut between two steps, where it had a seed: 64 prompts of 128
    tokens were enough."""
    monkeypatch.setattr(vllm_runtime, "WORKER", EAGER)
    monkeypatch.setenv("TOKENS_A_STEP", "20")
    save_target(tmp_path / "target", "llama")
    made = recorded(tmp_path, "made", "vllm", sampling=ResponseSampling(max_new_tokens=12), batch_size=13)
    assert len(made) == 13


def test_devices_share_the_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on the CPU: both engines have processes of their own for them."""
    monkeypatch.setattr(vllm_runtime, "WORKER", EAGER)
    save_target(tmp_path / "target", "llama")
    ours = recorded(tmp_path, "ours", "transformers")
    target = {"runtime": "vllm", "vllm_python": vllm_python(), "tensor_parallel_size": 2}
    theirs = recorded(tmp_path, "theirs", "vllm", target=TargetConfig(str(tmp_path / "target"), **target))  # type: ignore[arg-type]
    assert_agree(ours, theirs)


def test_a_full_disk_ends_the_run_which_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a limit on the size of files, under which the engine writes none of states."""
    monkeypatch.setattr(vllm_runtime, "WORKER", EAGER)
    save_target(tmp_path / "target", "llama")
    ours = recorded(tmp_path, "ours", "transformers")
    monkeypatch.setenv("LARGEST_FILE", "1000")
    with pytest.raises(RunError, match=r"did not write the hidden states.*MB free.*resume=auto"):
        recorded(tmp_path, "theirs", "vllm", resume="auto")
    monkeypatch.delenv("LARGEST_FILE")
    assert_agree(ours, recorded(tmp_path, "theirs", "vllm", resume="auto"))


def start(folder: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.engines.test_records", str(folder)]
    return subprocess.Popen(command, cwd=ROOT, env=environment)


def sampled(folder: Path, output: str) -> None:
    """A run at temperature 1."""
    own = settings("vllm", folder, sampling=ResponseSampling(max_new_tokens=12), resume="auto")
    run(tiny_config(folder, output, **own))


def wait_for(folder: Path, pattern: str, process: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + 240
    while not list(folder.glob(pattern)):
        assert process.poll() is None
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_a_killed_run_ends_with_the_files_of_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed as it writes responses, and as it reads texts; at temperature 1, where noise has to be the same."""
    monkeypatch.setattr(vllm_runtime, "WORKER", EAGER)
    save_target(tmp_path / "target", "llama")
    sampled(tmp_path, "whole")
    for pattern in ("responses/*.safetensors", "shards/*.json"):
        process = start(tmp_path)
        wait_for(tmp_path / "killed", pattern, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (tmp_path / "killed/manifest.json").exists()
    assert start(tmp_path).wait() == 0
    assert shard_files(tmp_path / "killed") == shard_files(tmp_path / "whole")
    ours, theirs = (read_json(tmp_path / name / "manifest.json") for name in ("killed", "whole"))
    assert ours["shards"] == theirs["shards"]


if __name__ == "__main__":
    vllm_runtime.WORKER = EAGER
    sampled(Path(sys.argv[1]), "killed")
