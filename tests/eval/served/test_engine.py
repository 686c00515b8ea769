"""A server that is started or found, asked and counted: against a small one that answers as vLLM's does."""

import os
import sys
from pathlib import Path

import pytest

from decode.common.errors import InputError
from distill.engines.server import PORT, ServerGoneError, running
from distill.engines.vllm_command import serve_command
from eval.modes.served.engine.metrics import Counters, read_counters
from eval.modes.served.engine.server import Server, complete, found
from tests.eval.served.fake_engine import FakeEngine
from tests.fake_server import serving

SERVER = [sys.executable, "-m", FakeEngine.__module__, "--port", PORT]


def test_counters_are_read_summed_over_engines_and_subtracted() -> None:
    engine = FakeEngine()
    engine.counters = Counters(5, 15, (4, 3, 0))
    lines = engine.metrics().splitlines()
    text = "\n".join([*lines, *(line.replace('engine="0"', 'engine="1"') for line in lines)])
    counters = read_counters(text)
    assert counters == Counters(drafts=10, drafted=30, accepted=(8, 6, 0))
    assert counters - Counters(4, 12, (3, 2, 0)) == Counters(6, 18, (5, 4, 0))
    assert read_counters("# nothing is drafted\nvllm:prompt_tokens_total 3.0\n") == Counters(0, 0, ())


def test_acceptance_is_of_what_came_so_far() -> None:
    assert Counters(10, 30, (8, 4, 0)).by_position == [0.8, 0.5, 0.0]
    assert Counters(10, 30, (0, 0, 0)).by_position == [0.0, None, None]
    assert Counters(10, 30, (8, 4, 0)).tokens_per_draft == 2.2


def test_prompts_go_as_ids_and_texts_come_back_in_order() -> None:
    with serving(engine := FakeEngine()) as there:
        server = found(there.root + "/")
        before = server.counters()
        got = complete(server, [[7, 8], [20]], max_tokens=3, temperature=1.0, seed=5, concurrency=2)
        counted = server.counters() - before
    assert got.texts == [[9, 10, 11], [21, 22, 23]]
    assert got.tokens == 6
    assert counted == Counters(2, 4, (2, 0))
    asked = sorted(engine.written, key=lambda one: one["seed"])
    assert [(one["prompt"], one["seed"], one["temperature"]) for one in asked] == [([7, 8], 5, 1.0), ([20], 6, 1.0)]
    assert all(one["ignore_eos"] and one["return_token_ids"] for one in asked)
    # what the model's own generation_config.json says would hold else
    assert all((one["top_p"], one["top_k"], one["repetition_penalty"]) == (1.0, 0, 1.0) for one in asked)


def test_nobody_listens() -> None:
    with serving(FakeEngine()) as there:
        pass
    with pytest.raises(ServerGoneError, match=rf"{there.root} does not answer.*start it"):
        found(there.root)


def test_something_else_listens() -> None:
    with serving(FakeEngine()) as there, pytest.raises(InputError, match="answered 404"):
        Server(there.root).get("/v2")


def test_a_server_is_started_on_a_port_of_its_own_and_ended_with_the_block(tmp_path: Path) -> None:
    with (
        running(SERVER, os.environ, tmp_path / "a.log", 60) as one,
        running(SERVER, os.environ, tmp_path / "b.log", 60) as other,
    ):
        assert one.url != other.url
        assert found(one.url).model == "a/target"
    assert one.process.poll() is not None
    with pytest.raises(ServerGoneError):
        found(one.url)


def test_a_server_that_does_not_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('line 1'); raise SystemExit('no memory left')"]
    with (
        pytest.raises(ServerGoneError, match=r"(?s)ended with code 1 before it answered.*no memory left"),
        running(command, os.environ, tmp_path / "log", 60),
    ):
        pass


def test_a_server_that_is_slower_than_allowed_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print('still loading', flush=True); time.sleep(60)"]
    with (
        pytest.raises(ServerGoneError, match=r"(?s)has not answered in .* minutes.*still loading"),
        running(command, os.environ, tmp_path / "log", 2),
    ):
        pass


def test_a_server_that_dies_while_it_is_asked(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerGoneError, match=r"(?s)ended with code 7.*EngineDeadError: out of memory"),
        running([*SERVER, "--dies-after", "1"], os.environ, tmp_path / "log", 60) as server,
    ):
        complete(found(server.url, server), [[1], [2], [3]], max_tokens=2, temperature=0.0, seed=None, concurrency=1)


def test_the_command_names_the_length_of_drafts_and_what_comes_with_it() -> None:
    draft = ["--speculative-config", '{"method": "medusa", "model": "d", "num_speculative_tokens": 3}', "--x", "y"]
    words = serve_command("py", "t", draft, ["--enforce-eager"], {"num_speculative_tokens": 2, "extra": 1})
    assert words[0] == "py"
    assert words[words.index("--model") + 1] == "t"
    wanted = '{"method": "medusa", "model": "d", "num_speculative_tokens": 2, "extra": 1}'
    assert words[words.index("--speculative-config") + 1] == wanted
    assert words[-3:] == ["--x", "y", "--enforce-eager"]
    assert "--speculative-config" not in serve_command("py", "t")
