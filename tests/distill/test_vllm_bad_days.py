"""Engines that die, hang or find the disk full, by proxy (`vllm_proxy`)."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.torch import load

from decode.common.checked_json import read_json
from decode.common.errors import ConfigError, RunError
from decode.models.describe import describe_model
from distill.config import PromptConfig
from distill.engines.inside_vllm.vllm_worker import read
from distill.records.distribution_stores import Layout
from distill.records.feature_codes import CODES, FeatureCode, FeatureLayout
from distill.records.feature_fitting import calibrate
from distill.records.record_shards import Record
from distill.runtimes.engine_runtime import EnginePasses
from distill.runtimes.states_check import check_engine
from distill.runtimes.vllm_runtime import VllmRuntime
from distill.scorer import Scorer
from distill.stage import run
from tests.distill import vllm_proxy
from tests.distill.engine_runs import config_of, opened, proxy


def test_an_engine_that_dies_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = proxy(tmp_path, monkeypatch)
    config = config_of(tmp_path)
    (worker / "die").touch()
    with pytest.raises(RunError, match="no room on the device"):
        run(config)


def test_an_engine_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = proxy(tmp_path, monkeypatch)
    config = config_of(tmp_path)
    config.target.timeout = 2.0
    (worker / "hang").touch()
    began = time.monotonic()
    with pytest.raises(RunError, match=r"no sign of life for 2 s \(target\.timeout\).*resume=auto"):
        run(config)
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_an_engine_that_takes_its_time_and_lives_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = proxy(tmp_path, monkeypatch)
    config = config_of(tmp_path, prompts=PromptConfig(tokens=6, count=2, validation_count=0))
    config.target.timeout = 2.0
    (worker / "slow").touch()  # 2.5 s a call of the run
    run(config)
    assert len(opened(tmp_path)) == 2


def test_a_full_disk_is_told_with_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = proxy(tmp_path, monkeypatch)
    broken, whole = config_of(tmp_path, resume="auto"), config_of(tmp_path, "whole")
    (worker / "full").touch()
    with pytest.raises(RunError, match=r"did not write the hidden states.*records/states.*MB free.*resume=auto"):
        run(broken)
    (worker / "full").unlink()
    run(broken)
    run(whole)
    ours, theirs = (read_json(tmp_path / name / "manifest.json") for name in ("records", "whole"))
    assert ours["shards"] == theirs["shards"]


def test_a_disk_without_room_for_states_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = proxy(tmp_path, monkeypatch)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=200_000))
    with pytest.raises(ConfigError, match=r"needs 0\.00 GB, and its disk has 0\.00 GB free"):
        run(config_of(tmp_path, batch_size=400))  # 400 texts of 14 tokens, 2 layers of 32 channels of 4 bytes
    assert not (worker / "asked.jsonl").exists()
    run(config_of(tmp_path))


SAID = {
    "zeros": "all zero at 14 of 14 tokens",
    "zeros of one layer": "layer 2 that are all zero",
    "zeros of a block": "all zero at 7 of 14 tokens",
    "nan": "not finite",
    "constant": "the same at different tokens",
    "half": r"\(14, 3, 32\) in float16, and \(14, 3, 32\) in float32",
    "one layer less": r"\(14, 2, 32\) in float32, and \(14, 3, 32\) in float32",
    "one layer twice": "the same for the layers 0 and 1",
    "turned": "not the embeddings",
    "a token late": "not the embeddings",
    "other weights": "not the embeddings",
    "another token": r"drew token \d+ .* token \d+ is likelier",
}
OF_P = {kind: r"differ by .* \(root mean square over 13 tokens" for kind in ("turned", "a token late", "other weights")}
BEHIND = r"(.|\n)*target\.runtime=transformers"


def reading(folder: Path, monkeypatch: pytest.MonkeyPatch, layers: list[int]) -> tuple[EnginePasses, Path]:
    """Passes of an engine that runs, by proxy in this process, and the folder that tells its days."""
    worker, config = proxy(folder, monkeypatch), config_of(folder)
    monkeypatch.setattr(sys, "argv", [str(worker / "worker.py")])
    runtime = VllmRuntime(config, describe_model(config.target), "float32")
    runtime.longest = 14
    passes = EnginePasses(runtime, layers)
    settings = runtime._settings(passes.asked)
    engine = SimpleNamespace(call=lambda call: vllm_proxy.read(settings, call))
    runtime._running = (("read", *passes.asked), engine)  # type: ignore[assignment]
    return passes, worker


@pytest.mark.parametrize(
    ("kind", "layers", "said"),
    [*((kind, [1, 0], said) for kind, said in SAID.items()), *((kind, [1], said) for kind, said in OF_P.items())],
)
def test_states_that_are_none_of_the_target_s_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, layers: list[int], said: str
) -> None:
    """Records of zeros train a draft that looks sound until it is served (vLLM pull request 46301)."""
    passes, worker = reading(tmp_path, monkeypatch, layers)
    check_engine(passes, [*range(5, 19)])
    (worker / "bad").write_text(kind)
    with pytest.raises(ConfigError, match=said + BEHIND):
        check_engine(passes, [*range(5, 19)])


def test_every_kind_of_bad_states_is_tried() -> None:
    assert set(SAID) == {*vllm_proxy.BAD, "another token"}


@pytest.mark.parametrize("kind", ["zeros of a block", "nan", "a token late"])
def test_states_that_turn_bad_behind_the_fixed_text_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    passes, worker = reading(tmp_path, monkeypatch, [1])
    text = Record(np.arange(5, 19), np.ones(14, bool), {})
    (one,) = passes.over([text])
    assert one.hidden.shape == (1, 14, 32)
    (worker / "bad").write_text(kind)
    with pytest.raises(RunError, match=(SAID | {"a token late": "drew token"})[kind] + BEHIND):
        list(passes.over([text]))


def test_nothing_is_recorded_of_an_engine_that_gives_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = proxy(tmp_path, monkeypatch)
    config = config_of(tmp_path, resume="auto")
    (worker / "bad").write_text("zeros")
    with pytest.raises(ConfigError, match=SAID["zeros"] + BEHIND):
        run(config)
    assert not [*(tmp_path / "records").glob("*.safetensors")]
    (worker / "bad").unlink()
    run(config)
    assert len(opened(tmp_path)) == 13


def test_a_card_that_an_engine_fills_is_given_a_part_of_the_states_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded batches of long texts, three times over, do not fit beside an engine that holds nine tenths of a card. Of
    whatever size the parts are, the bits are the same."""
    passes, _ = reading(tmp_path, monkeypatch, [2, -1, 0])
    layout = Layout(["last_hidden", "head_tail"], 300, 32, "float32", 4, 2, 0, FeatureLayout([2, -1, 0], 32, "int8", 0))
    texts = [np.arange(5, 5 + length) for length in (30, 9, 14)]
    code = load_fitted(layout, passes, texts)
    found = []
    for entries, batch_size in ((1 << 25, 3), (96, 3), (7 * 96, 1)):
        for module in ("distill.runtimes.engine_runtime", "distill.scorer"):
            monkeypatch.setattr(f"{module}.STATE_ENTRIES", entries)
        passes.batch_size, records = batch_size, [record_of(n, ids) for n, ids in enumerate(texts)]
        largest = given_to(passes, code, monkeypatch)
        Scorer(passes, layout, 0, code).score(records)
        assert max(largest) <= entries
        found.append([one.payload | one.features for one in records])
    for other in found[1:]:
        for ours, theirs in zip(found[0], other, strict=True):
            assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def record_of(number: int, ids: np.ndarray) -> Record:
    return Record(ids, np.arange(len(ids)) > 3, {"document": "a", "prompt": number, "turn": 0})


def load_fitted(layout: Layout, passes: EnginePasses, texts: list[np.ndarray]) -> FeatureCode:
    assert layout.features is not None
    records = [record_of(n, ids) for n, ids in enumerate(texts)]
    tensors = load(calibrate(layout.features, records, passes))
    return CODES["int8"](layout.features, tensors)


def given_to(passes: EnginePasses, code: FeatureCode, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Entries of each tensor of states that goes to where the head lies, from now on."""
    sizes: list[int] = []
    norm = passes.runtime.ends.base_model.get_submodule("norm")
    forward, encode = type(norm).forward, type(code).encode
    monkeypatch.setattr(norm, "forward", lambda x: sizes.append(x.numel()) or forward(norm, x))
    monkeypatch.setattr(type(code), "encode", lambda self, x: sizes.append(x.numel()) or encode(self, x))
    monkeypatch.setattr(type(code), "to", lambda self, device: self)
    return sizes


def test_the_worker_tells_files_tokens_and_log_p(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the rows, whichever ends first."""
    asked: list[dict] = []
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **given: asked.append(given)))
    waiting: list[SimpleNamespace] = []

    def add(request: str, prompt: dict, params: object) -> None:
        ids, file = prompt["prompt_token_ids"], tmp_path / f"{request}.safetensors"
        Path(f"{file}.lock").touch()
        rows = [None, *({token: SimpleNamespace(logprob=-token / 10)} for token in ids[1:])]
        told = SimpleNamespace(token_ids=[ids[-1] + 1])
        waiting.append(
            SimpleNamespace(
                request_id=request, outputs=[told], kv_transfer_params={"hidden_states_path": str(file)},
                prompt_token_ids=ids, prompt_logprobs=rows,
            )
        )  # fmt: skip

    engine = SimpleNamespace(add_request=add, has_unfinished_requests=lambda: bool(waiting))
    for log_p in (False, True):
        answer = read(engine, lambda: [waiting.pop()], {"rows": [[3, 4, 5], [6, 7]], "log_p": log_p}, 8)
        assert answer["files"] == [str(tmp_path / f"8-{row}.safetensors") for row in (0, 1)]
        assert answer["next_ids"] == [6, 8]
        assert answer.get("log_p") == ([[-0.4, -0.5], [-0.7]] if log_p else None)
    assert ["prompt_logprobs" in given for given in asked] == [False, True]
