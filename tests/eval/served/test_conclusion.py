"""What follows from the speeds of a served comparison: whole commands whose lengths are those that were fastest, the
figures beside them, and the commands of other engines for drafts of ours."""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decode.common.typed_config import build
from decode.config import ModelConfig
from decode.models.describe import describe_model
from eval.config import EvalConfig
from eval.modes.served.folders import ServedDraft, prepare
from eval.modes.served.results import Conclusion, ServedSpeed
from eval.modes.served.schedule.conclusion import (
    MeasuredDraft,
    concluded,
    conclusions,
    for_others,
    for_vllm,
    launch_commands,
    measured_of,
)
from eval.modes.served.schedule.schedule import Speed
from eval.render.page import Page
from tests.train.export.saved_heads import save_head, save_padded_target
from train.export.engines import ENGINES
from train.export.engines.base import Launch, Loads

Table = dict[int, tuple[float, ...]]
"""Draft length -> tokens/s at the batch sizes 1 and 8."""


def served_draft(method: str) -> ServedDraft:
    """A draft that vLLM calls so."""
    loads = json.dumps({"method": method, "model": "a/draft", "num_speculative_tokens": 1})
    return ServedDraft("x", "x", "a/draft", method, 3, (3,), ("--speculative-config", loads))


def speeds(table: Table) -> list[Speed]:
    """Of two rounds that differ by a thousandth."""
    return [
        Speed(size, k, (speed, speed * 1.001))
        for k, both in table.items()
        for size, speed in zip((1, 8), both, strict=True)
    ]


def measured(method: str, drafted: Table, plain: Sequence[float] = (100.0, 500.0)) -> MeasuredDraft:
    """A draft of that method whose accepted tokens per round are half of its length."""
    timed = speeds({0: tuple(plain)}), speeds(drafted)
    return MeasuredDraft(served_draft(method), "a/target", ["--dtype", "float32"], *timed)


EAGLE3 = measured("eagle3", {0: (90.0, 450.0), 2: (150.0, 460.0), 4: (180.0, 300.0)})
MEDUSA = measured("medusa", {1: (120.0, 490.0), 3: (150.0, 400.0)})
SLOW = {0: (90.0, 450.0), 2: (80.0, 400.0), 4: (70.0, 300.0)}


def speculation(text: str) -> dict[str, object]:
    """What a command of vLLM says of its draft."""
    words = shlex.split(text)
    return json.loads(words[words.index("--speculative-config") + 1])


def launcher(engine: str, form: str):  # noqa: ANN201
    """The launch command of an engine by draft length."""
    how = ENGINES[engine].forms[form]
    assert isinstance(how, Loads)
    return lambda k: how.launch(Launch("a/target", Path("a/draft"), k, taps=(2, 4, 6)))


def test_vllm_s_command_is_whole_and_holds_the_schedule() -> None:
    paste = for_vllm(EAGLE3)
    assert paste.num_draft_tokens == 4
    assert shlex.split(paste.text)[:3] == ["vllm", "serve", "a/target"]
    assert shlex.split(paste.text)[-2:] == ["--dtype", "float32"]
    assert speculation(paste.text) == {
        "method": "eagle3",
        "model": "a/draft",
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [[1, 1, 4], [2, 8, 2]],
    }


def test_the_figures_are_over_the_target_alone() -> None:
    # At 8, k = 2 is faster than k = 0 with the draft loaded, and slower than the target alone.
    assert for_vllm(EAGLE3).why == (
        "batch size 1: k=4, 1.80 times the target alone (1.80 to 1.80); "
        "batch size 8: k=2, 0.92 times the target alone (0.92 to 0.92)"
    )


def test_what_may_be_faster_is_told_where_it_is_not_certain() -> None:
    unsure = measured("eagle3", {0: (90.0, 450.0), 2: (80.0, 400.0)})
    unsure = replace(unsure, drafted=[*unsure.drafted, Speed(1, 4, (300.0, 100.0)), Speed(8, 4, (300.0, 301.0))])
    first, second = for_vllm(unsure).why.split("; batch size 8: ")
    assert first.startswith("batch size 1: k=0, 0.90 times the target alone (0.90 to 0.90); k=4 was faster, 1.73 times")
    assert first.endswith(", and not beyond the error bar")
    assert second == "k=0, 0.90 times the target alone (0.90 to 0.90)"


def test_a_draft_that_is_nowhere_faster_than_the_target_alone_is_left_out() -> None:
    paste = for_vllm(measured("eagle3", SLOW))
    assert (paste.num_draft_tokens, paste.text) == (0, "vllm serve a/target --dtype float32")
    # faster than with the draft loaded and nothing drafted is not enough
    paste = for_vllm(measured("eagle3", {0: (60.0, 300.0), 2: (80.0, 400.0)}))
    assert (paste.num_draft_tokens, paste.text) == (0, "vllm serve a/target --dtype float32")


def test_medusa_gets_one_length_for_all_batch_sizes() -> None:
    # 1.2 * 0.98 = 1.176 and 1.5 * 0.8 = 1.2
    paste = for_vllm(MEDUSA)
    assert speculation(paste.text) == {"method": "medusa", "model": "a/draft", "num_speculative_tokens": 3}
    assert paste.why.startswith("over all batch sizes: k=3, 1.10 times the target alone")
    assert for_vllm(measured("medusa", {1: (90.0, 490.0)})).text == "vllm serve a/target --dtype float32"


def test_engines_of_one_user_get_the_length_of_the_smallest_batch() -> None:
    lm = measured("draft_model", {0: (90.0, 450.0), 2: (190.0, 480.0), 4: (200.0, 300.0)})
    commands = {name: launcher(name, "lm") for name in ("sglang", "trtllm", "llamacpp", "transformers")}
    found = {one.engine: one for one in for_others(lm, commands)}
    assert {name: one.num_draft_tokens for name, one in found.items()} == {
        "sglang": 2,
        "trtllm": 2,
        "llamacpp": 4,
        "transformers": 4,
    }
    assert "--spec-draft-n-max 4" in found["llamacpp"].text
    assert "max_draft_len: 2" in found["trtllm"].text
    assert "--speculative-num-steps 2" in found["sglang"].text
    assert "by vLLM's speeds" in found["llamacpp"].why


def test_tgi_speculates_over_all_batch_sizes() -> None:
    (paste,) = for_others(MEDUSA, {"tgi": launcher("tgi", "medusa")})
    assert paste.text.endswith("--speculate 3")


def test_other_engines_are_told_to_leave_it_where_nothing_pays() -> None:
    slow = replace(measured("eagle3", SLOW))
    names = ("sglang", "trtllm", "llamacpp")
    found = for_others(slow, {name: launcher(name, "eagle3") for name in names})
    assert [(one.num_draft_tokens, one.text) for one in found] == [(0, "")] * 3
    assert all(one.why.startswith("serve the target without the draft") for one in found)


def row(draft: str | None, k: int, batch_size: int, speed: float) -> ServedSpeed:
    """A speed of results.json."""
    return ServedSpeed(
        draft=draft,
        num_draft_tokens=k,
        batch_size=batch_size,
        requests=8,
        temperature=0.0,
        tokens_per_s=[speed, speed * 1.001],
        tokens_per_draft=None,
    )


ROWS = [
    *[row(None, 0, 1, 100.0), row(None, 0, 4, 400.0)],
    *[row("x", 0, 1, 90.0), row("x", 0, 4, 380.0)],
    *[row("x", 3, 1, 200.0), row("x", 3, 4, 300.0)],
    *[row("y", 3, 1, 500.0), row("y", 3, 4, 900.0)],
]


def test_rows_are_told_apart_by_draft_and_become_a_schedule() -> None:
    measured = measured_of(ROWS, served_draft("eagle3"), "a/target", ["--dtype", "float32"])
    assert measured is not None
    found = concluded(measured, {})
    assert found.schedule == [[1, 1, 3], [2, 4, 0]]
    assert [(one.batch_size, one.num_draft_tokens, round(one.over_alone, 2)) for one in found.lengths] == [
        (1, 3, 2.0),
        (4, 0, 0.95),
    ]
    (vllm,) = found.pastes
    assert vllm.text.startswith("vllm serve a/target --speculative-config ")
    assert json.loads(json.dumps(found.model_dump())) == found.model_dump()


def test_a_schedule_takes_the_target_alone_and_two_rounds() -> None:
    of_other = replace(served_draft("eagle3"), name="z")
    assert measured_of(ROWS, of_other, "a/target", []) is None
    assert measured_of([one for one in ROWS if one.draft], served_draft("eagle3"), "a/target", []) is None
    once = [one.model_copy(update={"tokens_per_s": one.tokens_per_s[:1]}) for one in ROWS]
    assert measured_of(once, served_draft("eagle3"), "a/target", []) is None


def test_engines_that_load_a_draft_are_given_it_whole(tmp_path: Path) -> None:
    target = save_padded_target(tmp_path / "target")
    save_head(tmp_path / "eagle3", target, "eagle3", taps=(2, 3, 4))
    commands = launch_commands(str(tmp_path / "eagle3"), ModelConfig(path=str(target)), "exports/x")
    assert {"sglang", "trtllm"} <= commands.keys()
    assert not {"vllm", "tgi", "transformers"} & commands.keys()
    export, launch = commands["sglang"](5).splitlines()
    assert export == (
        f"python -m train.export draft.path={tmp_path / 'eagle3'} format=sglang num_draft_tokens=5 "
        "output_dir=exports/x-sglang"
    )
    assert "--speculative-draft-model-path exports/x-sglang " in launch
    assert "--speculative-num-steps 5 " in launch
    assert "max_draft_len: 4" in commands["trtllm"](4)


def page_of(schedules: list[Any], without: str) -> Page:
    """A page with nothing on it but what is to be pasted, or why nothing is."""
    results, shown = {"schedules": schedules}, {"no_schedule": without}
    return Page("t", results, "facts.md.j2", every_table=[], template="served", shown=shown)


def test_the_page_ends_with_what_to_paste() -> None:
    measured = measured_of(ROWS, served_draft("eagle3"), "a/<target>", [])
    assert measured is not None
    found = concluded(measured, {"sglang": str})
    page, none = page_of([found.model_dump()], ""), page_of([], "time it twice")
    vllm, sglang = found.pastes
    text = page.markdown()
    assert f"### x: vLLM 0.32\n\n```\n{vllm.text}\n```\n\nbatch size 1: k=3, 2.00 times" in text
    assert f"### x: SGLang 0.5.23\n\n```\n{sglang.text}\n```\n\nover all batch sizes: k=3, 1.22 times" in text
    shown = page.html()
    assert (
        f"<pre><code>{html.escape(vllm.text).replace('&#x27;', '&#39;').replace('&quot;', '&#34;')}</code></pre>"
        in shown
    )
    assert "a/<target>" not in shown
    assert "time it twice" in none.markdown()
    assert "time it twice" in none.html()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_padded_target(tmp_path_factory.mktemp("target") / "model")


def of_a_head(target: Path, folder: Path) -> list[Conclusion]:
    """Of a random head; the target alone gives 100 and 400 tokens/s at the batch sizes 1 and 4."""
    save_head(folder / "head", target, "eagle3", taps=(2, 3, 4))
    content = {
        "mode": "served",
        "output_dir": str(folder / "report"),
        "target": {"path": str(target), "dtype": "float32"},
        "drafts": {"x": str(folder / "head")},
        "decode": {"num_draft_tokens": 3},
        "served": {"options": ["--enforce-eager"]},
    }
    cfg, known = build(EvalConfig, content), describe_model(ModelConfig(path=str(target)))
    draft = prepare(cfg, "x", known, folder / "report/exports/x")
    timed: list[tuple[str | None, int, int, float]] = [(None, 0, 1, 100.0), (None, 0, 4, 400.0)]
    timed += [("x", 0, 1, 90.0), ("x", 0, 4, 380.0)]
    timed += [("x", 3, 1, 200.0), ("x", 3, 4, 300.0)]
    return conclusions(cfg, [draft], [row(*one) for one in timed])


def test_a_command_serves_the_exported_folder_with_the_options_of_the_measurement(target: Path, tmp_path: Path) -> None:
    (found,) = of_a_head(target, tmp_path)
    vllm = found.pastes[0]
    words = shlex.split(vllm.text)
    assert words[:3] == ["vllm", "serve", str(target)]
    assert words[-3:] == ["--dtype", "float32", "--enforce-eager"]
    spoken = json.loads(words[words.index("--speculative-config") + 1])
    assert spoken["model"] == str(tmp_path / "report/exports/x")
    assert spoken["num_speculative_tokens_per_batch_size"] == [[1, 1, 3], [2, 4, 0]] == found.schedule


def test_other_engines_are_given_exports_of_their_own(target: Path, tmp_path: Path) -> None:
    (found,) = of_a_head(target, tmp_path)
    texts = {one.engine: one.text for one in found.pastes[1:]}
    assert {"sglang", "trtllm", "llamacpp"} <= texts.keys()
    for engine, text in texts.items():
        first = text.splitlines()[0]
        assert f"format={engine} num_draft_tokens=3 output_dir={tmp_path / 'report/exports/x'}-{engine}" in first
        assert f"exports/x-{engine}" in text.replace(first, "")
