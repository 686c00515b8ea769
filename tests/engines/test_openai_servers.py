"""Records made by servers of OpenAI's protocol on loopback, vLLM's and llama.cpp's, against those of transformers."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from decode.common.errors import ConfigError
from decode.config import ModelConfig
from decode.models.describe import describe_model
from distill.config import DistillConfig, ResponseSampling, TargetConfig
from distill.objectives.target_distribution import SparseRows
from distill.records.config import RecordsConfig
from distill.records.record_folder import RecordFolder
from distill.stage import run
from tests.distill.runs import tiny_config
from tests.engines.environment import llamacpp_python
from tests.engines.test_records import save_target
from tests.engines.vllm_serving import KEY, Server

pytestmark = pytest.mark.engines
TOPK = 5
SERVER = Path(__file__).with_name("llamacpp_server.py")


def config_of(folder: Path, output: str, **changes: Any) -> DistillConfig:
    own = {
        "target": TargetConfig(str(folder / "target")),
        "records": RecordsConfig(["topk"], topk=TOPK, shard_size=5),
        "sampling": ResponseSampling(0.0, max_new_tokens=12),
        "data": replace(tiny_config(folder).data, learn_prompt=False),
        "batch_size": 4,
    }
    return tiny_config(folder, output, **own | changes)


def served(folder: Path, url: str, **fields: Any) -> TargetConfig:
    return TargetConfig(str(folder / "target"), runtime="openai", url=url, timeout=60.0, **fields)


def opened(folder: Path, output: str) -> RecordFolder:
    return RecordFolder.open(folder / output, describe_model(ModelConfig(path=str(folder / "target"))))


def assert_agree(ours: RecordFolder, theirs: RecordFolder) -> None:
    """The same texts, up to near-ties, and the same p but for rounding."""
    assert len(ours) == len(theirs) == 13
    assert set(theirs.manifest.finish_reasons) == {"eos", "length"}
    parted = 0
    for one, other in ((ours.read(index), theirs.read(index)) for index in range(13)):
        pairs = zip(one.ids.tolist(), other.ids.tolist(), strict=False)
        same = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        parted += same is not None
        if same is None:
            assert one.ids.tolist() == other.ids.tolist()
            assert one.meta == other.meta
            assert one.loss_mask.tolist() == other.loss_mask.tolist()
        start = one.meta["prompt_end"]
        rows = torch.arange((len(one.ids) if same is None else same + 1) - start)
        p, q = (
            folder.layout.store_named("topk").distribution(record.payload, rows, None)
            for folder, record in ((ours, one), (theirs, other))
        )
        assert isinstance(p, SparseRows)
        assert isinstance(q, SparseRows)
        np.testing.assert_allclose(p.log_p[rows].numpy(), q.log_p[rows].numpy(), atol=0.02)
        assert (p.ids[rows] == q.ids[rows]).float().mean() > 0.9  # near-ties may change places
        if same is not None:
            assert p.log_p[rows[-1], 0] - p.log_p[rows[-1], 1] < 0.03
    assert parted <= 2


def test_vllm_gives_the_records_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_target(tmp_path / "target", "llama")
    run(config_of(tmp_path, "ours"))
    server = Server(tmp_path / "target", tmp_path / "no_states", [])
    try:
        server.start(tmp_path / "log")
        with pytest.raises(ConfigError, match="asks for a key"):
            run(config_of(tmp_path, "refused", target=served(tmp_path, server.url)))
        monkeypatch.setenv("THE_KEY", KEY)
        target = served(tmp_path, server.url, key_variable="THE_KEY")
        run(config_of(tmp_path, "theirs", target=target))
        kept = RecordsConfig(["topk"], topk=64)
        with pytest.raises(ConfigError, match="records.topk=20"):
            run(config_of(tmp_path, "refused", target=target, records=kept))
    finally:
        server.kill()
    theirs = opened(tmp_path, "theirs")
    assert_agree(opened(tmp_path, "ours"), theirs)
    told = theirs.manifest.runtime
    assert told is not None
    assert told.server is not None
    assert told.version.startswith("vllm 0.")
    assert told.server.token_ids == "told"


def save_ascii_target(folder: Path) -> None:
    """One that, greedily, writes no part of a character: llama.cpp tells no ids of such tokens."""
    save_target(folder, "llama")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        for token in range(1, len(tokenizer)):
            if not tokenizer.decode([token]).isascii():
                model.lm_head.weight[token] = 0.0
    model.save_pretrained(folder)


@contextmanager
def llamacpp(target: Path, folder: Path) -> Iterator[str]:
    """The address of its server, whose file is made with the target's own tokenizer, known to the converter or not."""
    python = llamacpp_python()
    file = folder / "target.gguf"
    convert = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from conversion import base\n"
        "base.TextModel.get_vocab_base_pre = lambda *_: 'gpt-2'\n"
        "import convert_hf_to_gguf\n"
        "sys.argv = sys.argv[1:]; convert_hf_to_gguf.main()\n"
    )
    place = str(Path(python).parents[1] / "llama.cpp")
    words = [python, "-P", "-c", convert, place, str(target), "--outfile", str(file), "--outtype", "f32"]
    subprocess.run(words, check=True, capture_output=True)
    with serving(file, folder) as url:
        yield url


@contextmanager
def serving(file: Path, folder: Path) -> Iterator[str]:
    """The address of llama.cpp's server with that GGUF file; what it says goes into `folder`."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [llamacpp_python(), str(SERVER), str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdout is not None
    try:
        yield f"{process.stdout.readline().strip()}/v1"
    finally:
        process.kill()
        process.communicate()


def test_llamacpp_gives_the_records_of_transformers(tmp_path: Path) -> None:
    save_ascii_target(tmp_path / "target")
    run(config_of(tmp_path, "ours"))
    with llamacpp(tmp_path / "target", tmp_path) as url:
        run(config_of(tmp_path, "theirs", target=served(tmp_path, url)))
    theirs = opened(tmp_path, "theirs")
    assert_agree(opened(tmp_path, "ours"), theirs)
    told = theirs.manifest.runtime
    assert told is not None
    assert told.server is not None
    assert (told.version, told.server.token_ids) == ("llamacpp", "of logprobs")
