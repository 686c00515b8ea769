"""No prompt comes from the training split; settings are chosen on validation text and judged on held-out text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decode.common.errors import ConfigError
from decode.config import ModelConfig
from decode.sampling.config import SamplingConfig
from distill.corpora.configured import load_corpus
from distill.corpora.corpus import Split
from distill.prompts.held_out_count import LEAST_PROMPTS
from eval.arms import ours as build_arms
from eval.arms.vllm_engines import Engines
from eval.config import EvalConfig
from eval.measure import cells as cell_run
from eval.measure.cells import Cell, Point
from eval.modes.compare import mode
from eval.modes.compare.arm_set import Target
from eval.modes.compare.decoders import Decoders, LoadedDecoders
from eval.modes.families import mode as families_mode
from eval.modes.families.measuring import Timing
from eval.prompts.held_out import as_many_as, load_prompts
from eval.prompts.kinds import TextPrompts
from eval.prompts.prompt import Prompt
from eval.results.compared import Choice
from eval.results.figures import Drafted
from tests.eval.samples import FakeArm, config, prompts
from tests.tiny import tiny_tokenizer

SHARES = {"heldout_share": 0.4, "validation_share": 0.3}


def corpus(folder: Path, **changes: Any) -> EvalConfig:
    """Twenty sources with docstrings, about a third of them in each split."""
    for number in range(20):
        story = f"Module {number} says what it does, and then says it again in other words."
        (folder / f"m{number}.py").write_text(f'"""{story}"""\n\n\ndef f{number}(x):\n    return x + {number}\n')
    values = {"data": {"name": "text", "path": str(folder), **SHARES}, "prompts": {"tokens": 8}}
    values |= {"timing": {"prompts": 2, "screening_prompts": 2, "choose_k": [1, 2]}, "lossless": SMALL}
    return config(**{**values, **changes})


SMALL = {"prompts": 3, "tokens": 4, "other_prompts": 1, "other_tokens": 1}


def documents(cfg: EvalConfig, split: Split) -> set[str]:
    return {document.id for document in load_corpus(cfg.data).documents(split)}


def origins(some: Sequence[Prompt]) -> set[str]:
    assert some
    return {prompt.document for prompt in some}


def test_a_reports_prompts_are_held_out_and_those_of_settings_are_others(tmp_path: Path) -> None:
    cfg = corpus(tmp_path)
    sets = load_prompts(cfg, tiny_tokenizer(), 256)
    assert (len(sets.reported), len(sets.timed), len(sets.screening)) == (3, 2, 2)
    assert origins(sets.reported) <= documents(cfg, "heldout")
    assert origins(sets.screening) <= documents(cfg, "validation")


def test_questions_that_settings_are_chosen_on_are_not_reported(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(f'{{"turns": ["question {i}"]}}' for i in range(9)))
    cfg = config(prompts={"file": str(file)}, timing={"prompts": 2, "screening_prompts": 2}, lossless=SMALL)
    sets = load_prompts(cfg, tiny_tokenizer(), 256)
    assert (len(sets.reported), len(sets.timed), len(sets.screening)) == (3, 2, 2)
    assert not {prompt.id for prompt in sets.reported} & {prompt.id for prompt in sets.screening}


def chats(folder: Path, number: int) -> dict[str, Any]:
    """A corpus of conversations, split as by default."""
    lines = ({"messages": [{"role": "user", "content": f"What is {i} and why?"}]} for i in range(number))
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return {"data": {"name": "jsonl", "path": str(folder / "chats.jsonl")}}


def test_a_report_on_few_held_out_chats_uses_what_there_is(tmp_path: Path) -> None:
    """220 chats hold out 5%, about eleven, and a report by default asks for 96, 12 of them timed."""
    cfg = config(**chats(tmp_path, 220))
    sets = load_prompts(cfg, tiny_tokenizer(), 512)
    there = {document.id for document in load_corpus(cfg.data).documents("heldout")}
    assert {prompt.id for prompt in sets.reported} == there
    assert LEAST_PROMPTS <= len(there) < 12
    assert sets.num_timed == len(sets.timed) == len(there)
    assert 0 < len(sets.screening) <= 8


def test_too_few_held_out_prompts_are_refused_with_what_can_be_done(tmp_path: Path) -> None:
    """Other shares cannot be: the drafts were trained by these."""
    data = chats(tmp_path, 60)
    with pytest.raises(ConfigError, match=r"gives (\d) prompts, of \1 documents, and 8 are wanted at least") as error:
        load_prompts(config(**data), tiny_tokenizer(), 512)
    said = str(error.value)
    assert "share" not in said
    assert "prompts.tokens" not in said  # a chat's prompt has its own length
    asked = dict(word.split("=") for word in said.rsplit(": ", 1)[1].split())
    lossless = {name.removeprefix("lossless."): int(n) for name, n in asked.items() if name.startswith("lossless.")}
    few = config(**data, lossless=lossless, timing={"prompts": int(asked["timing.prompts"])})
    assert len(load_prompts(few, tiny_tokenizer(), 512).reported) == lossless["prompts"]


def test_a_split_without_documents_is_refused_with_what_can_be_done(tmp_path: Path) -> None:
    none = corpus(tmp_path, data={"name": "text", "path": str(tmp_path), "heldout_share": 0.0})
    for load in (lambda: load_prompts(none, tiny_tokenizer(), 256), lambda: as_many_as(none, tiny_tokenizer(), 5)):
        with pytest.raises(ConfigError, match="gives 0 prompts, of 0 documents.*prompts.file"):
            load()


@pytest.mark.parametrize(("there", "split"), [(8, (6, 2)), (20, (15, 5)), (80, (72, 8)), (104, (96, 8))])
def test_from_eight_questions_up_a_report_uses_what_there_is(
    tmp_path: Path, there: int, split: tuple[int, int]
) -> None:
    file = questions(tmp_path, there)
    sets = load_prompts(config(prompts={"file": file}), tiny_tokenizer(), 512)
    assert (len(sets.reported), len(sets.screening)) == split
    assert sets.num_timed == min(12, split[0])


def test_too_few_questions_are_refused_with_what_can_be_done(tmp_path: Path) -> None:
    file = {"file": questions(tmp_path, 7)}
    with pytest.raises(ConfigError, match="gives 7 questions, and a report wants 8 at least") as error:
        load_prompts(config(prompts=file), tiny_tokenizer(), 512)
    few = "lossless.prompts=6 timing.prompts=6 timing.screening_prompts=1"
    assert str(error.value).endswith(few)
    timing, lossless = {"prompts": 6, "screening_prompts": 1}, {"prompts": 6, "other_prompts": 6}
    sets = load_prompts(config(prompts=file, timing=timing, lossless=lossless), tiny_tokenizer(), 512)
    assert (len(sets.reported), len(sets.screening)) == (6, 1)


def test_questions_that_drafts_have_learned_from_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of held-out conversations, and of no conversation, are new."""
    answer = {"role": "assistant", "content": "yes"}
    rows = [{"messages": [{"role": "user", "content": f"question {i} "}, answer]} for i in range(40)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"name": "jsonl", "path": str(tmp_path / "chats.jsonl"), "heldout_share": 0.25}
    cfg = config(data=data, prompts={"file": questions(tmp_path, 60)})
    load_prompts(cfg, tiny_tokenizer(), 512)
    learned = 40 - len(documents(cfg, "heldout"))
    assert f"questions.jsonl: {learned} of its 60 questions open conversations" in caplog.text
    caplog.clear()
    load_prompts(config(data=data | {"path": "elsewhere"}, prompts=asdict(cfg.prompts)), tiny_tokenizer(), 512)
    assert not caplog.text


def questions(folder: Path, number: int) -> str:
    file = folder / "questions.jsonl"
    file.write_text("\n".join(f'{{"turns": ["question {i}"]}}' for i in range(number)))
    return str(file)


def test_a_certificates_prompts_are_held_out(tmp_path: Path) -> None:
    cfg = corpus(tmp_path)
    assert origins(as_many_as(cfg, tiny_tokenizer(), 50)) == documents(cfg, "heldout")


def target(*kinds: str) -> Target:
    """Of nothing but texts."""
    return Target("target", ModelConfig(), cast(Any, None), kinds, {"d": "lm"}, 256)


def test_the_suite_of_families_reports_held_out_text_and_chooses_on_validation_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"batch_sizes": [1, 2], "batches_timed": [5, 1], "screening_batches": 1}
    cfg = corpus(tmp_path, mode="families", drafts={}, families=sizes)
    monkeypatch.setattr(families_mode, "chat_tokenizer", lambda _: tiny_tokenizer())
    target: Any = SimpleNamespace(max_positions=512)
    reported, screening = families_mode._prompts(cfg, target)
    assert (len(reported), len(screening)) == (5, 2)
    assert origins(reported) <= documents(cfg, "heldout")
    assert origins(screening) <= documents(cfg, "validation")


class NoMeter:
    """Component times that nobody asks for."""

    def __init__(self, *_: Any) -> None:
        pass

    def warm_up(self) -> None:
        pass

    def sample(self) -> None:
        pass

    def result(self) -> Any:
        return dict.fromkeys((("d", 1), ("d", 2)))


def rows_made_up(monkeypatch: pytest.MonkeyPatch, seen: list[Drafted]) -> None:
    """No component times and no figures: `seen` gets what rows were made of."""

    def row(one: Drafted, *_: Any) -> Any:
        seen.append(one)
        return SimpleNamespace(model_dump=lambda: {"made_of": one.setting})

    monkeypatch.setattr(cell_run, "CostMeter", NoMeter)
    monkeypatch.setattr(cell_run, "make_row", row)


REPORTED, SCREENING = prompts(9, "reported"), prompts(9, "screening", tokens=5)
TEXTS = {
    "code": TextPrompts(REPORTED, SCREENING),
    "prose": TextPrompts(prompts(9, tokens=6), prompts(9, tokens=7)),
}


def ids(some: Sequence[Prompt]) -> set[tuple[int, ...]]:
    return {prompt.ids for prompt in some}


def loaded() -> LoadedDecoders:
    sizes = {"batch_sizes": [1, 2], "batches_timed": [5, 3], "screening_batches": 2}
    sizes |= {"arms": {"a": {"num_draft_tokens": 1}, "b": {"tree": "2x1"}, "c": {"num_draft_tokens": 2}}}
    cfg = config(decoders=sizes, timing={"rounds": 1, "screening_tokens": 6}, decode={"max_new_tokens": 8})
    model: Any = SimpleNamespace(dtype="torch.bfloat16", parameters=list)
    return LoadedDecoders(Decoders(cfg), target("code", "prose"), model, {"d": object()}, Engines(), TEXTS)


def test_a_cell_of_decoders_times_its_own_reported_text(monkeypatch: pytest.MonkeyPatch) -> None:
    arm, seen = FakeArm("x"), []
    monkeypatch.setattr(LoadedDecoders, "warm_arms", lambda *_: [arm])
    monkeypatch.setattr(LoadedDecoders, "left_out", lambda *_: {})
    rows_made_up(monkeypatch, seen)
    cell = Cell(2, 1.0, "code")
    found = mode.measure(loaded(), cell, Choice.model_construct(best={"ours": "b"}, best_chain="a"))
    assert arm.asked == ids(REPORTED[:6])  # three batches of two
    assert found["prompts"] == 6
    assert found["mean_tokens"] == 4
    assert [(one.settings.tree, one.settings.num_draft_tokens) for one in seen] == [
        ("2x1", SamplingConfig().num_draft_tokens),
        ("chain", 1),
    ]


def test_settings_of_decoders_are_chosen_on_the_screening_prompts_of_both_texts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arms = {name: FakeArm(name, pace) for name, pace in {"a": 0.3, "b": 0.1, "c": 0.2}.items()}
    monkeypatch.setattr(LoadedDecoders, "candidates", lambda *_: {"ours": arms})
    found = loaded().choose(Cell(2, 1.0, "code"))
    assert (found["best"], found["best_chain"]) == ({"ours": "b"}, "c")  # b is a tree
    assert found["tokens_per_s"]["ours"] == pytest.approx({"a": 2 / 0.6, "b": 10.0, "c": 5.0})
    for arm in arms.values():
        assert arm.asked == ids(SCREENING[:4]) | ids(TEXTS["prose"].screening[:4])
        assert {call[2] for call in arm.calls} == {6}


def race(monkeypatch: pytest.MonkeyPatch) -> tuple[Timing, dict[str, FakeArm]]:
    """Two lengths of one draft, of which 2 is the faster."""
    arms: dict[str, FakeArm] = {}

    def arm(name: str, *_: Any) -> FakeArm:
        return arms.setdefault(name, FakeArm(name, 0.1 if name.endswith("k=2") else 0.3))

    monkeypatch.setattr(build_arms, "OurArm", arm)
    monkeypatch.setattr(build_arms, "TransformersArm", arm)
    rows_made_up(monkeypatch, [])
    sizes = {"batch_sizes": [2], "batches_timed": [3], "screening_batches": 2}
    timing = {"rounds": 1, "screening_tokens": 6, "choose_k": [1, 2]}
    cfg = config(families=sizes, timing=timing, decode={"max_new_tokens": 8})
    model: Any = SimpleNamespace(dtype="torch.bfloat16", parameters=list)
    facts: Any = {"d": SimpleNamespace(family="lm")}
    return Timing(cfg, model, {"d": SimpleNamespace(most_tokens=None)}, facts, REPORTED, SCREENING), arms


def test_draft_lengths_of_families_are_chosen_on_screening_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, arms = race(monkeypatch)
    assert subject.choose(Point(2, 1.0))["best"] == {"d": "2"}
    assert set(arms) == {"d, k=1", "d, k=2"}
    assert all(arm.asked == ids(SCREENING[:4]) for arm in arms.values())


def test_families_are_timed_on_reported_prompts_at_the_length_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, arms = race(monkeypatch)
    found = subject.measure(Cell(2, 1.0, "text"), Choice.model_construct(best={"d": "2"}))
    assert found["prompts"] == 6
    assert found["rows"] == [{"made_of": "k=2"}]
    assert set(arms) == {"own autoregressive loop", "transformers generate", "d"}
    for arm in arms.values():
        *warm, first, second, third = [set(call[0]) for call in arm.calls]
        assert warm == [ids(SCREENING[:2])] * 2
        assert first | second | third == ids(REPORTED[:6])
