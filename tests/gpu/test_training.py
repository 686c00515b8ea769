"""Recording, training, export and measuring on a device: what they do there is what they do on the CPU."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from decode import generate, load_drafter
from decode import stage as decoding
from decode.common.typed_config import build
from decode.config import DecodeConfig, DrafterConfig, ModelConfig
from decode.drafters import unrolled
from decode.drafters.saved_head import HEADS
from decode.drafters.unrolled import Unrolled
from decode.forward.window import Window
from decode.sampling.config import SamplingConfig
from distill import stage as distilling
from distill.config import TargetConfig
from distill.records.record_folder import RecordFolder
from eval import stage as measuring
from eval.config import EvalConfig
from eval.modes.profile import calls, mode
from tests.decode.test_merged_attention import mixed, rows
from tests.distill.runs import kept, tiny_config
from tests.eval.compare.test_decoders import make_models as make_decoders
from tests.eval.compare.test_decoders import values as decoders
from tests.eval.test_report import make_models, values
from tests.gpu import DEVICE, ON_A_DEVICE, needs_cuda
from tests.train.toy import (
    command,
    data_settings,
    head_config,
    head_settings,
    metrics,
    save_target,
    tiny_settings,
    write_corpus,
    write_records,
)
from tests.train.toy import tiny_config as lm_config
from train import stage as training
from train.config import TrainConfig

pytestmark = [*ON_A_DEVICE, pytest.mark.usefixtures("uncaptured")]

ENGINE = "cpu" if DEVICE.type == "cpu" else "auto"
"""What `engine.device` takes: CUDA where there is one, or the CPU."""


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Training makes a process deterministic, which other tests of it were not written for."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # too late once a product has run; a run sets its own
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, texts, and records of it with all of p and hidden states."""
    folder = tmp_path_factory.mktemp("toys")
    target, corpus = save_target(folder / "target"), write_corpus(folder / "corpus")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("decode.forward.runner.CAPTURE_AFTER", 10**9)
        write_records(folder / "records", target, corpus, ["full", "last_hidden"], features={"layers": [0, 1, -1]})
    return folder


# recording


@pytest.mark.parametrize("code", [None, "bf16", "int8", "pca"])
def test_records_of_a_device_are_those_of_the_cpu(tmp_path: Path, code: Any) -> None:
    given: dict[str, Any] = {"records": kept(code)}
    if code == "pca":
        given["records"] = replace(kept(code), features=replace(kept(code).features, components=8))
    for output, place in (("ours", DEVICE.type), ("theirs", "cpu")):
        config = tiny_config(tmp_path, output, **given)
        distilling.run(replace(config, target=TargetConfig(path=config.target.path, device=place)))
    ours, theirs = (RecordFolder.open(tmp_path / output) for output in ("ours", "theirs"))
    assert len(ours) == len(theirs) > 0
    for a, b in ((ours.read(index), theirs.read(index)) for index in range(len(ours))):
        assert (a.ids == b.ids).all(), "another text"
        full = [record.payload["full.log_p"].astype(np.float32) for record in (a, b)]
        np.testing.assert_allclose(np.exp(full[0]), np.exp(full[1]), atol=2e-3)
        hidden = [torch.from_numpy(record.payload["last_hidden.bits"]).view(torch.float32) for record in (a, b)]
        torch.testing.assert_close(*hidden, rtol=1e-4, atol=1e-4)


# training

FAMILIES = ["lm", *HEADS]


def train(config: TrainConfig) -> None:
    """As in a process of its own: accelerate keeps device and precision of a process's first run."""
    AcceleratorState._reset_state(reset_partial_state=True)
    training.run(config)
    torch.use_deterministic_algorithms(False)


def config_of(folder: Path, output: Path, family: str, source: str, device: str, **more: Any) -> TrainConfig:
    engine = {"device": device, "precision": "fp32"} | more.pop("engine", {})
    given: dict[str, Any] = {"steps": 3, "log_every": 1, "validate_every": 3, "engine": engine} | more
    given |= {"records": str(folder / "records")} if source == "records" else {"data": data_settings(folder / "corpus")}
    given |= {"target_source": source}
    made = lm_config(output, folder / "target", **given) if family == "lm" else None
    return made or head_config(output, folder / "target", family, **given)


@pytest.mark.parametrize("source", ["records", "live"])
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_those_of_the_cpu_and_the_draft_is_served(
    folder: Path, tmp_path: Path, family: str, source: str
) -> None:
    found: dict[str, list[float]] = {}
    for device in ("cpu", ENGINE):
        output = tmp_path / device
        if not output.exists():
            train(config_of(folder, output, family, source, device))
        found[device] = [line["loss"] for line in metrics(output, "train")]
        found[device] += [line["loss"] for line in metrics(output, "validation")]
    assert len(found["cpu"]) >= 4
    assert found[ENGINE] == pytest.approx(found["cpu"], rel=1e-3)
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "target")
    model.to(DEVICE)
    drafter = load_drafter(tmp_path / ENGINE, target=model)
    assert drafter.device.type == DEVICE.type  # type: ignore[attr-defined]
    settings: dict[str, Any] = {"max_new_tokens": 16, "eos_token_id": (), "seed": 0}
    ids = torch.arange(10, 18, device=DEVICE)[None]
    drafted = generate(model, drafter, ids, num_draft_tokens=3, **settings)
    assert torch.equal(drafted.sequences, generate(model, None, ids, **settings).sequences)


@pytest.mark.parametrize("window", [None, Window(3, 0), Window(200, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_that_are_merged_are_those_of_the_dense_mask(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, window: Window | None
) -> None:
    """Outputs and gradients of packed rows, whose documents begin and end wherever; under the shortest window the last
    step sees no true slot."""
    monkeypatch.setattr(unrolled, "LONG", 1)
    packed = [[0] * 5 + [1] * 289 + [-1] * 10, [2] * 304, [3] * 100 + [4] * 1 + [5] * 203]
    document, positions = (one.to(DEVICE) for one in rows(packed))
    torch.manual_seed(0)
    leaves = [torch.randn(3, 8, 304, 64, device=DEVICE).to(dtype).requires_grad_() for _ in range(4)]
    assert unrolled.is_proved(DEVICE, dtype, 64, window is not None), "else the dense mask is compared with itself"
    weight = torch.randn(4, 3, 304, 4, 64, device=DEVICE) * (document >= 0)[None, :, :, None, None]
    found = []
    for dense in (False, True):
        given = [one.detach().float().requires_grad_() for one in leaves] if dense else leaves
        out = mixed(Unrolled(document, positions, window), 4, given, dense, 4).float()
        found.append([out * (weight != 0), *torch.autograd.grad((out * weight).sum(), given)])
    exact = 1e-4 if dtype == torch.float32 else 2e-2
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=0, atol=exact * float(theirs.detach().abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_trains_and_goes_on_from_a_checkpoint(folder: Path, tmp_path: Path, family: str) -> None:
    engine = {"precision": "bf16"}
    given: dict[str, Any] = {"optimizer": "auto", "checkpoint_every": 3, "engine": engine}
    train(config_of(folder, tmp_path / "out", family, "live", ENGINE, **given))
    config = config_of(folder, tmp_path / "more", family, "live", ENGINE, **given | {"steps": 5})
    train(replace(config, resume=str(tmp_path / "out")))
    first, all_of_it = (metrics(tmp_path / name, "train") for name in ("out", "more"))
    assert all_of_it[:3] == first  # seconds too: a run that began anew would have others
    assert np.isfinite([line["loss"] for line in all_of_it]).all()
    assert len(all_of_it) == 5
    weights = next(file for file in (tmp_path / "more").rglob("model.safetensors") if "checkpoints" not in str(file))
    assert all(one.isfinite().all() for one in load_file(weights).values())


@pytest.mark.parametrize("family", ["lm", "eagle3", "dspark"])
def test_the_command_trains(folder: Path, tmp_path: Path, family: str) -> None:
    """In a process of its own, which no product has run in and which is told of no workspace."""
    given: dict[str, Any] = {"steps": 2, "engine": {"device": ENGINE, "precision": "bf16"}}
    given |= {"records": str(folder / "records"), "validate_every": 2, "checkpoint_every": 2}
    settings = tiny_settings(tmp_path / "out", folder / "target", **given)
    if family != "lm":
        settings = head_settings(tmp_path / "out", folder / "target", family, **given)
    environment = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    done = subprocess.run(command(settings), env=environment, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]


@needs_cuda
def test_a_process_that_has_decoded_trains(folder: Path, tmp_path: Path) -> None:
    """cuBLAS reads its setting at the first product of a process: a script that decodes, then trains."""
    code = (
        "import torch; one = torch.ones(4, 4, device='cuda'); (one @ one).sum().item()\n"
        "from tests.gpu.test_training import config_of; from train.stage import run; from pathlib import Path\n"
        f"run(config_of(Path({str(folder)!r}), Path({str(tmp_path / 'out')!r}), 'lm', 'live', 'auto'))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    called = [sys.executable, "-c", code]
    done = subprocess.run(called, env=environment, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]


# measuring


def measured(config: dict[str, Any]) -> Path:
    target = {**config["target"], "device": DEVICE.type}
    measuring.run(build(EvalConfig, {**config, "target": target}))
    return Path(config["output_dir"])


def test_a_report(tmp_path: Path) -> None:
    make_models(tmp_path)
    found = json.loads((measured(values(tmp_path)) / "results.json").read_text())
    assert found["rows"]
    assert all(row["mismatches"] == 0 == row["uncached_mismatches"] for row in found["rows"])
    assert (found["environment"]["cuda_device"] is None) == (not torch.cuda.is_available())


def test_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode, "TURNS", 1)
    monkeypatch.setattr(calls, "COST_REPEATS", 1)
    make_models(tmp_path)
    config = copy.deepcopy(values(tmp_path))
    config |= {"mode": "profile", "drafts": {"one": config["drafts"]["distilled"]}, "prompts": {
        "file": str(tmp_path / "questions.jsonl")}, "profile": {"prompts": 3, "max_new_tokens": 12}}  # fmt: skip
    config["timing"] = {"batch_size": 2, "sweep": []}
    config["peers"] = {"num_assistant_tokens": []}
    config["lossless"] = {"prompts": 12, "tokens": 16, "other_prompts": 1, "other_tokens": 1}
    del config["curve_temperatures"]
    found = json.loads((measured(config) / "profile.json").read_text())
    assert len(found["arms"]) == 2


def test_a_comparison_of_decoders(tmp_path: Path) -> None:
    make_decoders(tmp_path)
    config = decoders(tmp_path)
    config["decoders"] = {**config["decoders"], "batch_sizes": [1], "batches_timed": [1], "arms": {
        "chain2": {"num_draft_tokens": 2}, "tree": {"tree": "2x1"}}, "fixed": ["chain2", "tree"]}  # fmt: skip
    found = json.loads((measured(config) / "results.json").read_text())
    assert len(found["cells"]) == 4


def test_the_decode_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`target.device=auto` finds the device; the text is the CPU's."""
    shown = []
    for device in ("cpu", "auto"):
        target = ModelConfig(path=str(folder / "target"), device=device)
        decoding.run(DecodeConfig(target, DrafterConfig(), SamplingConfig(max_new_tokens=12), prompt="def f(self)"))
        shown.append(capsys.readouterr().out.rpartition("\n\n")[0])  # figures of the run, seconds too, stand last
    assert len(shown[0]) > len("def f(self)")
    assert shown[0] == shown[1]
