"""Servers of OpenAI's protocol and settings that are refused before anything of a run is asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decode.common.errors import ConfigError
from decode.common.typed_config import build
from distill.config import RecordsConfig, ResponseSampling, TargetConfig
from distill.stage import run
from tests.distill.engine_runs import openai_config
from tests.distill.fake_servers import FakeOpenAi

SECRET = "sk-of-nobody"

SERVERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "HTML": ({"page": "<html>hello</html>"}, {}, "does not list its models.*no JSON"),
    "other JSON": ({"page": "[1, 2]"}, {}, "does not list its models"),
    "no model": ({"models": []}, {}, "serves no model"),
    "two models": ({"models": ["one", "two"]}, {}, "serves one, two, and target.served_name is not set"),
    "short": ({"max_model_len": 13}, {}, "takes texts of 13 tokens, and the run's longest one may have 14"),
    "a key": ({"key": SECRET}, {}, "asks for a key.*target.key_variable"),
    "a key, late": ({"key": SECRET, "lists_to_all": True}, {}, "asks for a key.*target.key_variable"),
    "few": ({"most_told": 4}, {}, "at most 4 logprobs.*Use records.topk=20"),
    "texts alone": ({"manner": "plain"}, {}, "by their text.*not by their ids.*records.store=\\[\\]"),
    "warped": ({"warps": True}, {"sampling": ResponseSampling(0.5, max_new_tokens=8)}, "tells p behind these"),
    "no top_k": (
        {"manner": "plain"},
        {"sampling": ResponseSampling(1.0, 7, max_new_tokens=8), "store": []},
        "sampling.top_k=7.*does not take it",
    ),
}


@pytest.mark.parametrize("name", SERVERS)
def test_servers_that_do_not_fit_are_refused(tmp_path: Path, openai_server: FakeOpenAi, name: str) -> None:
    changes, asked, said = SERVERS[name]
    for field, value in changes.items():
        setattr(openai_server, field, value)
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        run(openai_config(tmp_path, openai_server, **asked))
    assert not (tmp_path / "records").exists()
    assert not openai_server.written


@pytest.mark.parametrize("manner", ["vllm", "llamacpp", "plain"])
def test_another_tokenizer_is_refused(tmp_path: Path, openai_server: FakeOpenAi, manner: Any) -> None:
    openai_server.manner = manner
    encode = openai_server.tokenizer.encode
    openai_server.tokenizer.encode = lambda text, **_: [*encode(text, add_special_tokens=False), 9]  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="It is another model|it is another model"):
        run(openai_config(tmp_path, openai_server, store=[]))
    assert not (tmp_path / "records").exists()


def test_a_server_that_takes_no_ids_or_adds_some_is_refused(tmp_path: Path, openai_server: FakeOpenAi) -> None:
    good = openai_server.completion
    openai_server.completion = lambda content: good(content | {"prompt": [1, *content["prompt"]]})  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="read 14 tokens of a prompt of 13 token ids"):
        run(openai_config(tmp_path, openai_server))
    openai_server.fault = lambda content: (422, {}, "prompt: a string") if isinstance(content["prompt"], list) else None
    with pytest.raises(ConfigError, match="does not take a prompt of token ids.*a string"):
        run(openai_config(tmp_path, openai_server))


def test_nothing_there_is_refused_at_once(tmp_path: Path, openai_server: FakeOpenAi) -> None:
    config = openai_config(tmp_path, openai_server, target={"url": "http://127.0.0.1:9/v1"})
    with pytest.raises(ConfigError, match="nothing answers at target.url=http://127.0.0.1:9/v1"):
        run(config)


def test_one_of_several_models_is_named(tmp_path: Path, openai_server: FakeOpenAi) -> None:
    openai_server.models = ["one", "two"]
    with pytest.raises(ConfigError, match="target.served_name is three"):
        run(openai_config(tmp_path, openai_server, target={"served_name": "three"}))
    run(openai_config(tmp_path, openai_server, target={"served_name": "two"}))
    assert {one["model"] for one in openai_server.written} == {"two"}


def test_the_key_comes_from_the_environment_and_is_written_nowhere(
    tmp_path: Path,
    openai_server: FakeOpenAi,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    openai_server.key = SECRET
    named = {"key_variable": "THE_KEY"}
    monkeypatch.delenv("THE_KEY", raising=False)
    with pytest.raises(ConfigError, match="the environment has no variable THE_KEY"):
        run(openai_config(tmp_path, openai_server, target=named))
    for wrong, said in (("sk-wrong", "refuses the key in the environment variable THE_KEY"), ("a b", "holds spaces")):
        monkeypatch.setenv("THE_KEY", wrong)
        with pytest.raises(ConfigError, match=said) as error:
            run(openai_config(tmp_path, openai_server, target=named))
        assert wrong not in str(error.value)  # which the server repeats
    monkeypatch.setenv("THE_KEY", SECRET)
    run(openai_config(tmp_path, openai_server, target=named))
    files = [one for one in tmp_path.rglob("*") if one.is_file()]
    assert files
    assert not [one for one in files if SECRET.encode() in one.read_bytes()]
    printed = capfd.readouterr()
    assert SECRET not in caplog.text + printed.out + printed.err


def test_a_key_in_place_of_a_variable_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="not the name of an environment variable") as error:
        build(TargetConfig, {"path": "x", "runtime": "openai", "url": "http://host/v1", "key_variable": SECRET})
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"url": None}, "needs target.url"),
        ({"url": "host:8000"}, "http://HOST:PORT/v1"),
        ({"url": "http://me:secret@host/v1"}, "holds a user or a password"),
        ({"url": "http://host/v1", "states_folder": "x"}, "would ignore it"),
        ({"url": "http://host/v1", "tensor_parallel_size": 2}, "would ignore it"),
        ({"url": "http://host/v1", "dtype": "float16"}, "the server has loaded its own"),
        ({"url": "http://host/v1", "timeout": 0.0}, "no time"),
        ({"runtime": "vllm", "served_name": "x"}, "is for target.runtime=openai"),
        ({"runtime": "transformers", "key_variable": "X"}, "is for target.runtime=openai"),
    ],
)
def test_settings_that_do_not_belong_together(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        build(TargetConfig, {"path": "some/target", "runtime": "openai", **changes})
    assert "secret" not in str(error.value)


def test_records_that_a_server_cannot_give_are_refused(tmp_path: Path, openai_server: FakeOpenAi) -> None:
    good = openai_config(tmp_path, openai_server)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"records": RecordsConfig(["head_tail", "topk"])}, "head_tail cannot be made of them"),
        ({"responses": "corpus"}, "has none written"),
        ({"data": replace(good.data, learn_prompt=True)}, "Set data.learn_prompt=false"),
        ({"sampling": ResponseSampling(draft=replace(good.sampling.draft, path="ngram"))}, "drafts as it was started"),
    ]
    for changes, said in cases:
        with pytest.raises(ConfigError, match=said):
            openai_config(tmp_path, openai_server, **changes)


def test_several_processes_are_refused(
    tmp_path: Path, openai_server: FakeOpenAi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="and 2 processes"):
        run(openai_config(tmp_path, openai_server))
