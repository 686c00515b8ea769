"""Edits: what is guessed behind a change, and that the text stays what it is."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from decode import generate, load_drafter
from decode.common.errors import InputError
from decode.config import DecodeConfig, DrafterConfig, ModelConfig, SamplingConfig
from decode.drafters.untrained.edit import Alignment, EditDrafter
from decode.stage import run
from tests.tiny import save_tiny_target, tiny_llama

SOURCE = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def guesses_after(written: list[int], depth: int = 3, source: list[int] = SOURCE) -> list[list[int]]:
    alignment = Alignment(source)
    for token in written:
        alignment.follow(token)
    return alignment.guesses(depth)


@pytest.mark.parametrize(
    ("written", "guesses"),
    [
        ([], [[1, 2, 3]]),
        ([1, 2], [[3, 4, 5]]),
        ([1, 2, 60], [[4, 5, 6], [3, 4, 5]]),  # replaced, or added
        ([1, 2, 60, 61], [[5, 6, 7], [3, 4, 5]]),
        ([1, 2, 60, 3, 4], [[5, 6, 7]]),  # added
        ([1, 2, 5], [[6, 7, 8], [4, 5, 6], [3, 4, 5]]),  # [3, 4] left out
        ([1, 2, 60, 4, 5], [[6, 7, 8]]),  # replaced
        (SOURCE, []),
        ([60, 61, 62, 7, 8], [[9]]),
        ([1, 2, 3, 60, 1, 2], [[3, 4, 5]]),  # back
    ],
)
def test_the_source_is_taken_up_again_behind_every_change(written: list[int], guesses: list[list[int]]) -> None:
    assert guesses_after(written) == guesses


def test_what_was_renamed_is_drafted_as_it_was_renamed() -> None:
    """One token becomes two, and two become one: both are foreseen from the second time on."""
    source = [10, 50, 11, 12, 13, 50, 14, 70, 71, 15, 16, 50, 17, 70, 71, 18]
    wanted = [10, 80, 81, 11, 12, 13, 80, 81, 14, 90, 15, 16, 80, 81, 17, 90, 18]
    assert guesses_after(wanted[:5], 12, source) == [[13, 80, 81, 14, 70, 71, 15, 16, 80, 81, 17, 70]]
    assert guesses_after(wanted[:12], 12, source) == [wanted[12:]]
    assert guesses_after(wanted[:14], 12, source) == [wanted[14:]], "the replacement itself is followed"


@pytest.mark.parametrize("seed", range(5))
def test_two_equal_tokens_settle_where_the_source_goes_on(seed: int) -> None:
    """Of a source without repetitions, whatever was changed before."""
    draw = random.Random(seed)
    source = list(range(100, 160))
    for _ in range(200):
        begin = draw.randrange(len(source) - 2)
        written = [draw.choice([*source, 1, 2, 3]) for _ in range(draw.randrange(6))] + source[begin : begin + 2]
        (first, *_) = guesses_after(written, 5, source) or [[]]
        assert first == source[begin + 2 : begin + 7] or _is_replaced(written, first)


def _is_replaced(written: list[int], guess: list[int]) -> bool:
    """What was written instead before comes again."""
    return any(token in written for token in guess)


def test_the_text_is_that_of_plain_decoding() -> None:
    model = tiny_llama(dtype=torch.float64).requires_grad_(False)
    ids = torch.randint(0, 20, (3, 12), generator=torch.Generator().manual_seed(0))
    asked: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.5, "seed": 3, "eos_token_id": (), "batch_size": 2}
    plain = generate(model, None, ids, **asked)
    source = [token if place % 5 else 0 for place, token in enumerate(plain.sequences[0, 12:].tolist())]
    for tree in ("chain", "2x2x1"):
        out = generate(model, EditDrafter(source), ids, num_draft_tokens=3, tree=tree, audit=True, **asked)
        assert torch.equal(out.sequences, plain.sequences)
        first = [one.accepted for one in out.stats.rounds if one.row == 0]
        assert sum(first) > 15


def test_the_command_drafts_from_the_file_that_is_edited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own text given back as the source: all of it is foreseen."""
    target, old = str(save_tiny_target(tmp_path / "target")), tmp_path / "old.py"
    sampling = SamplingConfig(max_new_tokens=24, temperature=0)

    def run_with(draft: DrafterConfig, folder: str) -> None:
        run(DecodeConfig(ModelConfig(target), draft, sampling, prompt="def f():", color="never", output_dir=folder))

    run_with(DrafterConfig(), str(tmp_path / "plain"))
    printed = capsys.readouterr().out
    old.write_text(printed[: printed.rindex("\n\n")] if "\n\n" in printed else printed)
    run_with(DrafterConfig(path="edit", settings={"source": str(old)}), str(tmp_path / "edit"))
    assert "tokens per pass" in capsys.readouterr().out
    names = ("plain", "edit")
    plain, edit = ((tmp_path / name / "completion.json").read_text() for name in names)
    assert plain.split('"text"')[1].split('",')[0] == edit.split('"text"')[1].split('",')[0]


@pytest.mark.parametrize(("content", "message"), [(None, "cannot be read"), ("", "is empty")])
def test_a_source_that_cannot_be_edited_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, message: str
) -> None:
    source = tmp_path / "old.py"
    if content is not None:
        source.write_text(content)
    target = str(save_tiny_target(tmp_path / "target"))
    monkeypatch.setattr("decode.stage.load_model", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(InputError, match=message):
        run(DecodeConfig(ModelConfig(target), DrafterConfig(path="edit", settings={"source": str(source)}), prompt="a"))


def test_a_prompt_is_its_own_source() -> None:
    model = tiny_llama(dtype=torch.float64).requires_grad_(False)
    drafter = load_drafter("edit", target=model)
    out = generate(model, drafter, torch.tensor([[5, 6, 7, 8]]), max_new_tokens=4, eos_token_id=(), seed=0)
    assert out.stats.rounds[0].drafted
