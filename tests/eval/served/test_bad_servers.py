"""Servers that answer something else than a server of a model does, or are started anew while they are asked; and names
of drafts that no file can have."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from decode.common.errors import ConfigError, InputError
from eval.modes.served.engine.metrics import Counters, read_counters
from eval.modes.served.engine.server import Server, ServerGoneError, complete, found
from tests.eval.served.fake_engine import FakeEngine
from tests.eval.served.test_mode import Toy
from tests.fake_server import serving

PAGE = b"<html><body>\nhello world\nvllm:spec_decode_num_drafts_total sign-in\n</body></html>"


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """A server that says the same to whatever it is asked, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def run() -> None:
            while True:
                try:
                    one, _ = listening.accept()
                except OSError:  # closed
                    return
                with one:
                    one.recv(1 << 16)
                    one.sendall(answer)

        Thread(target=run, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


def ok(content: bytes, length: int | None = None) -> bytes:
    size = len(content) if length is None else length
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (size, content)


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH\r\n", b"", ok(b'{"data": [', 500)])
def test_what_speaks_no_http_or_hangs_up_is_no_server(answer: bytes) -> None:
    with answering(answer) as url, pytest.raises(ServerGoneError, match="does not answer"):
        found(url)


def test_a_redirect_is_not_followed() -> None:
    with serving(FakeEngine()) as there:
        moved = b"HTTP/1.1 302 Found\r\nLocation: %s/v1/models\r\nContent-Length: 0\r\n\r\n" % there.root.encode()
        with answering(moved) as url, pytest.raises(InputError, match="answered 302"):
            found(url)
    assert not there.asked


def test_a_server_of_this_machine_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(ok(PAGE)) as proxy, serving(FakeEngine()) as there:
        monkeypatch.setenv("http_proxy", proxy)
        assert found(there.root).model == "a/target"
        with pytest.raises(InputError, match="lists no models"):
            found("http://far.example")


def test_one_that_hangs_is_told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.modes.served.engine.server._LOOK_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listening, pytest.raises(ServerGoneError, match="does not answer"):
        found(f"http://127.0.0.1:{listening.getsockname()[1]}")


@pytest.mark.parametrize("url", ["http://127.0.0.1:notaport", "http://a b", "http://"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ServerGoneError, match="does not answer"):
        found(url)


@pytest.mark.parametrize("content", [PAGE, b"\xff\xfe", b"[]", b'{"data": [1]}'])
def test_a_page_is_no_list_of_models(content: bytes) -> None:
    with answering(ok(content)) as url, pytest.raises(InputError, match="lists no models"):
        found(url)


def test_a_page_is_no_completion() -> None:
    with answering(ok(PAGE)) as url, pytest.raises(InputError, match="no JSON.*html|html.*no JSON"):
        complete(Server(url, "a"), [[1]], 2, 0.0, None, 1)
    for other in (b"[]", b'{"choices": null}', b'{"choices": [{"token_ids": "ab"}]}'):
        with answering(ok(other)) as url, pytest.raises(InputError, match="no token ids"):
            complete(Server(url, "a"), [[1]], 2, 0.0, None, 1)


def test_what_is_no_number_is_not_counted() -> None:
    broken = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0"} 3\nvllm:spec_decode_num_drafts_total NaN'
    assert read_counters(f"{PAGE.decode()}\n{broken}") == Counters(0, 0, ())


def test_a_server_that_is_started_anew_has_lost_its_counters() -> None:
    engine = FakeEngine()
    with serving(engine) as there:
        server = found(there.root)
        complete(server, [[1]], 9, 0.0, None, 1)
        before = server.counters()
        complete(server, [[1]], 9, 0.0, None, 1)
        assert server.counters_since(before).drafts == before.drafts
        engine.counters = Counters(0, 0, (0, 0))
        with pytest.raises(ServerGoneError, match=rf"counted {before.drafts} drafts and now says 0.*started anew"):
            server.counters_since(before)


@pytest.mark.parametrize("name", ["../../x", "a/b", "a b", ".."])
def test_a_name_that_leads_out_of_the_output_folder(name: str, tmp_path: Path) -> None:
    from eval.modes.served.folders import check_drafts

    toy = Toy.__new__(Toy)
    toy.target, toy.draft, toy.corpus = "a/target", "a/draft", "a"
    cfg = toy.config(tmp_path, "http://localhost", drafts={name: "a/draft"})
    cfg.drafts.pop("noisy", None)
    with pytest.raises(ConfigError, match="letters, digits"):
        check_drafts(cfg, None)  # pyright: ignore[reportArgumentType]
