"""A server of OpenAI's protocol by proxy: what it is asked, what becomes of its answers, refusals, and bad days."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decode.common.checked_json import read_json
from decode.common.errors import ConfigError, InputError, RunError
from decode.common.typed_config import build
from decode.models.describe import describe_model
from distill.config import ResponseSampling, TargetConfig
from distill.engines import http_client
from distill.objectives.target_distribution import SparseRows
from distill.records.config import RecordsConfig
from distill.records.record_folder import RecordFolder
from distill.sequences import record_sequences
from distill.stage import run
from tests.distill.engine_runs import openai_config
from tests.distill.fake_servers import FakeOpenAi, Manner, is_response
from tests.distill.runs import shard_files
from train.config import TrainConfig
from train.training_inputs import open_inputs

EOS = 0


def opened(folder: Path, output: str = "records") -> RecordFolder:
    return RecordFolder.open(folder / output, describe_model(TargetConfig(str(folder / "target"))))


def texts_of(records: RecordFolder) -> list[list[int]]:
    """Of all records, in an order that is not theirs."""
    return sorted(records.read(index).ids.tolist() for index in range(len(records)))


def shards(folder: Path, output: str) -> dict[str, bytes]:
    found = shard_files(folder / output)
    assert found
    return found


@pytest.mark.parametrize(
    ("manner", "source", "tells_end"),
    [("vllm", "told", True), ("llamacpp", "of logprobs", True), ("llamacpp", "of logprobs", False)],
)
def test_records_hold_the_ids_and_the_likeliest_tokens_that_the_server_tells(
    tmp_path: Path, openai_server: FakeOpenAi, manner: Manner, source: str, tells_end: bool
) -> None:
    openai_server.manner, openai_server.tells_end = manner, tells_end
    run(openai_config(tmp_path, openai_server))
    records = opened(tmp_path)
    assert len(records) == len(openai_server.written) == 13
    assert texts_of(records) == sorted(one["prompt"] + openai_server.continued(one)[0] for one in openai_server.written)
    reasons = set()
    for index in range(13):
        record = records.read(index)
        ids, start = record.ids.tolist(), record.meta["prompt_end"]
        reasons.add(record.meta["finish_reason"])
        ends = record.meta["finish_reason"] == "eos"
        learned = np.flatnonzero(record.loss_mask).tolist()
        assert learned == [*range(start, len(ids) - (ends and not tells_end))]
        rows = torch.arange(len(learned))
        p = records.layout.store_named("topk").distribution(record.payload, rows, None)
        assert isinstance(p, SparseRows)
        for row, place in enumerate(learned):
            law = openai_server.law(ids[:place])
            wanted = np.argsort(-law)[:5]
            assert p.ids[row].tolist() == wanted.tolist()
            np.testing.assert_allclose(p.log_p[row].numpy(), law[wanted], atol=0.006)
    assert reasons == {"eos", "length"}
    told = records.manifest.runtime
    assert told is not None
    assert told.server is not None
    assert (told.name, told.version, told.server.model, told.server.token_ids) == ("openai", manner, "base", source)
    assert not (tmp_path / "records/responses").exists()


def test_a_server_of_the_plain_protocol_gives_texts_alone(
    tmp_path: Path, openai_server: FakeOpenAi, caplog: pytest.LogCaptureFixture
) -> None:
    openai_server.manner, openai_server.tells_end = "plain", False
    run(openai_config(tmp_path, openai_server, store=[]))
    records, encode = opened(tmp_path), openai_server.tokenizer.encode
    wanted = []
    for one in openai_server.written:
        new, reason = openai_server.continued(one)
        text = openai_server.tokenizer.decode(new, skip_special_tokens=True)
        wanted.append([*one["prompt"], *encode(text), *([EOS] if reason == "stop" else [])])
    assert texts_of(records) == sorted(wanted)
    for record in map(records.read, range(13)):
        assert not record.payload
        assert record.loss_mask[record.meta["prompt_end"] :].all()
    assert records.manifest.runtime is not None
    assert records.manifest.runtime.server is not None
    assert records.manifest.runtime.server.token_ids == "of the text"
    assert "does not say which tokens it wrote" in caplog.text
    sequences = record_sequences(records, "train", 64)
    assert sequences[0].payload is None
    assert sequences.collate([(sequences[0], 0, 0)], (1, 64), "cpu") is None


def test_training_on_texts_alone_takes_the_objective_that_reads_text(tmp_path: Path, openai_server: FakeOpenAi) -> None:
    run(openai_config(tmp_path, openai_server, store=[]))
    said = {"target": {"path": str(tmp_path / "target")}, "records": str(tmp_path / "records"), "sequence_length": 16}
    said |= {"output_dir": str(tmp_path / "draft")}
    with pytest.raises(ConfigError, match=r"objective=tv compares.*not records\.store=\[\]"):
        open_inputs(build(TrainConfig, said | {"objective": {"name": "tv"}}))
    assert open_inputs(build(TrainConfig, said | {"objective": {"name": "cross_entropy"}})).store is None


def test_a_text_with_tokens_that_are_not_told_has_the_ids_of_its_text_and_no_p(
    tmp_path: Path, openai_server: FakeOpenAi
) -> None:
    openai_server.manner = "llamacpp"
    run(openai_config(tmp_path, openai_server, "whole"))
    hidden = openai_server.hides = openai_server.continued(openai_server.written[0])[0][0]
    openai_server.asked.clear()
    run(openai_config(tmp_path, openai_server))
    records, encode = opened(tmp_path), openai_server.tokenizer.encode
    wanted, holes = [], 0
    for one in openai_server.written:
        new, reason = openai_server.continued(one)
        text = openai_server.tokenizer.decode(new, skip_special_tokens=True)
        holes += hidden in new
        ids = [*encode(text), *([EOS] if reason == "stop" else [])] if hidden in new else new
        wanted.append((one["prompt"] + ids, 0 if hidden in new else len(new)))
    assert 0 < holes < 13
    found = [records.read(index) for index in range(13)]
    assert sorted((one.ids.tolist(), int(one.loss_mask.sum())) for one in found) == sorted(wanted)


def test_each_response_has_its_seed_and_the_run_s_sampling_alone(tmp_path: Path, openai_server: FakeOpenAi) -> None:
    run(openai_config(tmp_path, openai_server, sampling=ResponseSampling(0.5, 7, 0.9, 0.1, max_new_tokens=3)))
    written = openai_server.written
    assert len({one["seed"] for one in written}) == len(written) == 13
    wanted = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "model": "base", "stop_token_ids": [EOS]}
    wanted |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "max_tokens": 3, "logprobs": 5}
    for one in written:
        assert one | wanted == one


def test_three_requests_are_on_their_way_at_once(tmp_path: Path, openai_server: FakeOpenAi) -> None:
    openai_server.slowness = 0.02
    run(openai_config(tmp_path, openai_server))  # batch_size=3
    assert openai_server.most_at_once == 3


def test_three_clients_at_once_get_what_one_gets(tmp_path: Path, openai_server: FakeOpenAi) -> None:
    run(openai_config(tmp_path, openai_server, "alone"))
    openai_server.slowness = 0.01
    names = ["one", "two", "three"]
    errors: list[BaseException] = []

    def client(name: str) -> None:
        try:
            run(openai_config(tmp_path, openai_server, name))
        except BaseException as error:  # noqa: BLE001  # told by the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=client, args=(name,)) for name in names]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not errors
    assert openai_server.most_at_once > 3
    assert all(shards(tmp_path, name) == shards(tmp_path, "alone") for name in names)


def test_overload_and_faults_are_asked_again_after_the_time_that_the_server_names(
    tmp_path: Path, openai_server: FakeOpenAi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run(openai_config(tmp_path, openai_server, "whole"))
    waits: list[float] = []
    monkeypatch.setattr(http_client.time, "sleep", waits.append)
    answers = iter([(429, {"Retry-After": "2"}, "full"), (500, {}, "oops"), (503, {}, ""), (200, {}, "half an answ")])
    openai_server.fault = lambda content: next(answers, None) if is_response(content) else None
    run(openai_config(tmp_path, openai_server))
    assert shards(tmp_path, "records") == shards(tmp_path, "whole")
    assert 2.0 in waits
    assert len(waits) == 4
    assert "answers again" in caplog.text


def test_a_refusal_in_mid_run_ends_it_and_it_goes_on_later(tmp_path: Path, openai_server: FakeOpenAi) -> None:
    one_shard = RecordsConfig(["topk"], topk=5, shard_size=13)
    run(openai_config(tmp_path, openai_server, "whole", records=one_shard))
    openai_server.asked.clear()
    openai_server.slowness = 0.05
    is_full = lambda content: is_response(content) and len(openai_server.written) > 9  # noqa: E731
    openai_server.fault = lambda content: (400, {}, "no more") if is_full(content) else None
    with pytest.raises(RunError, match="answered 400: no more"):
        run(openai_config(tmp_path, openai_server, records=one_shard))
    kept = len([*(tmp_path / "records/responses").iterdir()])
    assert kept >= 3  # each three that were there before
    openai_server.fault = lambda _: None
    openai_server.asked.clear()
    run(openai_config(tmp_path, openai_server, records=one_shard, target={"timeout": 9.0}))
    assert len(openai_server.written) == 13 - kept
    assert shards(tmp_path, "records") == shards(tmp_path, "whole")


_KILLED = """
import sys
from pathlib import Path
from types import SimpleNamespace
from distill.stage import run
from tests.distill.engine_runs import openai_config
run(openai_config(Path(sys.argv[1]), SimpleNamespace(url=sys.argv[2])))
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, openai_server: FakeOpenAi) -> None:
    run(openai_config(tmp_path, openai_server, "whole"))
    openai_server.asked.clear()
    openai_server.slowness = 0.05
    process = subprocess.Popen([sys.executable, "-c", _KILLED, str(tmp_path), openai_server.url])
    ends = time.monotonic() + 60
    while len(openai_server.written) < 9 and time.monotonic() < ends:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    kept = len([one for one in (tmp_path / "records/responses").iterdir() if not one.name.startswith(".")])
    assert 3 <= kept < 13
    time.sleep(0.2)  # what was on its way reaches the server
    openai_server.asked.clear()
    run(openai_config(tmp_path, openai_server))
    assert len(openai_server.written) == 13 - kept
    assert shards(tmp_path, "records") == shards(tmp_path, "whole")


def test_a_server_that_stalls_is_given_up(tmp_path: Path, openai_server: FakeOpenAi) -> None:
    openai_server.stalls = threading.Event()
    began = time.monotonic()
    try:
        with pytest.raises(RunError, match=r"gave no answer in 0.5 s \(target\.timeout\).*resume=auto"):
            run(openai_config(tmp_path, openai_server, target={"timeout": 0.5}))
    finally:
        openai_server.stalls.set()
    assert time.monotonic() - began < 15


def test_weights_that_change_in_mid_run_end_it_and_are_not_mixed_in(tmp_path: Path, openai_server: FakeOpenAi) -> None:
    run(openai_config(tmp_path, openai_server, "whole"))
    openai_server.asked.clear()
    openai_server.shift, openai_server.shifts_after = 1, 7
    config = openai_config(tmp_path, openai_server)
    with pytest.raises(RunError, match="runs other weights than when this run started"):
        run(config)
    openai_server.shifts_after = None
    with pytest.raises(InputError, match="runs other weights now"):
        run(config)
    openai_server.shift = 0
    run(config)
    assert shards(tmp_path, "records") == shards(tmp_path, "whole")


def test_another_model_in_mid_run_ends_it(tmp_path: Path, openai_server: FakeOpenAi) -> None:
    def swaps(content: dict) -> None:
        if len(openai_server.written) == 4:
            openai_server.models = ["other"]

    openai_server.fault = swaps
    with pytest.raises(RunError, match=r"served base when this run started, and now serves \['other'\]"):
        run(openai_config(tmp_path, openai_server))
    kept = tmp_path / "records/responses"
    assert not kept.exists() or len([*kept.iterdir()]) <= 3  # of those before


def test_a_context_that_is_too_short_is_no_end_of_a_text(tmp_path: Path, openai_server: FakeOpenAi) -> None:
    openai_server.cuts_at = 4
    with pytest.raises(RunError, match="cut a text at 4 tokens, and sampling.max_new_tokens=8"):
        run(openai_config(tmp_path, openai_server))


def test_a_run_is_not_gone_on_with_by_a_server_of_another_kind(tmp_path: Path, openai_server: FakeOpenAi) -> None:
    openai_server.fault = lambda content: (400, {}, "no more") if is_response(content) else None
    with pytest.raises(RunError):
        run(openai_config(tmp_path, openai_server))
    assert read_json(tmp_path / "records/target.json")["runtime"]["server"]["token_ids"] == "told"
    openai_server.manner, openai_server.fault = "llamacpp", lambda _: None
    with pytest.raises(InputError, match="was started with"):
        run(openai_config(tmp_path, openai_server))


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
    "warped": ({"warps": True}, {"sampling": ResponseSampling(0.5, max_new_tokens=8)}, "tells p behind "),
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
    with pytest.raises(ConfigError, match="other tokens than|it is another model"):
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
