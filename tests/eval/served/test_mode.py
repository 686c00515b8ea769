"""`mode=served` against a server that drafts and counts as our decoder does, and against servers that do not."""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from decode import load_drafter
from decode.common.errors import ConfigError, InputError
from decode.common.typed_config import build
from eval import __main__ as cli
from eval import stage
from eval.config import EvalConfig
from eval.modes.served.counting import Pair
from eval.modes.served.engine.metrics import Counters
from eval.modes.served.engine.server import ServerGoneError
from eval.modes.served.page import page_of
from eval.publish import publish
from eval.results.schema import read_results
from tests.commands import built
from tests.eval.energy_checks import check_energy
from tests.eval.golden import check_keys
from tests.eval.served.fake_engine import FakeEngine
from tests.eval.served.true_engine import Answer, TrueEngine
from tests.fake_server import serving
from tests.tiny import save_tiny_target
from tests.train.toy import write_corpus

pytestmark = pytest.mark.usefixtures("uncaptured")

K = 3


class Toy:
    """A target, and a draft that is the same with noise: it is accepted and refused at every position."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.target, self.draft = folder, str(folder / "target"), str(folder / "draft")
        save_tiny_target(folder / "target")
        save_tiny_target(folder / "draft")
        self.spoil(0.02)
        self.corpus = str(write_corpus(folder / "corpus"))
        self.answers: dict[tuple[str, str], dict[tuple[Any, ...], Answer]] = defaultdict(dict)

    def spoil(self, amount: float) -> None:
        draft = AutoModelForCausalLM.from_pretrained(self.draft, dtype=torch.float32)
        torch.manual_seed(1)
        with torch.no_grad():
            for weight in draft.parameters():
                weight += amount * torch.randn_like(weight)
        draft.save_pretrained(self.draft)

    def engine(self, drafted: str | None = None, written: str | None = None, **known: Any) -> TrueEngine:
        """Of its draft, or of the one in the folder `drafted`, for the target, or the one in `written`."""
        written, drafted = written or self.target, drafted or self.draft
        target = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32).eval()
        drafter, answers = load_drafter(drafted, target=target), self.answers[written, drafted]
        return TrueEngine(Pair(target, 4), drafter, answers, **{"model": self.target, "k": K, **known})

    def config(self, output: Path, url: str | None, **changes: Any) -> EvalConfig:
        content: dict[str, Any] = {
            "mode": "served",
            "output_dir": str(output / "report"),
            "target": {"path": self.target, "dtype": "float32", "device": "cpu"},
            "drafts": {"noisy": self.draft},
            "data": {"name": "text", "path": self.corpus, "validation_share": 0.2, "heldout_share": 0.4},
            "prompts": {"tokens": 8},
            "temperatures": [0.0, 1.0],
            "decode": {"max_new_tokens": 12, "num_draft_tokens": K},
            "served": {"url": url, "prompts": 6, "rounds": 2, "batch_sizes": [1, 2], "timed_tokens": 4},
        }
        for key, value in changes.items():
            content[key] = {**content[key], **value} if isinstance(content.get(key), dict) else value
        return build(EvalConfig, content)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return Toy(tmp_path_factory.mktemp("served"))


def results_of(output: Path) -> dict[str, Any]:
    return json.loads((output / "report/results.json").read_text())


@pytest.mark.slow
def test_an_engine_that_drafts_as_we_do(toy: Toy, tmp_path: Path) -> None:
    with serving(toy.engine()) as there:
        stage.run(toy.config(tmp_path, there.root))
    results = results_of(tmp_path)
    check_keys(results, "served")
    greedy, drawn = results["comparisons"]
    assert (greedy["verdict"], drawn["verdict"]) == ("equal", "within intervals")
    assert greedy["engine"] == greedy["ours"]
    assert greedy["equal_prompts"] == greedy["same_texts"] == greedy["prompts"] == 6
    assert 0 < greedy["engine"]["acceptance_by_position"][0] < 1
    assert {(one["num_draft_tokens"], one["batch_size"]) for one in results["speeds"]} == {(K, 1), (K, 2)}
    assert all(len(one["tokens_per_s"]) == 2 for one in results["speeds"])
    assert all(len(one["alone"]) == 2 for one in results["our_speeds"])
    check_energy(results, ["noisy, k=3", "noisy", "no draft"])
    there = next(one for one in results["energy"] if one["arm"] == "noisy, k=3")
    assert "counters of this machine say nothing of the server at http://" in there["reason"]
    page = (tmp_path / "report/summary.md").read_text()
    assert "accepts of every draft what our decoder accepts" in page
    assert "counters are equal, prompt by prompt" in page
    publish([tmp_path / "report/results.json"], tmp_path / "docs/served")
    assert (tmp_path / "docs/served.md").read_text() == page_of(results).markdown(is_published=True)


def test_the_published_page_is_made_from_results_of_an_earlier_version() -> None:
    published = Path("docs/results/served.json")
    page = page_of(read_results(published)).markdown(is_published=True)
    assert page == published.with_suffix(".md").read_text()


def test_an_engine_that_drafts_from_something_else(toy: Toy, tmp_path: Path) -> None:
    with serving(toy.engine(drafted=toy.target)) as there:
        stage.run(toy.config(tmp_path, there.root, temperatures=[0.0], served={"batch_sizes": []}))
    (greedy,) = results_of(tmp_path)["comparisons"]
    assert greedy["verdict"] == "parted"
    assert greedy["engine"]["acceptance_by_position"] == [1.0] * K
    assert "accepts otherwise than our decoder: noisy at T=0" in (tmp_path / "report/summary.md").read_text()


class Careless(TrueEngine):
    """Refuses everything where tokens are drawn."""

    def write(self, asked: dict[str, Any]) -> tuple[list[int], Counters]:
        text, counters = super().write(asked)
        if asked["temperature"]:
            counters = Counters(asked["max_tokens"] - 1, K * (asked["max_tokens"] - 1), (0,) * K)
        return text, counters


@pytest.mark.slow
def test_an_engine_that_draws_otherwise(toy: Toy, tmp_path: Path) -> None:
    engine = toy.engine()
    engine.__class__ = Careless
    with serving(engine) as there:
        stage.run(toy.config(tmp_path, there.root, served={"batch_sizes": []}))
    greedy, drawn = results_of(tmp_path)["comparisons"]
    assert (greedy["verdict"], greedy["faults"]) == ("equal", [])
    assert drawn["verdict"] == "parted"
    assert "draws or verifies tokens otherwise" in drawn["faults"][0]


@pytest.mark.slow
def test_texts_of_another_model_are_refused(toy: Toy, tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "other", seed=5)
    with (
        serving(toy.engine(written=str(tmp_path / "other"))) as there,
        pytest.raises(InputError, match="not the target.s own, and it would not write them"),
    ):
        stage.run(toy.config(tmp_path, there.root, served={"batch_sizes": []}))
    assert not (tmp_path / "report/results.json").exists()


@contextmanager
def refused(toy: Toy, output: Path, engine: FakeEngine, match: str, **changes: Any) -> Iterator[None]:
    with serving(engine) as there, pytest.raises((InputError, ConfigError), match=match):
        stage.run(toy.config(output, there.root, **changes))
    assert not (output / "report").exists()
    yield


def test_a_server_of_another_model_is_refused_by_its_name(toy: Toy, tmp_path: Path) -> None:
    with refused(toy, tmp_path, toy.engine(model="Qwen/Qwen3-8B"), r"serves Qwen/Qwen3-8B.*served\.model="):
        pass
    with serving(toy.engine(model="target")) as there:
        stage.run(toy.config(tmp_path, there.root, served={"model": "target", "batch_sizes": []}))


def test_a_server_that_drafts_another_number_of_tokens_or_none(toy: Toy, tmp_path: Path) -> None:
    with refused(toy, tmp_path, toy.engine(k=2), r"give decode\.num_draft_tokens=2"):
        pass
    with refused(toy, tmp_path, toy.engine(k=0), "drafts nothing"):
        pass


def test_one_server_has_one_draft(toy: Toy, tmp_path: Path) -> None:
    with refused(toy, tmp_path, toy.engine(), "name the one", drafts={"other": toy.target}):
        pass


def test_nobody_listens(toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(ServerGoneError, match="does not answer"):
        stage.run(toy.config(tmp_path, "http://127.0.0.1:9"))
    assert not (tmp_path / "report").exists()


class Mortal(TrueEngine):
    """Answers with an error after some requests, as vLLM's server does whose engine died."""

    def die(self) -> None:
        raise RuntimeError("EngineDeadError")


@pytest.mark.slow
def test_an_engine_that_dies_leaves_nothing_half_written_and_is_resumed(toy: Toy, tmp_path: Path) -> None:
    engine = toy.engine()
    engine.__class__, engine.dies_after = Mortal, 8
    with serving(engine) as there:
        with pytest.raises(ServerGoneError):
            stage.run(toy.config(tmp_path, there.root, resume="auto"))
        assert not list((tmp_path / "report").glob("**/results.json"))
        assert not list((tmp_path / "report").glob("servers/*.json"))
        engine.dies_after = None
        stage.run(toy.config(tmp_path, there.root, resume="auto"))
        asked = len(engine.written)
        stage.run(toy.config(tmp_path, there.root, resume="auto"))
    assert results_of(tmp_path)["comparisons"][0]["verdict"] == "equal"
    assert len(engine.written) == asked + 1  # the length of drafts is asked for; all else is there


def test_an_environment_without_vllm_is_refused(toy: Toy, tmp_path: Path, monkeypatch, capsys) -> None:
    with pytest.raises(ConfigError, match=r"(?s)has no package vllm.*served\.url"):
        stage.run(toy.config(tmp_path, None, served={"python": sys.executable}))
    words = ["eval", "mode=served", f"target.path={toy.target}", f"+drafts.a={toy.draft}", "served.python=nowhere"]
    monkeypatch.setattr(sys, "argv", [*words, f"output_dir={tmp_path / 'report'}"])
    with pytest.raises(SystemExit) as error:
        cli.main()
    assert error.value.code == 2
    assert "scripts/vllm_env.sh" in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


def test_a_draft_that_the_engine_does_not_take(toy: Toy, tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "wide", vocab_size=80)
    with refused(toy, tmp_path, toy.engine(), "80", drafts={"noisy": str(tmp_path / "wide")}):
        pass


def test_filters_are_refused_which_ours_alone_would_have(toy: Toy, tmp_path: Path) -> None:
    with refused(toy, tmp_path, toy.engine(), r"decode\.top_k", decode={"top_k": 5}):
        pass


def test_the_mode_brings_its_settings() -> None:
    cfg = built("eval", ["mode=served", "target.path=a/b", "drafts={x: y}"])
    assert isinstance(cfg, EvalConfig)
    assert (cfg.mode, cfg.output_dir) == ("served", "runs/served/report")
    for wrong in ("served.url=host:8000", "served.batch_sizes=[0]", "served.draft_lengths=[2, 2]", "served.model=x"):
        with pytest.raises(ConfigError, match="served"):
            built("eval", ["mode=served", "target.path=a/b", "drafts={x: y}", wrong])
