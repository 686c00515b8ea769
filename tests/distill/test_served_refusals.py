"""Servers and settings that are refused before anything of a run is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decode.common.errors import ConfigError, InputError
from decode.common.typed_config import build
from distill.config import TargetConfig
from distill.stage import run
from tests.distill.engine_runs import ASKED, served_config
from tests.distill.fake_servers import FakeVllm, fake_vllm
from tests.tiny import save_tiny_target

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no vLLM": ({"version": None}, "is no vLLM server"),
    "a key": ({"key": "secret"}, "asks for a key.*VLLM_API_KEY"),
    "short": ({"max_model_len": 14}, "takes texts of 14 tokens, and the run's longest one may have 15"),
    "no states": ({"gives_states": False}, r"gives no hidden states.*vllm serve .*layer_ids.*\[0, 2\]"),
    "other layers": ({"layers": [0, 1, 2]}, r"gives states \(\d+, 3, 32\).*vllm serve"),
    "half": ({"dtype": np.float16}, "in float16.*in float32.*--dtype float32"),
    "elsewhere": ({"folder": None}, "none appeared"),
    "full": ({"is_full": True}, "none appeared.*disk is full"),
    "other states": ({"layers": [0, 1]}, "serves other weights, or gives other layers|differ by"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_servers_that_do_not_fit_are_refused(tmp_path: Path, server: FakeVllm, name: str) -> None:
    changes, said = REFUSED[name]
    for field, value in changes.items():
        setattr(server, field, tmp_path / "elsewhere" if field == "folder" else value)
    if name == "other states":
        good = server.log_p
        server.layers = [0, 2]
        server.log_p = lambda ids: [r and {k: {"logprob": v["logprob"] - 0.1} for k, v in r.items()} for r in good(ids)]  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        run(served_config(tmp_path, server))
    assert not (tmp_path / "records").exists()
    assert not [one for one in server.asked if one.get("max_tokens") == 8]


def test_another_tokenizer_is_refused(tmp_path: Path, server: FakeVllm) -> None:
    encode = server.tokenizer.encode
    server.tokenizer.encode = lambda text, **_: [*encode(text, add_special_tokens=False)[:-1], 9]  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="other tokens than"):
        run(served_config(tmp_path, server))


def test_nothing_there_is_refused_at_once(tmp_path: Path, server: FakeVllm) -> None:
    config = served_config(tmp_path, server, target={"url": "http://127.0.0.1:9/v1"})
    with pytest.raises(ConfigError, match="nothing answers at http://127.0.0.1:9/v1"):
        run(config)


SETTINGS = {
    "url": "http://host:8000/v1",
    "states_folder": "somewhere",
    "tensor_parallel_size": 2,
    "quantization": "fp8",
    "timeout": 5.0,
}


@pytest.mark.parametrize(("name", "value"), SETTINGS.items())
def test_settings_of_vllm_need_it(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"target\.{name}={value}.*target\.runtime=vllm"):
        build(TargetConfig, {"path": "some/target", name: value})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"url": "host:8000"}, "http://HOST:PORT/v1"),
        ({"url": "http://host:8000"}, "http://HOST:PORT/v1"),
        ({"url": "http://host:8000/v1"}, "no target.states_folder"),
        ({"url": "http://host:8000/v1", "states_folder": "x", "tensor_parallel_size": 2}, "the server has its own"),
        ({"states_url": "http://host:8000/v1"}, "name it with target.url"),
        ({"gpu_memory_utilization": 1.5}, "no share"),
        ({"tensor_parallel_size": 0}, "at least 1"),
        ({"timeout": 0.0}, "no time"),
    ],
)
def test_settings_that_do_not_belong_together(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build(TargetConfig, {"path": "some/target", "runtime": "vllm", **changes})


def test_a_writer_that_gives_states_too_is_refused(tmp_path: Path, server: FakeVllm) -> None:
    with fake_vllm(tmp_path / "target", tmp_path / "elsewhere", list(ASKED)) as writer:
        with pytest.raises(ConfigError, match="gives hidden states as well"):
            run(served_config(tmp_path, server, target={"url": writer.url, "states_url": server.url}))


def test_a_target_is_needed_that_gives_states(tmp_path: Path, server: FakeVllm) -> None:
    save_tiny_target(tmp_path / "latent")
    file = tmp_path / "latent/config.json"
    file.write_text(file.read_text().replace("{", '{"kv_lora_rank": 16,', 1))
    with pytest.raises(InputError, match="MLA"):
        run(served_config(tmp_path, server, target={"path": str(tmp_path / "latent")}))
