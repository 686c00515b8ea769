"""Prompt lookup: what it guesses, from which texts, and that the text stays what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from decode import generate, load_drafter
from decode.common.errors import ConfigError
from decode.config import DecodeConfig, DrafterConfig, ModelConfig, SamplingConfig
from decode.drafters.untrained.config import NgramConfig
from decode.drafters.untrained.ngram import NgramDrafter, NgramText
from decode.loop import Loop
from decode.requests import Request
from decode.stage import run
from tests.tiny import save_tiny_target, tiny_llama

pytestmark = pytest.mark.usefixtures("uncaptured")

PERIOD = [5, 9, 2, 7]


def text_of(tokens: list[int], least_match: int = 1) -> NgramText:
    text = NgramDrafter(NgramConfig(least_match)).begin(tokens[:3])
    text.extend(tokens[3:])
    return text


def test_what_followed_the_longest_match_is_guessed_first() -> None:
    """[1, 2, 3] is longer than the later [2, 3], and that than the last [3]."""
    text = text_of([1, 2, 3, 40, 41, 9, 2, 3, 50, 51, 3, 60, 61, 1, 2, 3])
    assert [guess[:2] for guess in text.guesses(4, 8)] == [[40, 41], [50, 51], [60, 61]]
    assert text.guesses(4, 1) == [[40, 41, 9, 2]]


def test_of_equal_matches_the_last_one_counts() -> None:
    assert text_of([1, 2, 40, 1, 2, 50, 1, 2]).guesses(1, 8) == [[50]]


def test_a_split_keeps_its_place() -> None:
    """[1, 2] and [9, 1, 2] stood at the same places until the last token."""
    assert text_of([9, 1, 2, 40, 41, 8, 1, 2]).guesses(2, 8) == [[40, 41]]


def test_nothing_is_guessed_from_matches_that_are_too_short() -> None:
    tokens = [1, 2, 3, 40, 2, 3]
    assert text_of(tokens, least_match=2).guesses(1, 8) == [[40]]
    assert text_of(tokens, least_match=3).guesses(1, 8) == []


def test_a_text_that_repeats_itself_is_guessed_as_far_as_wanted() -> None:
    assert text_of(PERIOD * 2).guesses(10, 1) == [(PERIOD * 3)[:10]]
    assert text_of([4, 4, 4]).guesses(5, 1) == [[4] * 5]


def test_memory_is_of_ended_requests() -> None:
    """And no guess runs from one into the next."""
    drafter = NgramDrafter(NgramConfig(least_match=2, memory=100))
    for tokens in ([1, 2, 3], [3, 4, 1, 2, 7, 8]):
        drafter.end(drafter.begin(tokens))
    text = drafter.begin([9, 1, 2])
    assert text.guesses(4, 8) == [[7, 8]]
    text.extend([3])
    assert text.guesses(4, 8) == [], "what follows [1, 2, 3] is another text"
    assert NgramDrafter(NgramConfig(memory=100)).begin([1, 2]).guesses(4, 8) == [], (
        "another drafter knows nothing of it"
    )


def test_memory_forgets_what_is_long_past() -> None:
    drafter = NgramDrafter(NgramConfig(least_match=2, memory=20))
    for number in range(10):
        drafter.end(drafter.begin([number, number, *range(20, 30)]))
    known = [number for number in range(10) if drafter.begin([number, number]).guesses(3, 1)]
    assert 2 <= len(known) <= 4
    assert known[-1] == 9


@pytest.mark.parametrize("settings", [{}, {"tree": "dynamic", "tree_nodes": 6}, {"adaptive": True}], ids=str)
def test_the_text_is_that_of_plain_decoding(settings: dict[str, Any]) -> None:
    """Rows that are taken over by waiting requests, twice, so that the second call finds the first one's texts."""
    model = tiny_llama(dtype=torch.float64).requires_grad_(False)
    ids = torch.randint(0, 20, (3, 12), generator=torch.Generator().manual_seed(0))
    asked: dict[str, Any] = {"max_new_tokens": 60, "temperature": 0.3, "seed": 3, "eos_token_id": (), "batch_size": 2}
    plain = generate(model, None, ids, **asked)
    drafter = load_drafter("ngram", target=model, memory=1000)
    first, second = (generate(model, drafter, ids, num_draft_tokens=4, audit=True, **asked, **settings) for _ in "12")
    assert torch.equal(first.sequences, plain.sequences)
    assert torch.equal(second.sequences, plain.sequences)
    # an adaptive call may have learned from the first one that lookups fail
    assert second.stats.tau > first.stats.tau + 0.1 or "adaptive" in settings, "every text was in the memory"


def test_a_text_that_was_written_before_comes_in_few_passes() -> None:
    model = tiny_llama(dtype=torch.float64).requires_grad_(False)
    asked: dict[str, Any] = {"max_new_tokens": 60, "temperature": 0, "eos_token_id": ()}
    drafter = load_drafter("ngram", target=model, memory=1000)
    first, second = (generate(model, drafter, torch.tensor([[3, 4]]), num_draft_tokens=4, **asked) for _ in "12")
    assert torch.equal(first.sequences, second.sequences)
    assert second.stats.tau > 4
    assert first.stats.tau < 2


def test_each_request_has_a_text_of_its_own() -> None:
    """Also where it takes over a row: the drafter has read what stands there, and nothing else."""
    model = tiny_llama(dtype=torch.float64).requires_grad_(False)
    prompts = [[11], [6, 7], [8, 9, 10], [1, 2, 3, 4, 5]]
    drafter = NgramDrafter()
    loop = Loop(model, drafter, Request(prompts, 12, batch_size=2, seed=1))
    texts, _ = loop.run()
    for row, request in enumerate(loop.rows.seated):
        read, text = drafter._text(row).index.text, texts[request]
        assert read == text[: len(read)]
        assert len(read) > len(text) - 6


def test_rounds_without_a_guess_are_plain() -> None:
    model = tiny_llama(dtype=torch.float64).requires_grad_(False)
    drafter = load_drafter("ngram", target=model, least_match=50)
    out = generate(model, drafter, torch.tensor([[1, 2, 3]]), max_new_tokens=10, eos_token_id=(), seed=0)
    assert {one.drafted for one in out.stats.rounds} == {0}


def test_the_command_drafts_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(save_tiny_target(tmp_path / "target"))
    draft = DrafterConfig(path="ngram", settings={"least_match": 1})
    run(DecodeConfig(ModelConfig(target), draft, SamplingConfig(max_new_tokens=8), prompt="a b a b", color="never"))
    assert "tokens per pass" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "settings", "message"),
    [
        ("ngram", {"least_match": 0}, "least_match=0.*at least 1"),
        ("ngram", {"memory": -1}, "memory=-1 is negative"),
        ("ngram", {"memry": 5}, "Did you mean 'draft.settings.memory'"),
        ("runs/x/draft", {"memory": 5}, "without weights.*runs/x/draft"),
        (None, {"memory": 5}, "without weights"),
    ],
)
def test_settings_that_make_no_sense_are_refused(path: str | None, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DrafterConfig(path=path, settings=settings)
