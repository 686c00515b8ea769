"""A running vLLM server by proxy: what it is asked, what is refused before anything of the run is, and bad days."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decode.common.checked_json import read_json
from decode.common.errors import ConfigError, InputError, RunError
from decode.common.typed_config import build
from distill.config import ResponseSampling, TargetConfig
from distill.records.config import RecordsConfig
from distill.stage import run
from tests.distill.engine_runs import ASKED, changed, opened, served_config
from tests.distill.fake_servers import FakeVllm, fake_vllm
from tests.distill.vllm_proxy import state_of
from tests.fake_server import Answer
from tests.tiny import save_tiny_target


def test_records_are_those_of_what_the_server_gives(tmp_path: Path, server: FakeVllm) -> None:
    run(served_config(tmp_path, server))
    records = opened(tmp_path)
    assert len(records) == 13
    assert {records.read(n).meta["finish_reason"] for n in range(13)} == {"eos", "length"}
    for index in range(13):
        record = records.read(index)
        arrays = {name: torch.from_numpy(array) for name, array in record.features.items()}
        raw = records.feature_code.decode(arrays, [2])[:, 0]
        wanted = state_of(record.ids.tolist(), 2, 32)
        np.testing.assert_allclose(raw.float().numpy(), wanted, atol=0.02, rtol=0.01)
    told = records.manifest.runtime
    assert told is not None
    assert (told.name, told.version, told.dtype) == ("vllm", "0.fake", "float32")
    assert told.log_p is not None
    assert not [*(tmp_path / "shared").iterdir()]  # nothing is left of what it wrote
    assert server.most <= 16  # nor piles up: states and lock of each of three requests, and of a batch that is read


def test_each_response_has_its_seed_and_the_run_s_sampling_alone(tmp_path: Path, server: FakeVllm) -> None:
    run(served_config(tmp_path, server, sampling=ResponseSampling(0.5, 7, 0.9, 0.1, max_new_tokens=3)))
    written = [one for one in server.asked if one.get("max_tokens") == 3]
    assert len({one["seed"] for one in written}) == len(written) == 13
    for one in written:
        wanted = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "ignore_eos": True, "model": "base"}
        assert one | wanted == one
        assert one["repetition_penalty"] == 1.0
        assert one["stop_token_ids"] == [server.tokenizer.eos_token_id]


def test_one_server_may_write_and_another_read(tmp_path: Path, server: FakeVllm) -> None:
    with fake_vllm(tmp_path / "target", tmp_path / "shared", list(ASKED), gives_states=False) as writer:
        run(served_config(tmp_path, server, target={"url": writer.url, "states_url": server.url}))
    assert len([one for one in writer.asked if one.get("max_tokens") == 8]) == 13
    assert not [one for one in server.asked if one.get("max_tokens") == 8]


def test_a_server_that_goes_away_and_comes_back_loses_nothing_and_doubles_nothing(
    tmp_path: Path, server: FakeVllm, caplog: pytest.LogCaptureFixture
) -> None:
    run(served_config(tmp_path, server, "whole"))
    asked = len(server.asked)
    for at in (3, 11, 30):  # as it is looked at, as it writes, as it reads
        server.asked.clear()
        _goes_away(server, at)
        run(served_config(tmp_path, server, f"records{at}"))
        assert len(server.asked) >= asked
        ours, theirs = (read_json(tmp_path / name / "manifest.json") for name in (f"records{at}", "whole"))
        assert ours["shards"] == theirs["shards"]
    assert "answers again" in caplog.text


def _goes_away(server: FakeVllm, at: int) -> None:
    """For three requests, from request number `at` on."""
    answer = server.answer

    def first(path: str, content: dict[str, Any]) -> Answer:
        if len(server.asked) == at:
            server.away = 3
            server.answer = answer  # type: ignore[method-assign]
        return answer(path, content)

    server.answer = first  # type: ignore[method-assign]


def test_files_of_requests_that_were_in_flight_are_removed_in_the_end(tmp_path: Path, server: FakeVllm) -> None:
    run(served_config(tmp_path, server))
    (first,) = {one["request_id"].rsplit("-", 1)[0] for one in server.asked if "request_id" in one}
    own, other = (tmp_path / "shared" / f"cmpl-{name}-0-1.safetensors" for name in (f"{first}-0", "draftsmith-0-0"))
    own.touch()
    other.touch()
    run(served_config(tmp_path, server, "another"))
    assert own.exists()
    (tmp_path / "records/manifest.json").unlink()
    run(served_config(tmp_path, server, resume="auto"))
    assert not own.exists()
    assert other.exists()


def test_one_that_stays_away_ends_the_run_which_goes_on_later(tmp_path: Path, server: FakeVllm) -> None:
    run(served_config(tmp_path, server, "whole"))
    server.asked.clear()
    answer = server.answer

    def gone(path: str, content: dict[str, Any]) -> Answer:
        if len(server.asked) > 30:
            server.away = 10**6
        return answer(path, content)

    server.answer = gone  # type: ignore[method-assign]
    config = served_config(tmp_path, server, target={"timeout": 1.0}, resume="auto")
    with pytest.raises(RunError, match="did not come back in 1 s.*resume=auto"):
        run(config)
    server.away, server.answer = 0, answer  # type: ignore[method-assign]
    kept = len(list((tmp_path / "records/responses").iterdir()))
    assert kept
    server.asked.clear()
    run(served_config(tmp_path, server, resume="auto"))  # with another timeout, which is no other run
    written = [one for one in server.asked if one.get("max_tokens") == 8]
    assert len(written) == 13 - min(13, 5 * kept)
    ours, theirs = (read_json(tmp_path / name / "manifest.json") for name in ("records", "whole"))
    assert ours["shards"] == theirs["shards"]


def test_weights_that_change_in_mid_run_end_it_and_are_not_mixed_in(tmp_path: Path, server: FakeVllm) -> None:
    run(served_config(tmp_path, server, "whole"))
    server.asked.clear()
    server.shift, server.shifts_after = 0.5, 40
    config = served_config(tmp_path, server, resume="auto")
    with pytest.raises(RunError, match="runs other weights than when this run started"):
        run(config)
    server.shifts_after = None
    with pytest.raises(InputError, match="runs other weights now"):
        run(config)
    server.shift = 0.0
    run(config)
    ours, theirs = (read_json(tmp_path / name / "manifest.json") for name in ("records", "whole"))
    assert ours["shards"] == theirs["shards"]


def test_a_key_is_sent_and_kept_nowhere(tmp_path: Path, server: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    server.key = "s3cret-key"
    monkeypatch.setenv("VLLM_API_KEY", server.key)
    run(served_config(tmp_path, server))
    for file in (tmp_path / "records").rglob("*"):
        assert not file.is_file() or server.key.encode() not in file.read_bytes()


def test_an_end_that_is_not_the_target_s_is_refused(tmp_path: Path, server: FakeVllm) -> None:
    server.stray_end = True
    with pytest.raises(RunError, match="ended a text at token 7.*--generation-config vllm"):
        run(served_config(tmp_path, server))


def test_a_disk_that_is_full_ends_the_run_with_its_folder(tmp_path: Path, server: FakeVllm) -> None:
    answer = server.answer

    def filled(path: str, content: dict[str, Any]) -> Answer:
        server.is_full = len(server.asked) > 40
        return answer(path, content)

    server.answer = filled  # type: ignore[method-assign]
    with pytest.raises(RunError, match=r"(?s)did not write the hidden states.*shared.*MB free.*resume=auto"):
        run(served_config(tmp_path, server))


def test_texts_of_the_corpus_need_no_server_that_writes(tmp_path: Path, server: FakeVllm) -> None:
    target = {"url": "http://127.0.0.1:9/v1", "states_url": server.url}
    server.layers = [2]
    run(served_config(tmp_path, server, target=target, responses="corpus", records=RecordsConfig()))


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


def test_a_server_that_turns_texts_otherwise_is_refused(tmp_path: Path, server: FakeVllm) -> None:
    """By its own room: a short text too would get the long factors."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 1e4}
    changed(tmp_path / "target", {"rope_parameters": rope | {"original_max_position_embeddings": 32}})
    with pytest.raises(InputError, match="if started for 64 tokens: 32 at most, and texts of 31"):
        run(served_config(tmp_path, server))


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
    with pytest.raises(ConfigError, match=rf"target\.{name}=.?{value}.*target\.runtime=vllm"):
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
