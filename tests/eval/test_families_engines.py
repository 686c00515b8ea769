"""`families.engine`: what engines say of each draft, and advice of what one of them serves alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from decode.common.errors import InputError
from decode.config import ModelConfig
from decode.models.describe import ModelDescription, describe_model
from eval import __main__ as cli
from eval import stage
from eval.modes.families import engines
from eval.modes.families.arms import ArmFacts
from eval.modes.families.engines import refusals, refused_forms, title
from eval.modes.families.page import page_of
from eval.modes.families.recommend import PLAIN, recommend, serving
from eval.results.compared import Families
from eval.results.schema import read_results
from tests.eval.test_families import LM, config, synthetic
from tests.eval.test_families import folder as folder  # a fixture
from tests.tiny import save_tiny_target
from tests.train.export.saved_heads import save_head, save_padded_target
from train.export.engines import ENGINES
from train.export.engines.base import NO_HYDRA, Loads


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelDescription:
    folder = save_padded_target(tmp_path_factory.mktemp("target") / "target")
    return describe_model(ModelConfig(path=str(folder)))


def served(draft: Path, target: ModelDescription) -> set[str]:
    return {engine for engine, why in refusals(str(draft), target).items() if why is None}


def test_engines_are_asked_of_the_very_draft(target: ModelDescription, tmp_path: Path) -> None:
    heads = {name: tmp_path / name for name in ("eagle3", "medusa", "hydra", "mtp")}
    for name, place in heads.items():
        save_head(place, Path(target.path), name)
    inside = save_head(tmp_path / "inside", Path(target.path), "eagle3", taps=(1, 2, 4))
    assert inside.config.taps == (1, 2, 4)
    assert served(tmp_path / "inside", target) >= {"vllm", "sglang", "trtllm", "speculators"}
    why = refusals(str(heads["hydra"]), target)
    assert why["vllm"] == NO_HYDRA
    assert None not in why.values()
    assert served(heads["mtp"], target) == set()
    assert served(heads["medusa"], target) == {"vllm", "tgi"}
    save_head(tmp_path / "outer", Path(target.path), "eagle3", taps=(0, 2, -1))
    assert "engines hand over those between its layers" in str(refusals(str(tmp_path / "outer"), target)["vllm"])


def test_a_language_model_of_any_origin_is_one_to_engines(target: ModelDescription, tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "lm", seed=1, hidden_size=16, num_layers=1)
    loading = {name for name, one in ENGINES.items() if isinstance(one.forms["lm"], Loads)}
    assert served(tmp_path / "lm", target) == loading


def test_a_draft_that_no_export_writes_is_refused_by_every_engine(
    target: ModelDescription, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that began as a published head with an output head of its own, say: measured, and not served."""

    def refuse(_: object) -> None:
        raise InputError("exports do not write it")

    save_head(tmp_path / "head", Path(target.path), "eagle3", taps=(1, 2, 4))
    monkeypatch.setattr(engines, "open_source", refuse)
    assert refusals(str(tmp_path / "head"), target) == dict.fromkeys(ENGINES, "exports do not write it")


def test_families_that_an_engine_does_not_know_are_named_before_training() -> None:
    facts = {name: ArmFacts(name, 1, (), "adamw") for name in ("lm", "eagle3", "hydra", "medusa")}
    assert refused_forms(facts, "vllm") == {"hydra": NO_HYDRA}
    assert set(refused_forms(facts, "tgi")) == {"lm", "eagle3", "hydra"}


def asked(engine: str | None, **refused: dict[str, str]) -> Families:
    """The synthetic results, in which all engines load every arm except for the reasons given, and what they advise."""
    arms = {
        arm: one.model_copy(update={"refusals": {**dict.fromkeys(ENGINES), **refused.get(arm, {})}})
        for arm, one in synthetic().arms.items()
    }
    found = synthetic().model_copy(update={"engine": engine, "arms": arms})
    return found.model_copy(update={"recommendation": recommend(found)})


def test_advice_for_an_engine_is_of_what_it_serves() -> None:
    nowhere = dict.fromkeys(ENGINES, "no engine loads it")
    free = {one.condition: one for one in recommend(asked(None, eagle3=nowhere))}
    assert free["you decode 1 prompt at once, T=1"].use == "eagle3 with k=3"
    bound = {one.condition: one for one in recommend(asked("vllm", eagle3=nowhere))}
    one = bound["you decode 1 prompt at once, T=1"]
    assert (one.use, one.also, one.arm) == ("mtp with k=3", [], "mtp")
    assert not any("eagle3" in f"{one.use}{one.also}" for one in bound.values())
    assert "a wider target pass costs you nothing" not in bound  # engines are told to draft chains
    other = recommend(asked("vllm", eagle3={"sglang": "SGLang does not load it"}))
    assert "eagle3 with k=3" in [one.use for one in other]


def test_an_engine_that_serves_no_arm_gets_no_draft() -> None:
    refused = dict.fromkeys(("lm", "eagle3", "mtp"), {"tgi": "TGI drafts with Medusa heads alone"})
    (advice,) = recommend(asked("tgi", **refused))
    assert (advice.condition, advice.use) == (f"you serve with {title('tgi')}", PLAIN)


def test_without_an_engine_it_is_said_which_load_each_recommended_draft() -> None:
    said = serving(asked(None, eagle3=dict.fromkeys(ENGINES, "no engine loads it"), lm={"tgi": "no"}))
    assert len(said) == len({"eagle3", "lm", "mtp"})
    (lm,) = [one for one in said if one.startswith("lm ")]
    assert title("vllm") in lm
    assert title("tgi") not in lm
    (eagle3,) = [one for one in said if one.startswith("eagle3 ")]
    assert "served by no engine" in eagle3
    assert "no engine loads it" in eagle3


def test_with_an_engine_it_is_said_what_is_left_out_and_why() -> None:
    (said,) = serving(asked("vllm", mtp={"vllm": "its layer is another target's"}))
    assert said.startswith(f"mtp is left out, since {title('vllm')} does not load it: its layer is another target's")


def test_results_from_before_engines_were_asked_still_have_their_page() -> None:
    results = read_results(Path("docs/results/families.json"))
    assert "## Which draft\n" in page_of(results).markdown()


def test_an_unknown_engine_ends_with_2_and_the_known_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["eval", "mode=families", "families.engine=ollama"])
    with pytest.raises(SystemExit) as error:
        cli.main()
    assert error.value.code == 2
    told = capsys.readouterr().err
    assert "families.engine" in told
    assert all(name in told for name in ENGINES)


def test_a_plan_says_what_is_trained_for_comparison_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.run(config(folder, tmp_path, plan=True, families={"arms": {"lm": LM}, "engine": "tgi"}))
    assert f"lm is not recommended for {title('tgi')}: TGI drafts with Medusa heads alone" in capsys.readouterr().out
