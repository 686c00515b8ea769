"""A draft that learns from servers of its target while these run: what it learns is what the target in this process
would teach, and servers that come and go or change are noticed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from decode.common.errors import ConfigError, RunError
from decode.models.hidden_states import Taps
from distill.engines import http_client
from distill.runtimes import vllm_server
from tests.distill.fake_servers import FakeVllm
from tests.fake_server import Answer, serving
from tests.tiers import by_default
from tests.train.test_processes import LAUNCHER, launch
from tests.train.toy import command, data_settings, head_config, head_settings, metrics, tiny_config
from train.stage import run

LAYERS = [0, 1, 2]
"""Of the target's two; EAGLE-3 reads 0, 1 and the final states, which are made of 2."""


@dataclass
class TargetServer(FakeVllm):
    """Its states are those of the target itself."""

    is_blank: bool = False
    """It gives zeros."""

    @torch.no_grad()
    def of(self, ids: list[int], layer: int) -> np.ndarray:
        with Taps(self.model, [layer]) as seen:
            self.model(input_ids=torch.tensor([ids]), use_cache=False)
        return seen.each()[0][0].numpy()

    def leave(self, content: dict[str, Any]) -> str:
        name = super().leave(content)
        if self.is_blank:
            arrays = load_file(self.folder / name)
            save_file(arrays | {"hidden_states": 0 * arrays["hidden_states"]}, self.folder / name)
        return name

    def last(self, ids: list[int]) -> np.ndarray:
        by = self.shift if self.shifts_after is None or len(self.asked) > self.shifts_after else 0.0
        return self.of(ids, max(self.layers)) + np.float32(by)


@contextmanager
def target_server(target: Path, folder: Path, layers: list[int], **changes: Any) -> Iterator[TargetServer]:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(target).eval(), AutoTokenizer.from_pretrained(target)
    with serving(TargetServer(target, folder, layers, model, tokenizer, **changes)) as fake:
        yield fake


@pytest.fixture
def server(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TargetServer]:
    """One that is not waited for long."""
    monkeypatch.setattr(http_client, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(vllm_server, "PATIENCE_S", 0.2)
    with target_server(target, tmp_path / "shared", LAYERS) as fake:
        yield fake


def served_settings(server: FakeVllm, corpus: Path, **changes: Any) -> dict[str, Any]:
    servers = {"urls": [server.url], "states_folder": str(server.folder)} | changes.pop("servers", {})
    return {"target_source": "served", "data": data_settings(corpus), "servers": servers, **changes}


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder)]


@pytest.mark.parametrize("family", by_default(1, ["eagle3", "lm", "medusa"]))
def test_it_learns_what_the_target_in_this_process_teaches(
    tmp_path: Path, target: Path, corpus: Path, server: TargetServer, family: str
) -> None:
    make, names = (tiny_config, ()) if family == "lm" else (head_config, (family,))
    server.layers = LAYERS if family == "eagle3" else [2]
    run(make(tmp_path / "live", target, *names, target_source="live", data=data_settings(corpus)))
    run(make(tmp_path / "served", target, *names, **served_settings(server, corpus)))
    assert losses(tmp_path / "served") == pytest.approx(losses(tmp_path / "live"), rel=1e-5)
    assert not [*server.folder.iterdir()]
    assert server.most <= 2 * 8, "files and locks of the texts of one batch"


def test_a_server_that_goes_away_and_comes_back_is_waited_for(
    tmp_path: Path, target: Path, corpus: Path, server: TargetServer
) -> None:
    run(head_config(tmp_path / "whole", target, **served_settings(server, corpus)))
    answer, asked, away = server.answer, len(server.asked), [False]

    def leaves(path: str, content: dict[str, Any]) -> Answer:
        if len(server.asked) == asked + 30:
            server.away, away[0] = 3, True
        return answer(path, content)

    server.answer = leaves  # type: ignore[method-assign]
    run(head_config(tmp_path / "interrupted", target, **served_settings(server, corpus)))
    assert away == [True]
    assert losses(tmp_path / "interrupted") == losses(tmp_path / "whole")


@pytest.mark.parametrize(
    ("bad", "told"),
    by_default(1, [({"shifts_after": 30, "shift": 3.0}, "runs other weights than when"), ({}, "all zero at")]),
)
def test_what_cannot_be_the_target_s_ends_the_run_which_goes_on_later(
    tmp_path: Path, target: Path, corpus: Path, server: TargetServer, bad: dict[str, Any], told: str
) -> None:
    run(head_config(tmp_path / "whole", target, **served_settings(server, corpus)))
    server.asked.clear()
    answer = server.answer

    def goes_bad(path: str, content: dict[str, Any]) -> Answer:
        if len(server.asked) > 30:
            server.is_blank = not bad
        return answer(path, content)

    server.answer = goes_bad  # type: ignore[method-assign]
    for name, value in bad.items():
        setattr(server, name, value)
    config = head_config(tmp_path / "rest", target, **served_settings(server, corpus, resume="auto"))
    for _ in range(1 + bool(bad)):  # other weights are those of no resumed run either
        with pytest.raises(RunError, match=told):
            run(config)
    server.answer, server.is_blank, server.shift = answer, False, 0.0  # type: ignore[method-assign]
    run(config)
    assert losses(tmp_path / "rest") == losses(tmp_path / "whole")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"servers": {"urls": ["http://localhost:8000"]}}, "is no address of an OpenAI-compatible server"),
        ({"servers": {"urls": ["http://127.0.0.1:9/v1"], "timeout": 0.1}}, "nothing answers"),
    ],
)
def test_servers_that_cannot_be_are_refused_before_anything_is_loaded(
    tmp_path: Path, target: Path, corpus: Path, server: TargetServer, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        run(head_config(tmp_path / "run", target, **served_settings(server, corpus, **changes)))
    assert not (tmp_path / "run").exists()


@pytest.mark.engines
def test_two_processes_learn_from_two_servers_as_one_would(tmp_path: Path, target: Path, corpus: Path) -> None:
    with ExitStack() as servers:
        one, two = (servers.enter_context(target_server(target, tmp_path / "shared", [2])) for _ in range(2))
        both = {"servers": {"urls": [one.url, two.url]}, "objective": {"credit": "decay"}, "lr": 3e-3}
        run(head_config(tmp_path / "one", target, "medusa", **served_settings(one, corpus, **both, batch_size=2)))
        counts = [len(one.asked), len(two.asked)]
        assert counts[1] == 0
        settings = served_settings(one, corpus, **both, batch_size=1, engine={"name": "fsdp2"})
        launch(command(head_settings(tmp_path / "two", target, "medusa", **settings), LAUNCHER))
        assert len(one.asked) > counts[0]
        assert len(two.asked) > 0
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-2)
