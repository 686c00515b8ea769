"""The suite of families on tiny models: budgets, resuming, tables, advice; with real training in the slow tier."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from decode import generate
from decode.common.errors import ConfigError, InputError, RunError
from decode.common.run_folder import open_run
from decode.common.typed_config import build
from decode.models.describe import describe_model
from decode.models.load import load_model
from eval import __main__ as cli
from eval import stage
from eval.config import EvalConfig
from eval.modes.families import mode, trainings
from eval.modes.families.arms import describe_arms, layers_wanted, record_folders, rescoring, train_config
from eval.modes.families.measuring import Measurement
from eval.modes.families.page import losslessness_of_all, page_of
from eval.modes.families.recommend import PLAIN, recommend, sentence
from eval.modes.families.results import Group, quality_row
from eval.modes.families.trainings import Training, in_children, pace_of, steps_for_tokens
from eval.publish import publish
from eval.results.compared import ArmQuality, Budgets, CodeCost, Families, TrainedArm
from eval.results.schema import Row
from eval.results.statistics import bootstrap_crossed, ratio_of_ratios, ratio_of_sums
from tests.commands import built
from tests.eval.golden import check_keys
from tests.tiny import save_tiny_target
from tests.train.toy import save_target, write_corpus, write_records

LM = ["draft=lm", "draft.width=16", "draft.heads=2", "lr=1e-3"]
WIDE = ["draft=lm", "draft.width=32", "draft.heads=2", "lr=1e-3"]
SHARED = ["sequence_length=24", "batch_size=2", "log_every=2", "engine.precision=fp32", "validation_rows=2"]


def values(folder: Path, output: Path | None = None) -> dict:
    place = output or folder
    return {
        "output_dir": str(place / "families/report"),
        "mode": "families",
        "target": {"path": str(folder / "target")},
        "data": {"name": "text", "path": str(folder / "corpus"), "validation_share": 0.2, "heldout_share": 0.1},
        "prompts": {"tokens": 8},
        "temperatures": [1.0],
        "decode": {"max_new_tokens": 6, "num_draft_tokens": 2},
        "timing": {"prompts": 1, "rounds": 1, "screening_tokens": 4, "cost_repeats": 1, "choose_k": [1, 2]},
        "lossless": {"prompts": 3, "tokens": 6, "other_prompts": 3, "other_tokens": 6},
        "families": {
            "arms": {"lm": LM, "wide": WIDE},
            "training": SHARED,
            "records": str(folder / "records"),
            "folder": str(place / "families"),
            "tokens": 200,
            "seconds": 0.5,
            "seeds": [0, 1],
            "shapes": {"chain": {}, "tree": {"tree": "2x1"}},
            "batch_sizes": [1],
            "batches_timed": [2],
            "screening_batches": 1,
        },
        "resume": "auto",
    }


def config(folder: Path, output: Path | None = None, **changes) -> EvalConfig:
    content = values(folder, output)
    for key, value in changes.items():
        content[key] = {**content.get(key, {}), **value} if isinstance(value, dict) else value
    return build(EvalConfig, content)


class FakeTrainer:
    """Writes a random draft and the metrics of a training that reads 100 tokens a second; dies after `alive` calls."""

    def __init__(self, alive: int = 1000) -> None:
        self.alive, self.asked = alive, []

    def __call__(self, cfg) -> None:
        if len(self.asked) == self.alive:
            raise KeyboardInterrupt
        self.asked.append(cfg)
        with open_run(cfg.output_dir, "train", cfg, "auto") as run:
            save_tiny_target(run.path / "model", seed=1 + cfg.seed, hidden_size=cfg.draft.width, num_layers=1)
            line = {"kind": "train", "step": cfg.steps, "tokens": 40 * cfg.steps, "tokens_per_s": 100.0}
            run.file("metrics.jsonl").write_text(json.dumps(line) + "\n")
            (run.path / "checkpoints").mkdir()
            run.finish({})

    @property
    def names(self) -> list[str]:
        return [Path(cfg.output_dir).name for cfg in self.asked]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    save_target(folder / "target")
    write_corpus(folder / "corpus")
    write_records(folder / "records", folder / "target", folder / "corpus")
    return folder


@pytest.fixture
def trainer(monkeypatch) -> FakeTrainer:
    fake = FakeTrainer()
    monkeypatch.setattr(trainings.stage, "run", fake)
    monkeypatch.setattr(mode, "in_children", lambda call, each: [call(*one) for one in each])
    return fake


def test_the_name_of_the_suite_brings_its_settings():
    cfg = built("eval", ["mode=families"])
    assert isinstance(cfg, EvalConfig)
    assert (cfg.mode, cfg.output_dir, cfg.drafts) == ("families", "runs/families/report", {})
    assert cfg.target.path == "runs/toy/target/model"
    for arm in cfg.families.arms:  # every arm's overrides are those of `python -m train`
        assert train_config(cfg, arm).records == "runs/toy/records"


def test_what_trains_an_arm_stands_beside_it(folder):
    cfg = config(folder, families={"arms": {"lm": LM, "auto": LM[:-1]}})
    told = {arm: facts.optimizer for arm, facts in describe_arms(cfg, describe_model(cfg.target)).items()}
    assert told == {"lm": "adamw 0.001", "auto": "muon 0.04, adamw 0.012"}


def test_budgets_become_steps(tmp_path):
    assert steps_for_tokens(200_000, 4096) == 49
    assert steps_for_tokens(10, 4096) == 1
    lines = [
        {"kind": "train", "step": 10, "tokens": 1000, "tokens_per_s": 500.0},
        {"kind": "validation", "step": 10, "tokens": 77},
        {"kind": "train", "step": 15, "tokens": 1600, "tokens_per_s": 200.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pace = pace_of(tmp_path)
    assert (pace.steps, pace.tokens, pace.seconds) == (15, 1600, 5.0)  # 1000 / 500 + 600 / 200
    assert pace.tokens_per_s == 320
    assert pace.steps_for_seconds(20) == 60
    assert pace.steps_for_seconds(0.01) == 1


def test_a_training_without_metrics_has_no_pace(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(InputError, match="no line of training"):
        pace_of(tmp_path)


def test_every_arm_and_seed_is_trained_at_both_budgets_and_one_from_every_code(folder):
    codes = {"feature_codes": ["bf16", "int8"], "feature_arm": "lm", "feature_seeds": [1]}
    every = trainings.trainings(config(folder, families=codes))
    names = [one.name for one in every]
    assert len(set(names)) == len(names) == 2 * 2 * 2 + 1
    assert names[:4] == ["lm-tokens-0", "wide-tokens-0", "lm-tokens-1", "wide-tokens-1"]
    assert names[4] == "lm-tokens-int8-1"
    assert all(one.budget == "time" for one in every[5:])  # their steps follow from the others
    assert trainings.trainings(config(folder, families={**codes, "seconds": None})) == every[:5]


def test_steps_of_an_equal_time_run_follow_from_the_pace_of_its_twin(folder, tmp_path):
    cfg = config(folder, tmp_path)
    write = tmp_path / "families/lm-tokens-1"
    write.mkdir(parents=True)
    line = {"kind": "train", "step": 4, "tokens": 160, "tokens_per_s": 100.0}
    (write / "metrics.jsonl").write_text(json.dumps(line))
    assert trainings.steps_of(cfg, Training("lm", "time", "bf16", 1), 40.0) == round(0.5 * 4 / 1.6)
    assert trainings.steps_of(cfg, Training("lm", "tokens", "bf16", 1), 40.0) == 5


def test_a_killed_suite_goes_on_with_what_is_missing(folder, tmp_path, trainer, monkeypatch):
    few = {"prompts": 1, "tokens": 3, "other_prompts": 1, "other_tokens": 3}
    changes = {"arms": {"lm": LM}, "shapes": {"chain": {}}, "seeds": [0]}
    cfg = config(folder, tmp_path, families=changes, lossless=few)
    trainer.alive = 1
    with pytest.raises(KeyboardInterrupt):
        stage.run(cfg)
    assert trainer.names == ["lm-tokens-0"]
    trainer.asked, trainer.alive = [], 1000
    monkeypatch.setattr(mode, "_race", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        stage.run(cfg)
    assert trainer.names == ["lm-time-0"]
    kept = tmp_path / "families/report/drafts"
    before = {path.name: path.stat().st_mtime_ns for path in kept.iterdir()}
    assert set(before) == {"lm-tokens-0.json", "lm-time-0.json"}
    (kept / "lm-time-0.json").unlink()
    with pytest.raises(KeyboardInterrupt):
        stage.run(cfg)
    after = {path.name: path.stat().st_mtime_ns for path in kept.iterdir()}
    assert [name for name in before if before[name] != after[name]] == ["lm-time-0.json"]


def test_trainings_differ_in_what_they_compare_alone(folder, tmp_path, trainer, monkeypatch):
    monkeypatch.setattr(mode, "_judge", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        stage.run(config(folder, tmp_path, families={"seeds": [1]}))
    by_name = dict(zip(trainer.names, trainer.asked, strict=True))
    tokens, time = by_name["lm-tokens-1"], by_name["lm-time-1"]
    assert (tokens.seed, tokens.records, tokens.target.path) == (1, str(folder / "records"), str(folder / "target"))
    assert tokens.steps == by_name["wide-tokens-1"].steps
    assert time.steps == round(0.5 / 0.4)  # 40 tokens a step at 100 a second
    assert tokens.validate_every == tokens.steps
    assert not (tmp_path / "families/lm-tokens-1/checkpoints").exists()


def test_what_an_arm_of_its_own_records_cannot_be_is_said_before_training(folder, tmp_path, trainer):
    write_records(tmp_path / "other", folder / "target", folder / "corpus")
    head = ["draft=medusa", "draft.head.taps=[0]", f"records={tmp_path / 'other'}"]
    with pytest.raises(InputError, match=r"arms.head: records=.*other holds the .* \[\], and .* reads \[0\]"):
        stage.run(config(folder, tmp_path, families={"arms": {"head": head}}))
    codes = {"feature_arm": "head", "feature_codes": ["bf16", "int8"]}
    arms = {"head": [*head, "target_source=live"]}
    with pytest.raises(ConfigError, match="feature_arm=head has records of its own"):
        stage.run(config(folder, tmp_path, families={"arms": arms, **codes}))
    save_target(tmp_path / "begun")
    origin = {"name": "text", "path": str(folder / "corpus"), "subset": None}
    origin |= {"validation_share": 0.2, "heldout_share": 0.3}
    (tmp_path / "begun/draftsmith.json").write_text(json.dumps({"schema": 1, "family": "lm", "data": origin}))
    arms = {"lm": ["draft=lm", f"draft.init_from={tmp_path / 'begun'}"]}
    with pytest.raises(InputError, match=r"arms.lm: draft.init_from=.*begun was made of text split"):
        stage.run(config(folder, tmp_path, families={"arms": arms}))
    assert not trainer.asked


def test_an_arm_may_have_texts_of_its_own(folder, tmp_path, trainer, monkeypatch):
    monkeypatch.setattr(mode, "_race", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    write_records(tmp_path / "other", folder / "target", folder / "corpus")
    arms = {"lm": LM, "other": [*LM, f"records={tmp_path / 'other'}"]}
    with pytest.raises(KeyboardInterrupt):
        stage.run(config(folder, tmp_path, families={"arms": arms, "seeds": [0], "seconds": None}))
    assert [cfg.records for cfg in trainer.asked] == [str(folder / "records"), str(tmp_path / "other")]


def test_a_finished_training_of_another_configuration_is_not_taken_for_this_one(folder, tmp_path, trainer, monkeypatch):
    monkeypatch.setattr(mode, "_judge", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        stage.run(config(folder, tmp_path, families={"seeds": [1]}))
    other = config(folder, tmp_path, families={"seeds": [1], "tokens": 400})
    with pytest.raises(ConfigError, match=r"lm-tokens-1 holds a run of another configuration \(.*steps: 4 there"):
        trainings.train_all(other, record_folders(other, {}), trainings.trainings(other))


@pytest.fixture(scope="module")
def measured(folder, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("measured")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainings.stage, "run", FakeTrainer())
        patch.setattr(mode, "in_children", lambda call, each: [call(*one) for one in each])
        stage.run(config(folder, place))
    return place / "families/report"


@pytest.fixture(scope="module")
def results(measured) -> dict:
    return json.loads((measured / "results.json").read_text(), parse_constant=lambda name: pytest.fail(name))


@pytest.mark.slow
def test_results_hold_every_arm_budget_and_cell(results):
    check_keys(results, "families")
    assert (results["schema"], results["mode"]) == (2, "families")
    assert [(one["arm"], one["budget"]) for one in results["trainings"]] == [
        ("lm", "tokens"),
        ("wide", "tokens"),
        ("lm", "time"),
        ("wide", "time"),
    ]
    assert all(one["tokens_per_s"] == pytest.approx(100) and one["seeds"] == 2 for one in results["trainings"])
    rows = {(one["arm"], one["budget"], one["shape"]): one for one in results["quality"]}
    assert set(rows) == {
        (arm, budget, shape)
        for arm in ("lm", "wide")
        for budget, shape in [("tokens", "chain"), ("tokens", "tree"), ("time", "chain")]
    }
    for (arm, budget, shape), row in rows.items():
        beside = rows["lm", "tokens", shape]["tau"] if (arm, budget) == ("wide", "tokens") else None
        assert row["tau_ratio"] == (None if beside is None else pytest.approx(row["tau"] / beside))
        assert len(row["tau_by_seed"]) == 2
        assert row["mismatches"] == 0  # the target is float32, and coupled decoding is equal token for token
    (cell,) = results["cells"]
    assert {one["arm"] for one in cell["arms"]} == {"own autoregressive loop", "transformers generate", "lm", "wide"}
    assert {row["draft"] for row in results["rows"]} == {"lm", "wide"}
    assert all(row["component_times"]["t_draft_s"] > 0 for row in results["rows"])
    (choice,) = results["choices"]
    assert set(choice["tokens_per_s"]["wide"]) == {"1", "2"}


@pytest.mark.slow
def test_every_token_of_the_targets_texts_is_checked_and_counted_once(folder, measured, results):
    cfg = config(folder, measured.parents[1])
    prompts, _ = mode._prompts(cfg, describe_model(cfg.target))
    model, ends = load_model(cfg.target), []
    for row, prompt in enumerate(prompts[: cfg.lossless.prompts]):
        ids = torch.tensor([prompt.ids])
        out = generate(model, None, ids, max_new_tokens=cfg.lossless.tokens, rows=[row], seed=cfg.seed)
        ends.append(int(out.lengths[0]) - len(prompt.ids))
    for row in results["quality"]:
        assert row["tokens_checked"] == 2 * sum(ends)  # of two seeds
        kept = [
            json.loads((measured / f"drafts/{row['arm']}-{row['budget']}-{seed}.json").read_text())["measured"]
            for seed in (0, 1)
        ]
        counts = [one["counts"] for found in kept for one in found if one["shape"] == row["shape"]]
        assert all([emitted for emitted, _ in one] == ends for one in counts)
        passes = sum(number for one in counts for _, number in one)
        assert row["tau"] == pytest.approx(2 * sum(ends) / passes)
        assert 2 * len(ends) < passes <= 2 * sum(ends)  # these drafts are random: more than a pass a text


@pytest.mark.slow
def test_the_page_says_it_plainly_and_is_published(results, measured, tmp_path):
    text = page_of(results).markdown()
    assert (measured / "summary.md").read_text() == text
    assert "Which draft" in (measured / "index.html").read_text()
    for part in (
        "## Which draft",
        "Equal tokens (200)",
        "Equal time (0.5 s)",
        "## Speed",
        "0 mismatches",
        "served by vLLM",
    ):
        assert part in text
    assert "Codes of hidden states" not in text
    assert "tau over that of lm" in text
    alone = page_of({**results, "budgets": {**results["budgets"], "seconds": None}}).markdown()
    assert "Equal time" not in alone
    readme = tmp_path / "README.md"
    readme.write_text("no marks in here")
    publish([measured / "results.json"], tmp_path / "docs/families", readme)
    assert (tmp_path / "docs/families.md").read_text() == page_of(results).markdown(is_published=True)
    assert readme.read_text() == "no marks in here"


@pytest.mark.slow
def test_without_batches_to_time_tau_alone_is_told(folder, tmp_path, trainer):
    changes = {"batch_sizes": [], "batches_timed": [], "seeds": [0], "seconds": None, "shapes": {"chain": {}}}
    stage.run(config(folder, tmp_path, families=changes))
    place = tmp_path / "families/report"
    results = json.loads((place / "results.json").read_text())
    assert (results["cells"], results["rows"], len(results["quality"])) == ([], [], 2)
    assert results["target"]["dtype"] == "float32"
    text = (place / "summary.md").read_text()
    assert "Equal tokens (200)" in text
    assert "## Speed" not in text
    publish([place / "results.json"], tmp_path / "docs/atlas", tmp_path / "none.md")
    assert (tmp_path / "docs/atlas.md").read_text() == page_of(results).markdown(is_published=True)


def entry(counts: list[list[int]], outcomes: list[list[int]], mismatches: int = 0) -> Measurement:
    about: dict = {"shape": "chain", "temperature": 1.0, "num_draft_tokens": 2, "near_ties": 0, "tokens_checked": 10}
    return Measurement(**about, counts=counts, outcomes=outcomes, mismatches=mismatches)


def test_seeds_are_pooled_over_rounds():
    found = [entry([[3, 1], [3, 3]], [[2, 2, 1], [2, 0, 3]]), entry([[6, 2], [4, 2]], [[2, 1, 4]], 1)]
    row = quality_row(Group("lm", "tokens", "bf16"), found, seed=0)
    assert row.tau == 16 / 8
    assert row.tau_by_seed == [6 / 4, 10 / 4]
    assert row.acceptance_by_position == [5 / 8, 1 / 5]
    assert row.mismatches == 1
    assert row.tau_ci95 is not None
    assert row.tau_ci95[0] <= row.tau <= row.tau_ci95[1]


def test_the_interval_sees_what_seeds_and_prompts_add():
    rng = np.random.default_rng(0)
    flat = np.stack([np.full((3, 40), 2.0), np.ones((3, 40))], -1)
    assert bootstrap_crossed(flat, ratio_of_sums, 0).ci95 == (2.0, 2.0)
    seeds = flat * np.array([1.0, 1.2, 0.8])[:, None, None] ** np.array([1, 0])
    low, high = bootstrap_crossed(seeds, ratio_of_sums, 0).ci95 or (0, 0)
    assert low < 1.75 < 2.25 < high  # 40 equal prompts alone would say 2.0 exactly
    prompts = flat * rng.uniform(0.5, 1.5, (1, 40, 1)) ** np.array([1, 0])
    low, high = bootstrap_crossed(prompts, ratio_of_sums, 0).ci95 or (0, 0)
    assert 0.05 < high - low < 0.5  # what all trainings find hard together is not averaged away
    both = np.concatenate([prompts, prompts], -1)
    assert bootstrap_crossed(both, ratio_of_ratios, 0).ci95 == (1.0, 1.0)
    assert bootstrap_crossed(flat[:1, :1], ratio_of_sums, 0).ci95 is None


def figure(name: str, value: float, width: float = 0.1, **fields) -> dict:
    return {name: value, f"{name}_ci95": [value - width, value + width], **fields}


def tau_of(arm: str, tau: float, budget: str = "tokens", shape: str = "chain") -> ArmQuality:
    about = {"arm": arm, "budget": budget, "code": "bf16", "shape": shape, "temperature": 1.0}
    return ArmQuality.model_construct(**figure("tau", tau, **about))


def speed_of(draft: str, speedup: float, batch: int = 1) -> Row:
    about = {"draft": draft, "setting": "k=3", "batch_size": batch, "temperature": 1.0}
    return Row.model_construct(**figure("speedup", speedup, **about))


def code_of(code: str, kept: float, width: float, size: float) -> CodeCost:
    about = {"arm": "eagle3", "code": code, "temperature": 1.0, "feature_bytes_per_token": size}
    return CodeCost(**figure("tau_ratio", kept, width, **about))


def synthetic() -> Families:
    """What advice follows from."""
    return Families.model_construct(
        arms={
            arm: TrainedArm.model_construct(taps=taps) for arm, taps in (("lm", []), ("eagle3", [2, 4]), ("mtp", [-1]))
        },
        budgets=Budgets(tokens=1000, seconds=20.0, seeds=[0]),
        records={"bf16": "a", "int8": "b", "pca": "c"},
        shapes={"chain": {}, "tree": {"tree": "2x1"}},
        cells=[{"batch_size": rows, "temperature": 1.0, "prompts": 1, "arms": []} for rows in (1, 8)],
        rows=[speed_of("lm", 1.5), speed_of("eagle3", 2.0), speed_of("mtp", 1.85), speed_of("lm", 1.05, 8)],
        quality=[
            tau_of("lm", 2.0),
            tau_of("eagle3", 2.6),
            tau_of("mtp", 2.2),
            tau_of("lm", 2.5, "time"),
            tau_of("eagle3", 2.4, "time"),
            tau_of("mtp", 3.0, shape="tree"),
        ],
        codes=[code_of("bf16", 1.0, 0.0, 24.0), code_of("int8", 0.99, 0.02, 12.0), code_of("pca", 0.9, 0.02, 2.0)],
    )


def test_advice_follows_from_the_figures():
    by_condition = {one.condition: one for one in recommend(synthetic())}
    one = by_condition["you decode 1 prompt at once, T=1"]
    assert (one.use, one.also) == ("eagle3 with k=3", ["mtp"])  # lm's interval ends below eagle3's
    eight = by_condition["you decode 8 prompts at once, T=1"]
    assert eight.use == PLAIN  # 1.05 [0.95, 1.15] does not clear 1
    assert by_condition["text to train on is what you are short of (1,000 tokens)"].use == "eagle3"
    assert by_condition["training time is (20 s)"].use == "lm"
    assert by_condition["training time is (20 s)"].also == ["eagle3"]
    assert by_condition["a wider target pass costs you nothing"].use == "mtp"
    assert by_condition["the target's hidden states are out of reach"].use == "lm"
    codes = by_condition["you record hidden states (eagle3)"]
    assert codes.use == "code int8"  # pca's interval ends below 1
    assert "pca keeps 0.900 [0.880, 0.920] of tau at 0.08 of the bytes" in codes.because
    assert sentence(one).endswith("times the speed without a draft. Within its interval: mtp.")


def test_no_advice_without_figures():
    assert recommend(synthetic().model_copy(update={"rows": [], "quality": [], "codes": []})) == []


def test_mismatches_are_named_by_arm():
    row: dict = {"near_ties": 1, "tokens_checked": 1000}
    rows = [ArmQuality.model_construct(**row, arm=arm, mismatches=wrong) for arm, wrong in (("hydra", 2), ("lm", 0))]
    assert losslessness_of_all(rows).endswith("2 mismatches (hydra) and 2 near-ties in 2,000 tokens.")


def test_the_texts_are_scored_again_with_the_stores_that_they_had(folder, tmp_path):
    again = rescoring(config(folder, tmp_path), "int8", [0, 2, -1], "somewhere")
    assert (again.responses, again.from_records, again.records.shard_size) == ("records", str(folder / "records"), 8)
    assert (again.records.features.layers, again.records.features.code) == ([0, 2, -1], "int8")


def test_plan_prints_and_writes_nothing(folder, tmp_path, capsys):
    stage.run(config(folder, tmp_path, plan=True))
    out = capsys.readouterr().out
    for part in ("trainings: 8, 8 still to do: 2 arms x 2 seeds, at 200 tokens and at 0.5 s", "reads tokens alone"):
        assert part in out
    assert re.search(r"time: \d+ \w+ to [\d.]+ \w+, by sizes alone", out)
    assert not (tmp_path / "families").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": {}}, "arms is empty"),
        ({"arms": {"lm": ["steps=3"]}}, r"arms.lm sets steps, which the comparison sets"),
        ({"training": ["+seed=3"]}, "families.training sets seed"),
        ({"arms": {"a/b": LM}}, "parts of folder names"),
        ({"feature_arm": "eagle9"}, "eagle9 is none of families.arms"),
        ({"seeds": []}, "seeds is empty"),
        ({"feature_arm": "lm", "feature_seeds": [7]}, "must be some of families.seeds"),
        ({"seeds": [1, 1]}, "repeats one"),
        ({"seconds": 0}, "train for some time"),
        ({"batch_sizes": [1, 2], "batches_timed": [1]}, "go by pairs"),
        ({"feature_codes": ["int4"]}, "int4"),
    ],
)
def test_bad_values_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        build(EvalConfig, {"mode": "families", "target": {"path": "t"}, "families": changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"families": {"arms": {"lm": ["draft=lm", "draft.layers=0"]}}}, ConfigError, "families.arms.lm: .*layers=0"),
        ({"families": {"arms": {"lm": ["draft=none"]}}}, ConfigError, "families.arms.lm: "),
        ({"families": {"shapes": {"t": {"depth": 3}}}}, ConfigError, r"shapes.t has unknown keys \['depth'\]"),
        ({"families": {"records": "runs/none"}}, InputError, r"records=runs/none does not exist.*toy.sh"),
        (
            {"families": {"arms": {"lm": [*LM, "records=runs/none"]}}},
            InputError,
            r"families.arms.lm: records=runs/none does not exist",
        ),
        (
            {"families": {"feature_arm": "lm", "feature_codes": ["bf16", "pca"]}},
            ConfigError,
            "reads no hidden states",
        ),
        ({"decode": {"verifier": "rejection"}}, ConfigError, "use decode.verifier=coupled"),
        ({"prompts": {"file": "questions.jsonl"}}, InputError, "prompts.file=questions.jsonl does not exist"),
        ({"drafts": {"lm": "some/draft"}}, ConfigError, "drafts.lm is called like an arm"),
        ({"drafts": {"one": "some/draft"}}, InputError, "drafts.one"),
        ({"lossless": {"prompts": 10_000}}, ConfigError, "and 10000 are needed"),
        ({"data": {"heldout_share": 0.3}}, InputError, "part of them is in that text"),
    ],
)
def test_bad_input_is_refused_before_anything_is_trained(folder, tmp_path, trainer, changes, error, message):
    with pytest.raises(error, match=message):
        stage.run(config(folder, tmp_path, **changes))
    assert not trainer.asked


def test_questions_of_a_file_stand_in_for_held_out_text(folder, tmp_path):
    """Some to choose draft lengths by, others to report; where these are too few, that is said with both counts."""
    lines = [{"question_id": i, "category": "ab"[i % 2], "turns": [f"def f{i}(a):", "more"]} for i in range(6)]
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    cfg = config(folder, tmp_path, prompts={"file": str(file)})
    reported, screening = mode._prompts(cfg, describe_model(cfg.target))
    assert ([one.id for one in screening], [one.id for one in reported]) == (["0"], ["1", "2", "3"])
    assert not any(one.later for one in reported)
    cfg.lossless.prompts = 6
    with pytest.raises(ConfigError, match="gives 6 questions .*and 7 are needed"):
        mode._prompts(cfg, describe_model(cfg.target))


def test_missing_records_are_said_with_the_remedy_and_ends_with_2(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["eval", "mode=families", "plan=true"])
    with pytest.raises(SystemExit) as error:
        cli.main()
    assert error.value.code == 2
    assert "bash scripts/toy.sh" in capsys.readouterr().err


@pytest.mark.slow
def test_a_child_hands_over_what_it_finds_and_what_it_raises():
    assert in_children(abs, [(-3,), (4,)]) == [3, 4]
    with pytest.raises(ValueError, match="invalid literal"):
        in_children(int, [("three",)])
    with pytest.raises(RunError, match="resume=auto"):
        in_children(sys.modules["os"]._exit, [(3,)])


@pytest.mark.slow
def test_real_trainings_from_records_to_page(folder, tmp_path):
    head = ["draft=eagle3", "draft.head.taps=[0,1,-1]", "draft.head.depth=2", "lr=1e-3"]
    changes = {"arms": {"lm": LM, "eagle3": head}, "seeds": [0], "feature_seeds": [0]}
    changes |= {"feature_codes": ["bf16", "int8", "pca"], "feature_arm": "eagle3", "at_once": 2}
    stage.run(config(folder, tmp_path, families=changes))
    place = tmp_path / "families"
    found = json.loads((place / "report/results.json").read_text())
    trained = {(one["arm"], one["budget"], one["code"]): one for one in found["trainings"]}
    assert len(trained) == 6
    assert trained["eagle3", "tokens", "bf16"]["feature_bytes_per_token"] == 3 * 32 * 2
    assert trained["lm", "tokens", "bf16"]["feature_bytes_per_token"] == 0
    assert all(one["tokens"] == pytest.approx(200, rel=0.3) for one in trained.values() if one["budget"] == "tokens")
    assert all(row["mismatches"] == 0 for row in found["quality"])
    assert [one["code"] for one in found["codes"]] == ["bf16", "int8", "pca"]
    assert found["codes"][0]["tau_ratio"] == 1
    sizes = [one["feature_bytes_per_token"] for one in found["codes"]]
    assert sizes == sorted(sizes, reverse=True)
    assert "Codes of hidden states" in (place / "report/summary.md").read_text()


def test_records_that_lack_a_layer_are_named_before_anything_is_trained(folder, tmp_path, trainer):
    features = {"layers": [0, -1]}
    write_records(tmp_path / "families/records_bf16", folder / "target", folder / "corpus", features=features)
    arms = {"low": ["draft=medusa", "draft.head.taps=[0]"], "high": ["draft=medusa", "draft.head.taps=[1]"]}
    with pytest.raises(InputError, match=r"read \[0, 1\]: \[1\] are missing. Delete the folder"):
        stage.run(config(folder, tmp_path, families={"arms": arms}))
    assert not trainer.asked


def test_records_that_hold_the_hidden_states_are_trained_from_as_they_are(folder, tmp_path):
    write_records(tmp_path / "own", folder / "target", folder / "corpus", features={"layers": [0, 1, -1]})
    arms = {"low": ["draft=medusa", "draft.head.taps=[0]"]}
    families = {"arms": arms, "records": str(tmp_path / "own"), "feature_codes": ["bf16", "int8"], "feature_arm": "low"}
    cfg = config(folder, tmp_path, families=families)
    wanted = {"bf16": [0], "int8": [0]}
    assert record_folders(cfg, wanted) == {
        "bf16": str(tmp_path / "own"),
        "int8": str(tmp_path / "families/records_int8"),
    }
    assert record_folders(cfg, {"bf16": [0, 2]}) == {"bf16": str(tmp_path / "families/records_bf16")}


def test_no_states_are_recorded_of_a_target_that_is_run_again(folder, tmp_path):
    arms = {"low": ["draft=medusa", "draft.head.taps=[0]"], "other": ["draft=medusa", "draft.head.taps=[1]"]}
    cfg = config(folder, tmp_path, families={"arms": arms, "training": ["target_source=live"]})
    assert layers_wanted(cfg, describe_arms(cfg, describe_model(cfg.target))) == {}
    codes = {"arms": arms, "training": ["target_source=live"], "feature_codes": ["bf16", "int8"], "feature_arm": "low"}
    coded = config(folder, tmp_path, families=codes)
    with pytest.raises(ConfigError, match=r"feature_arm=low takes its states by target_source=live"):
        describe_arms(coded, describe_model(coded.target))
    arms["other"].append("target_source=records")
    cfg = config(folder, tmp_path, families={"arms": arms, "training": ["target_source=live"]})
    assert layers_wanted(cfg, describe_arms(cfg, describe_model(cfg.target))) == {"bf16": [1]}
