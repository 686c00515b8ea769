"""A whole tiny report: schema, page, resume, publishing, tracking; and what is refused before any weight is loaded."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from decode.common.errors import ConfigError, InputError
from decode.common.run_folder import RUN
from decode.common.typed_config import build
from eval import inputs, stage
from eval.config import EvalConfig
from eval.measure import quality
from eval.measure.continuations import Text
from eval.prompts.questions import Question, first_turn
from eval.publish import END, START, publish
from eval.render.remarks import remarks
from eval.render.report_page import page_of
from eval.results.headline import headline_row
from eval.results.reported import Report
from eval.results.schema import read_results
from tests.eval.golden import check_keys
from tests.eval.test_uncached import off_by_one
from tests.tiny import save_tiny_target, tiny_tokenizer

ROW_KEYS = {
    *("drafter", "draft", "verifier", "tree", "dtype", "text", "temperature", "batch_size", "num_draft_tokens", "seed"),
    *("prompts", "tokens", "alpha", "alpha_ci95", "tau", "tau_ci95", "acceptance_by_position", "tokens_per_s"),
    *("baseline_tokens_per_s", "speedup", "speedup_ci95", "predicted_speedup", "realised", "ttft_s", "itl_s"),
    *("mismatches", "near_ties", "tokens_checked", "repeated_4gram_share", "energy_j_per_token", "energy_reason"),
    *("uncached_mismatches", "uncached_near_ties", "uncached_tokens_checked"),
    *("uncached_dtype_flips", "uncached_dtype_tokens"),
    "peak_memory_bytes",
}
GOOD = {"output_dir": "x", "target": {"path": "t"}, "drafts": {"d": "d"}}
PEER_KEYS = {
    *("name", "best", "setting", "temperature", "batch_size", "tokens_per_s", "ratio_ours_over_peer", "ratio_ci95"),
}


def write_questions(path: Path) -> str:
    lines = [
        {"question_id": i, "category": ("code", "chat")[i % 2], "turns": [f"def f{i}(", "go on"]} for i in range(7)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return str(path)


def values(folder: Path) -> dict:
    return {
        "output_dir": str(folder / "report"),
        "name": "tiny",
        "target": {"path": str(folder / "target")},
        "drafts": {
            "distilled": str(folder / "draft/model"),
            "undistilled": str(folder / "draft_text"),
            "lookup": "ngram",
            "both": "lookup+distilled",
        },
        "prompts": {"file": str(folder / "questions.jsonl"), "max_turns": 2},
        "decode": {"max_new_tokens": 10, "num_draft_tokens": 2},
        "timing": {
            "prompts": 4,
            "rounds": 1,
            "screening_prompts": 1,
            "screening_tokens": 6,
            "sweep": [1, 2],
            "cost_repeats": 1,
        },
        "peers": {"num_assistant_tokens": [2], "confidence_threshold": [0.0, 0.4]},
        "lossless": {"prompts": 6, "tokens": 12, "other_prompts": 4, "other_tokens": 6, "batch_size": 4},
        "curve_temperatures": [0.0, 0.7, 1.0],
    }


def make_models(folder: Path) -> None:
    save_tiny_target(folder / "target", seed=0)
    save_tiny_target(folder / "draft/model", seed=0)
    save_tiny_target(folder / "draft_text", seed=1, num_layers=1)
    write_questions(folder / "questions.jsonl")
    metrics = [{"kind": "train", "step": s, "loss": 4 - s / 10, "alpha": 0.5, "tau": 2.0} for s in range(5)]
    metrics += [{"kind": "validation", "step": 4, "loss": 3.0, "alpha": 0.6, "tau": 2.1}]
    (folder / "draft/metrics.jsonl").write_text("\n".join(json.dumps(line) for line in metrics))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    make_models(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("decode.forward.runner.CAPTURE_AFTER", 10**9)  # captures would cost more than the passes do
        stage.run(build(EvalConfig, values(folder)))
    return folder


@pytest.fixture(scope="module")
def results(folder) -> dict:
    return json.loads((folder / "report/results.json").read_text(), parse_constant=lambda name: pytest.fail(name))


def test_schema(results, folder):
    check_keys(results, "report")
    assert results["schema"] == 2
    assert set(results["environment"]["git"]) == {"revision", "dirty"}
    assert results["environment"]["started"] == RUN.read(folder / "report/run.json").started
    assert set(results["fingerprints"]) == set(results["drafts"])
    assert results["prompts"]["wanted"] == {"reported": 6, "timed": 4, "screening": 1}
    assert {"environment", "target", "definitions", "rows", "peers"} <= set(results)
    assert all(set(row) >= ROW_KEYS for row in results["rows"])
    assert all(set(peer) >= PEER_KEYS for peer in results["peers"])
    assert set(results["rows"][0]["itl_s"]) == {"p50", "p95"}
    explained = {"alpha", "tau", "speedup", "predicted_speedup", "realised", "itl_s", "ttft_s", "repeated_4gram_share"}
    assert explained | {"uncached_mismatches", "uncached_dtype_flips"} <= set(results["definitions"])


def test_rows_cover_drafts_temperatures_and_categories(results):
    keys = [(row["draft"], row["temperature"], row["category"]) for row in results["rows"]]
    assert len(set(keys)) == len(keys) == 4 * 2 * 3
    assert keys[0] == ("distilled", 1.0, None)
    assert {(row["temperature"], row["verifier"]) for row in results["rows"]} == {(1.0, "coupled"), (0.0, "greedy")}


def test_ways_without_training_and_mixtures_of_named_drafts_are_arms_without_alpha(results):
    """Report alone refused them (drafts.lookup=ngram), so that lookup was never beside a head in its table."""
    rows = {row["draft"]: row for row in results["rows"] if row["category"] is None and row["temperature"] == 1}
    assert [(rows[name]["drafter"], rows[name]["alpha"]) for name in ("lookup", "both")] == [
        ("ngram", None),
        ("mixture", None),
    ]
    assert all(rows[name]["mismatches"] == 0 < rows[name]["tokens_checked"] for name in ("lookup", "both"))
    assert rows["both"]["tau"] > rows["lookup"]["tau"]  # its other member is the target itself
    assert any("fastest for" in text or "nothing pays" in text for text in remarks(Report.model_validate(results)))


def test_a_draft_that_is_the_target_is_accepted_whole(results):
    row = results["rows"][0]
    assert row["alpha"] == pytest.approx(1.0, abs=1e-4)
    assert row["acceptance_by_position"] == [1.0, 1.0]
    assert row["tau"] > 2.4
    other = next(row for row in results["rows"] if row["draft"] == "undistilled")
    assert other["alpha_ci95"][1] < row["alpha_ci95"][0]


def test_losslessness_is_counted_per_row(results):
    every = [row for row in results["rows"] if row["category"] is None]
    assert all(row["mismatches"] == 0 for row in every)
    assert all(row["dtype_flips"] == 0 for row in every)  # this run is timed in float32
    assert every[0]["dtype_tokens_compared"] == every[0]["tokens"]
    first, *rest = every
    assert first["tokens_checked"] > max(row["tokens_checked"] for row in rest)
    parts = [
        row for row in results["rows"] if row["category"] and row["draft"] == "distilled" and row["temperature"] == 1
    ]
    assert sum(row["tokens_checked"] for row in parts) == first["tokens_checked"]


def test_every_text_is_held_against_an_uncached_forward(results):
    every = [row for row in results["rows"] if row["category"] is None]
    for row in every:  # this run is timed in float32, too
        assert (row["uncached_mismatches"], row["uncached_near_ties"], row["uncached_dtype_flips"]) == (0, 0, 0)
        assert row["uncached_dtype_tokens"] == row["tokens"]
    assert every[0]["uncached_tokens_checked"] == every[0]["tokens_checked"]  # all that the target wrote there
    own = [row for row in results["rows"] if row["draft"] == "undistilled"]
    for name in ("uncached_tokens_checked", "uncached_dtype_tokens"):
        whole = sum(row[name] for row in own if row["category"] is None)
        assert sum(row[name] for row in own) == 2 * whole > 0  # those of the categories are the same ones again


@pytest.mark.slow
def test_a_fault_that_both_loops_share_is_told_by_the_report(folder, tmp_path, monkeypatch):
    off_by_one(monkeypatch)
    few = {"prompts": 2, "tokens": 12, "other_prompts": 1, "other_tokens": 6}
    timing = {"prompts": 2, "rounds": 1, "sweep": [], "screening_prompts": 1, "cost_repeats": 1}
    changes = {"temperatures": [1.0], "curve_temperatures": [], "peers": {"num_assistant_tokens": []}}
    cfg = {**values(folder), **changes, "lossless": few, "timing": timing, "output_dir": str(tmp_path / "report")}
    stage.run(build(EvalConfig, cfg))
    found = json.loads((tmp_path / "report/results.json").read_text())
    for row in found["rows"]:
        assert (row["mismatches"], row["dtype_flips"]) == (0, 0)  # both loops are wrong alike
        assert row["uncached_dtype_flips"] > 0
    first = found["rows"][0]
    assert first["uncached_mismatches"] > 0
    words = f"{first['uncached_mismatches']} mismatches, {first['uncached_near_ties']} near-ties in "
    assert words in (tmp_path / "report/summary.md").read_text()
    assert words in (tmp_path / "report/index.html").read_text()


def test_the_baseline_is_the_faster_one(results):
    speeds = {arm["arm"]: arm["tokens_per_s"] for arm in results["arms"] if arm["temperature"] == 1.0}
    best = max(speeds["own autoregressive loop"], speeds["transformers generate"])
    assert results["rows"][0]["baseline_tokens_per_s"] == best


def test_peers_hold_the_best_setting_and_those_tried(results):
    best = [peer for peer in results["peers"] if peer["best"]]
    assert [peer["temperature"] for peer in best] == [1.0, 0.0]
    assert all(peer["setting"]["num_assistant_tokens_schedule"] == "constant" for peer in best)
    assert len([peer for peer in results["peers"] if not peer["best"]]) == 4
    tried = {
        json.dumps(p["setting"]): p["tokens_per_s"] for p in results["peers"] if not p["best"] and p["temperature"] == 1
    }
    assert tried[json.dumps(best[0]["setting"])] == max(tried.values())


def test_sweeps(results):
    lengths = results["sweeps"]["num_draft_tokens"]
    assert [point["num_draft_tokens"] for point in lengths["points"]] == [1, 2]
    points = results["sweeps"]["temperature"]["points"]
    trained = ("distilled", "undistilled")
    assert {(p["temperature"], p["draft"]) for p in points} == {(t, d) for t in (0, 0.7, 1) for d in trained}
    assert all(point["predicted_speedup"] > 0 for point in points)


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.links = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href") and value]


def test_the_page_is_whole_and_names_nothing_outside_itself(folder):
    text = (folder / "report/index.html").read_text()
    page = Page()
    page.feed(text)
    assert page.tags.count("svg") == 4
    for name in (
        "acceptance by position",
        "speedup against k",
        "predicted speedup against temperature",
        "training curves",
    ):
        assert re.search(f'aria-label="[^"]*{name}', text)
    assert "http" not in text
    assert "script" not in page.tags
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"url\((?!#)", text)
    assert all(f'id="{link[1:]}"' in text for link in page.links)


def test_each_plot_is_well_formed(results):
    page = page_of(results).html()
    plots = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(plots) == 3  # without metrics there are no training curves
    for plot in plots:
        ElementTree.fromstring(plot.replace("<svg", '<svg xmlns:xlink="x"', 1))


@pytest.mark.slow
def test_a_run_too_short_to_time_reports_no_speed_instead_of_failing(folder, tmp_path):
    short = {"decode": {"max_new_tokens": 2, "num_draft_tokens": 2}, "curve_temperatures": []}
    stage.run(build(EvalConfig, {**values(folder), **short, "output_dir": str(tmp_path / "report")}))
    found = json.loads((tmp_path / "report/results.json").read_text())
    assert found["rows"][0]["speedup"] is None  # the draft is the target: all came with the first arrival
    assert found["peers"][0]["ratio_ours_over_peer"] is None


def test_conversations_keep_every_turn_whatever_their_ids(monkeypatch):
    tokenizer = tiny_tokenizer()
    prompts = [first_turn(Question("a#b#c", None, ("x", "y", "z")), tokenizer, max_turns=3) for _ in range(2)]
    answer = Text(0, (), tuple(tokenizer("yes")["input_ids"]))
    monkeypatch.setattr(quality, "alone", lambda *_: lambda jobs: [answer] * len(jobs))
    found = quality.with_answers(build(EvalConfig, GOOD), None, tokenizer, prompts)  # type: ignore[arg-type]
    assert [prompt.id for prompt in found] == ["a#b#c", "a#b#c#2", "a#b#c#3"] * 2


def test_a_conversation_ends_where_the_template_refuses_the_answer(monkeypatch):
    """Mistral's refuse an empty one, and the report ended with it."""
    tokenizer = tiny_tokenizer()
    refusal = "{% for m in messages if not m.content %}{{ raise_exception('empty') }}{% endfor %}"
    tokenizer.chat_template = refusal + "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    prompts = [first_turn(Question(name, None, ("x", "y", "z")), tokenizer, max_turns=3) for name in "ab"]
    answers = [Text(0, (), ()), Text(1, (), tuple(tokenizer("yes")["input_ids"]))]
    monkeypatch.setattr(quality, "alone", lambda *_: lambda jobs: answers[-len(jobs) :])
    found = quality.with_answers(build(EvalConfig, GOOD), None, tokenizer, prompts)  # type: ignore[arg-type]
    assert [prompt.id for prompt in found] == ["a", "b", "b#2", "b#3"]
    assert not found[0].later


def test_headline_is_never_greedy(results):
    row = headline_row(Report.model_validate(results))
    assert row is not None
    assert row.temperature == 1.0
    greedy = {**results, "rows": [row for row in results["rows"] if row["temperature"] == 0]}
    assert headline_row(Report.model_validate(greedy)) is None
    assert 'class="card"' not in page_of(greedy).html()
    assert "none is a headline" in page_of(greedy).markdown()


def test_summary_tells_machine_command_and_definitions(folder):
    text = (folder / "report/summary.md").read_text()
    for part in ("cores", "python -m eval", "Seed", "Percentile bootstrap", "mismatches", "near-ties"):
        assert part in text


def test_a_finished_report_is_not_redone(folder, monkeypatch):
    monkeypatch.setattr(inputs, "load_model", lambda *_: pytest.fail("weights were loaded"))
    before = (folder / "report/results.json").read_bytes()
    stage.run(build(EvalConfig, {**values(folder), "resume": "auto"}))
    assert (folder / "report/results.json").read_bytes() == before


@pytest.mark.parametrize("what", ["target_weights", "weights of drafts.distilled", "prompts_hash"])
def test_a_report_goes_on_with_the_same_models_and_prompts_alone(folder, what):
    file = folder / "report/run.json"
    before = file.read_text()
    note = json.loads(before)
    assert what in note["bound_to"]
    try:
        file.write_text(json.dumps(note | {"bound_to": note["bound_to"] | {what: "another"}}))
        with pytest.raises(ConfigError, match=f"begun with {what} another"):
            stage.run(build(EvalConfig, {**values(folder), "resume": "auto"}))
    finally:
        file.write_text(before)


def test_publish_copies_renders_and_fills_the_readme(folder, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n{START}\nold\n{END}\ntail\n")
    destination = tmp_path / "docs/results/toy"
    publish([folder / "report/results.json"], destination, readme)
    publish([folder / "report/results.json"], destination, readme)
    text = readme.read_text()
    assert "old" not in text
    assert text.startswith("# Title\n")
    assert text.endswith("tail\n")
    assert "(docs/results/toy.md)" in text
    assert json.loads(destination.with_suffix(".json").read_text())["schema"] == 2
    assert "what each figure means; Component times" in destination.with_suffix(".md").read_text()
    for name in ("qwen2.5", "qwen2.6"):
        publish([folder / "report/results.json"], destination.with_name(name), readme)
    kept = {"toy", "qwen2.5", "qwen2.6"}
    assert {path.name for path in destination.parent.iterdir()} == {
        f"{one}{end}" for one in kept for end in (".md", ".json")
    }


@pytest.mark.slow
def test_runs_of_a_measured_report_are_pooled(folder, tmp_path, results):
    files = [tmp_path / f"{number}.json" for number in range(3)]
    for number, file in enumerate(files):
        environment = results["environment"] | {"started": f"{results['environment']['started']}-{number}"}
        file.write_text(json.dumps({**results, "environment": environment}))
    (tmp_path / "README.md").write_text(f"{START}{END}")
    publish(files, tmp_path / "page", tmp_path / "README.md")
    found = read_results(tmp_path / "page.json")
    for pooled, alone in zip(found["rows"], results["rows"], strict=True):
        for name in ("alpha", "tau", "speedup", "whole_call_speedup", "realised"):
            assert pooled[name] == pytest.approx(alone[name]), name  # three times the same
        assert (pooled["alpha_ci95"] is None) == (alone["alpha_ci95"] is None)
        assert pooled["tokens_checked"] == 3 * alone["tokens_checked"]
    assert [one["ratio_ours_over_peer"] for one in found["peers"]] == pytest.approx(
        [one["ratio_ours_over_peer"] for one in results["peers"]]
    )


@pytest.mark.parametrize("text", ["no marks", f"{END}\n{START}", f"{START}\n{START}\n{END}"])
def test_publish_refuses_a_readme_without_its_marks(folder, tmp_path, text):
    (tmp_path / "README.md").write_text(text)
    with pytest.raises(InputError, match="results:start"):
        publish([folder / "report/results.json"], tmp_path / "x", tmp_path / "README.md")
    assert not (tmp_path / "x.json").exists()


def test_publish_refuses_another_schema(tmp_path):
    (tmp_path / "results.json").write_text('{"schema": 9}')
    (tmp_path / "README.md").write_text(f"{START}{END}")
    with pytest.raises(InputError, match="schema 9"):
        publish([tmp_path / "results.json"], tmp_path / "x", tmp_path / "README.md")


@pytest.mark.parametrize("field", ["baseline", "alpha_ci95", "category"])
def test_publish_refuses_results_that_were_cut(folder, tmp_path, results, field):
    rows = [{name: value for name, value in row.items() if name != field} for row in results["rows"]]
    (tmp_path / "results.json").write_text(json.dumps({**results, "rows": rows}))
    (tmp_path / "README.md").write_text(f"{START}{END}")
    with pytest.raises(InputError, match=f"{field}.*edited or cut"):
        publish([tmp_path / "results.json"], tmp_path / "x", tmp_path / "README.md")
    assert not (tmp_path / "x.json").exists()


@pytest.fixture
def no_weights(monkeypatch):
    monkeypatch.setattr(inputs, "load_model", lambda *_: pytest.fail("weights were loaded"))


def test_several_processes_do_not_measure_a_report(folder, monkeypatch, no_weights):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="launcher started 2 processes, and a report is measured by one"):
        stage.run(build(EvalConfig, values(folder)))


def test_plan_prints_and_writes_nothing(folder, capsys, no_weights):
    stage.run(build(EvalConfig, {**values(folder), "plan": True, "output_dir": str(folder / "planned")}))
    out = capsys.readouterr().out
    for part in ("transformers assisted", "distilled k=1", "prompts: 4 timed", "tokens:", "by sizes alone"):
        assert part in out
    assert not (folder / "planned").exists()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({}, ConfigError, "already holds"),
        ({"output_dir": "new", "target": {"path": "./missing/target"}}, InputError, "does not exist"),
        ({"output_dir": "new", "drafts": {"x": "./missing/draft"}}, InputError, "does not exist"),
        ({"output_dir": "new", "decode": {"adaptive": True, "confidence": True}}, ConfigError, "predicts nothing"),
        ({"output_dir": "new", "prompts": {"file": "missing.jsonl"}}, InputError, "does not exist"),
        ({"output_dir": "new", "lossless": {"prompts": 6, "tokens": 300, "other_prompts": 2}}, InputError, "positions"),
    ],
)
def test_bad_input_is_refused_before_weights_are_loaded(folder, changes, error, message, no_weights):
    with pytest.raises(error, match=message):
        stage.run(build(EvalConfig, {**values(folder), **changes}))
    assert not Path("new").exists()


def test_another_vocabulary_is_refused_before_weights_are_loaded(folder, tmp_path, no_weights):
    save_tiny_target(tmp_path / "draft", vocab_size=310)
    with pytest.raises(InputError, match=r"310.*300"):
        stage.run(build(EvalConfig, {**values(folder), "output_dir": "new", "drafts": {"x": str(tmp_path / "draft")}}))


def test_other_rows_check_no_more_than_the_first_one():
    asked = {"prompts": 12, "tokens": 50}
    lossless = build(EvalConfig, {**GOOD, "timing": {"prompts": 4}, "lossless": asked}).lossless
    assert (lossless.prompts, lossless.other_prompts, lossless.tokens, lossless.other_tokens) == (12, 12, 50, 50)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafts": {}}, "drafts is empty"),
        ({"temperatures": []}, "temperatures is empty"),
        ({"temperatures": [1.0, 1.0]}, "repeats one"),
        ({"temperatures": [-1.0]}, "not a finite number"),
        ({"timing": {"rounds": 0}}, "timing.rounds"),
        ({"lossless": {"prompts": 8}}, "lossless.prompts"),
        ({"curve_temperatures": [-1]}, "curve_temperatures"),
        ({"decode": {"verifier": "greedy", "temperature": 0}}, "compares argmaxes"),
        ({"decode": {"temperature": 0.7}}, r"set temperatures=\[0.7\]"),
        ({"peers": {"confidence_threshold": [2.0]}}, "confidence_threshold"),
        ({"prompts": {"tokens": 0}}, "prompts.tokens"),
        ({"unknown": 1}, "unknown key"),
    ],
)
def test_bad_values_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        build(EvalConfig, {**GOOD, **changes})
