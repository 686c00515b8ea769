"""Several runs of one report: what is pooled how, what is refused, and what README then leads with."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decode.common.errors import InputError
from eval.publish import END, START, fill_block, publish
from eval.render.pooled import sides
from eval.render.report_page import page_of, render_block
from eval.results.pooling import DEFINITIONS, pool
from eval.results.reported import Report
from eval.results.schema import read_results
from tests.commands import ROOT
from tests.eval.reports import machine, peer, report, row, three_runs, write


def pooled_row() -> dict[str, Any]:
    return pool(three_runs())["rows"][0]


def test_a_speedup_is_the_median_over_runs_and_prompts_with_an_interval_over_both() -> None:
    found = pooled_row()
    assert found["speedup"] == 4.0  # of 4, 2, 8, 4, 4 and 2
    # The run of 8 and 4 is drawn twice or three times in 7 of 27 resamples, the first prompt alone in 1 of 4: 8 in 6.5%
    # of them. It is drawn at most once in 20 of 27, the second prompt alone in 1 of 4: 2 in 18.5%.
    assert found["speedup_ci95"] == [2.0, 8.0]
    assert found["speedup_by_run"] == [3.0, 6.0, 3.5]


def test_runs_that_agree_are_no_more_prompts_than_one_run() -> None:
    """Alpha is the same in all three: drawn for every run anew, the documents would give a narrower interval."""
    pairs = [[float(i % 2), 1.0] for i in range(8)]
    alone = report([row(alpha_by_document=pairs)])
    runs = [{**alone, "environment": machine(started=str(day))} for day in range(3)]
    found = pool(runs)["rows"][0]
    assert found["alpha"] == 0.5
    assert found["alpha_ci95"] == [1 / 8, 7 / 8]  # Binomial(8, 1/2): P(0) = 0.4%, P(<= 1) = 3.5%
    counts = np.random.default_rng(0).binomial(24, 0.5, 100_000) / 24
    assert np.quantile(counts, 0.025) > 0.25  # what three times as many documents would say


def test_rows_of_other_settings_are_not_pooled_as_one() -> None:
    rows = [row(setting=None, tau=2.0), row(setting="adaptive", tau=6.0)]
    runs = [{**report(rows), "environment": machine(started=str(day))} for day in range(3)]
    assert [one["setting"] for one in pool(runs)["rows"]] == [None, "adaptive"]


def test_counts_are_added_and_the_rest_are_medians_over_runs() -> None:
    found = pooled_row()
    assert (found["mismatches"], found["near_ties"], found["tokens_checked"]) == (0, 4, 300)
    assert (found["dtype_flips"], found["dtype_tokens_compared"], found["tokens"]) == (3, 60, 60)
    assert found["prompts"] == 2
    assert (found["ttft_s"], found["baseline_tokens_per_s"]) == (0.5, 2.5)
    assert found["tau"] == 2.0
    assert found["alpha"] == 6 / 8
    unchecked = report([row(mismatches=None)])
    assert pool([unchecked, *three_runs()[1:]])["rows"][0]["mismatches"] is None


def test_a_prompt_that_one_run_could_not_time_is_left_out_of_all() -> None:
    runs = three_runs()
    runs[0]["rows"][0]["seconds_by_prompt"] = [None, [0.4, 0.2]]
    assert pool(runs)["rows"][0]["speedup"] == 2.0  # the second prompt's 2, 4 and 2
    assert pool(runs)["rows"][0]["speedup_ci95"] is None  # three runs of one prompt
    for run in runs:
        run["rows"][0]["seconds_by_prompt"] = [None, None]
    assert pool(runs)["rows"][0]["speedup"] is None


def test_a_peer_is_pooled_at_the_best_setting_of_each_run() -> None:
    runs = three_runs()
    other = {"num_assistant_tokens": 5, "assistant_confidence_threshold": 0.4}
    runs[1]["peers"] = [peer([[0.5, 0.1], [0.8, 0.2]], setting=other, ratio_ours_over_peer=4.5)]
    (found,) = pool(runs)["peers"]
    assert found["ratio_ours_over_peer"] == pytest.approx(3.0)  # of 3, 1, 5, 4, 3 and 1
    assert found["ratio_by_run"] == [2.0, 4.5, 2.0]
    assert "k=3, threshold 0 or k=5, threshold 0.4" in page_of(pool(runs)).markdown()


def test_the_resamples_are_as_many_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "2,000 resamples" in DEFINITIONS["ci95"]
    seen: list[int] = []
    monkeypatch.setattr("eval.results.pooling.bootstrap_crossed", lambda *_, **given: seen.append(len(given)))
    pooled_row()
    assert set(seen) == {0}  # the default, which test_statistics counts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": {**report()["target"], "fingerprint": "g"}}, "target.fingerprint is 'f' .*'g' in the second"),
        ({"target": {**report()["target"], "dtype": "float32"}}, "target.dtype is 'bfloat16' .*'float32'"),
        ({"fingerprints": {"mine": "1", "head": "3"}}, "drafts.head is '2' .*'3'"),
        ({"fingerprints": {"mine": "1"}}, "drafts.head is '2' .*'unset'"),
        ({"prompts": {**report()["prompts"], "sha256": "q"}}, "prompts.sha256 is 'p' .*'q'"),
        ({"settings": {"decode": {"num_draft_tokens": 2}, "seed": 1}}, "settings.seed is 0 .*1 in the second"),
        ({"settings": {"decode": {"num_draft_tokens": 3}, "seed": 0}}, "is 2 .*3 in .*timing.choose_k=.. decode.num"),
        ({"rows": [row()]}, "rows is "),
        ({"rows": []}, "run1.* holds no row"),
        ({"rows": [row(batch_size=2), *report()["rows"][1:]]}, "rows is "),
        ({"peers": [{**report()["peers"][0], "version": "6"}]}, "peers is "),
        ({"peers": []}, "peers is "),
        ({"environment": machine("B")}, "run0.* and .*run1.* are one run, which began at 2026-01-01"),
        ({"runs": [1, 2]}, "pooled already, from 2 runs"),
        ({"mode": "decoders"}, "mode=decoders, and reports alone"),
    ],
)
def test_what_is_not_another_run_of_the_same_is_refused(tmp_path: Path, changes: dict, message: str) -> None:
    first = report()
    other = {**report(environment=machine(started="2026-01-02")), **changes}
    with pytest.raises(InputError, match=message):
        publish(write(tmp_path, [first, other]), tmp_path / "page")
    assert not (tmp_path / "page.json").exists()


@pytest.mark.parametrize("lacking", ["settings", "fingerprints", "started"])
def test_results_of_an_earlier_version_are_published_alone_but_not_pooled(tmp_path: Path, lacking: str) -> None:
    old = report()
    (old["environment"] if lacking == "started" else old).pop(lacking)
    files = write(tmp_path, [report(), old])
    with pytest.raises(InputError, match=f"run1.* lacks .*{lacking}"):
        publish(files, tmp_path / "page")
    assert [file.name for file in publish(files[1:], tmp_path / "page")] == ["page.json", "page.md"]


def test_seconds_that_cannot_be_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    runs = three_runs()
    for run in runs:
        run["rows"][0]["seconds_by_prompt"] = [[0.4, 0.0], [0.4, 0.2]]
    with pytest.raises(InputError, match="edited or cut"):
        publish(write(tmp_path, runs), tmp_path / "page", readme_of(tmp_path))
    assert not (tmp_path / "page.json").exists()


def test_one_file_twice_is_one_run(tmp_path: Path) -> None:
    (file,) = write(tmp_path, [report()])
    with pytest.raises(InputError, match="are one run"):
        publish([file, file], tmp_path / "page")


def readme_of(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(f"# Title\n{START}\nold\n{END}\ntail\n")
    return folder / "README.md"


def test_three_runs_fill_the_readme_and_fewer_leave_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    readme, files = readme_of(tmp_path), write(tmp_path, three_runs())
    before = readme.read_text()
    for fewer in (files[:1], files[:2]):
        publish(fewer, tmp_path / "docs/page")
        assert readme.read_text() == before
    publish(files, tmp_path / "docs/page")
    text = readme.read_text()
    assert "old" not in text
    assert "[Full results](docs/page.md)" in text
    assert "2.0 to 3.0 times as fast" in text  # the head
    assert "One process" not in text
    named = readme_of(tmp_path / "other")
    publish(files[:1], tmp_path / "docs/page", named)
    assert "One process measured this" in named.read_text()


def test_what_was_pooled_is_read_back_and_rendered_alike(tmp_path: Path) -> None:
    publish(write(tmp_path, three_runs()), tmp_path / "page", readme_of(tmp_path))
    again = read_results(tmp_path / "page.json")
    assert page_of(again).markdown(is_published=True) == (tmp_path / "page.md").read_text()
    publish([tmp_path / "page.json"], tmp_path / "copy", tmp_path / "README.md")
    assert (tmp_path / "copy.md").read_text() == (tmp_path / "page.md").read_text()
    assert [run["environment"]["cpu"] for run in again["runs"]] == ["A", "B", "A"]
    assert "seconds_by_prompt" not in again["runs"][0]["rows"][0]  # pairs stay with the runs
    again["runs"][0]["rows"][0]["draft"] = "another"
    (tmp_path / "page.json").write_text(json.dumps(again))
    with pytest.raises(InputError, match="edited or cut"):
        publish([tmp_path / "page.json"], tmp_path / "copy", tmp_path / "README.md")


def test_the_block_leads_with_what_travels_and_gives_the_speedup_as_a_range() -> None:
    text = render_block(pool(three_runs()))
    travels, speed = text.split("What does not is the speedup.")
    assert travels.startswith("What travels from machine to machine, at T=1, batch 1:")
    assert "|  | mine, draft LM | head, best head |" in travels
    assert "| alpha | 0.750 [0.500, 1.000] | 0.750 [0.500, 1.000] |" in travels
    assert "| tokens per target pass | 2.00 [1.50, 2.50] at k=2 | 2.00 [1.50, 2.50] at k=2 |" in travels
    assert "| ours over transformers assisted | 2.00 [1.00, 3.00]; by run 2.0 | – |" in travels
    assert "0 mismatches, 4 near-ties in 300 tokens | 0 mismatches, 3 near-ties in 300 tokens" in travels
    assert "In 3 runs on A, 2 cores, 2 threads (2 runs); B, 2 cores, 2 threads (1 run):" in speed
    assert "- `mine` makes the target **3.0 to 6.0 times as fast** as without a draft (4.00 [2.00, 8.00] over" in speed
    assert "- Without a draft it makes 1 to 2 tokens/s (own autoregressive loop)." in speed
    assert "| 1 | mine | 2 | 0.750 [0.500, 1.000] | 2.00 | 4.00 [2.00, 8.00]" in speed
    assert "| 3.0 to 6.0 |" in speed
    assert "\n\n| T | draft | k |" in speed  # else the list would swallow it
    assert "`python -m eval`" in speed


def test_the_page_has_every_run_with_machine_date_and_speeds() -> None:
    text = page_of(pool(three_runs())).markdown()
    assert "| B, 2 cores, 2 threads | 2026-01-02 10:00 | 1 | 6.00 [2.00, 4.00] | 2.00 [2.00, 4.00] | 0123456 |" in text
    assert text.count("2026-01-0") == 3
    assert "Brackets are 95% intervals over runs and prompts." in text
    assert "One process" not in text
    assert "Machines: A, 2 cores, 2 threads (2 runs); B" in text
    assert "30 s for 3 runs" in text


def test_the_best_head_is_the_one_of_most_tokens_per_pass() -> None:
    rows = [row(), row("a", drafter="mtp", tau=1.5), row("b", drafter="eagle3", tau=1.9), row("c", tau=9.0)]
    rows.append(row("cold", drafter="mtp", temperature=0.0, tau=9.0))
    found = Report.model_validate(report(rows))
    assert [one.draft for one in sides(found, found.rows[0])] == ["mine", "b"]
    assert [one.draft for one in sides(found, found.rows[1])] == ["a", "c"]
    found = Report.model_validate(report(rows[:1]))
    assert [one.draft for one in sides(found, found.rows[0])] == ["mine"]


def test_one_process_says_so_on_its_page() -> None:
    assert "One process measured this" in page_of(report()).markdown()


def test_pooling_changes_no_run() -> None:
    runs = three_runs()
    before = copy.deepcopy(runs)
    pool(runs)
    assert runs == before


@pytest.mark.slow
def test_the_command_takes_several_files_and_says_what_it_wrote(tmp_path: Path) -> None:
    files, readme = write(tmp_path, three_runs()), readme_of(tmp_path)
    command = [sys.executable, "-m", "eval.publish", *map(str, files), str(tmp_path / "page"), "--readme", str(readme)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"wrote {tmp_path / 'page.json'}, {tmp_path / 'page.md'}, {readme}\n"
    done = subprocess.run([*command[:3], str(files[0]), *command[3:]], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, "are one run" in done.stderr) == (2, True)


def test_the_readme_holds_what_the_published_results_render() -> None:
    results = read_results(ROOT / "docs/results/smollm2.json")
    block, text = render_block(results), (ROOT / "README.md").read_text()
    assert fill_block(text, f"{block}\n\n[Full results](docs/results/smollm2.md)", ROOT / "README.md") == text
