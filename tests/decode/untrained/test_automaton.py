"""Matches against a search of the whole text, and constant work a token."""

from __future__ import annotations

import random

import pytest

from decode.drafters.untrained.index.automaton import DEEPEST, Cursor, Match, SuffixAutomaton


def longest_match(text: list[int], places: list[int], corpus: list[int]) -> int:
    """Most tokens at the end of `text` that `corpus` ends with at one of `places`."""

    def equal(place: int) -> int:
        length = 0
        while length < min(place, len(text)) and text[-1 - length] == corpus[place - 1 - length]:
            length += 1
        return length

    return max((equal(place) for place in places), default=0)


def most_recent(text: list[int], length: int, places: list[int], corpus: list[int]) -> int:
    """The last of `places` at which `corpus` ends with the last `length` tokens of `text`."""
    return max(place for place in places if corpus[max(0, place - length) : place] == text[len(text) - length :])


@pytest.mark.parametrize("num_tokens", [2, 4, 20])
def test_the_longest_and_most_recent_match_is_found(num_tokens: int) -> None:
    """After every token: the longest suffix that occurs earlier, at its last place, and every shorter match that occurs
    later, at its last place."""
    draw = random.Random(num_tokens)
    for _ in range(20):
        text: list[int] = []
        index = SuffixAutomaton()
        for _ in range(60):
            token = draw.randrange(num_tokens)
            text.append(token)
            index.extend([token])
            places = list(range(1, len(text)))
            found = list(index.matches())
            longest = longest_match(text, places, text)
            assert [one.length for one in found[:1]] == [longest][: bool(longest)]
            for one in found:
                assert one.end == most_recent(text, one.length, places, text)
            wanted = {most_recent(text, length, places, text) for length in range(1, longest + 1)}
            assert {one.end for one in found} == wanted


def test_a_cursor_finds_the_longest_match_in_other_texts() -> None:
    """Also while those grow, which splits the states it stands on."""
    draw = random.Random(0)
    for _ in range(20):
        corpus = [draw.randrange(3) for _ in range(20)]
        index, text = SuffixAutomaton(corpus), list[int]()
        cursor = Cursor(index)
        for step in range(40):
            text.append(draw.randrange(3))
            cursor.move(text[-1:])
            if step % 3 == 0:
                corpus.append(draw.randrange(3))
                index.extend(corpus[-1:])
                cursor = cursor if step % 2 else _at_end(index, text)
            (first, *_) = [*cursor.matches(), Match(0, 0)]
            before = len(corpus) - (step % 3 == 0)  # what grew since may make a longer match, which it need not know
            assert longest_match(text, list(range(1, before + 1)), corpus) <= max(first.length, 0) or step % 3 == 0
            assert corpus[first.end - first.length : first.end] == text[len(text) - first.length :]


def _at_end(index: SuffixAutomaton, text: list[int]) -> Cursor:
    cursor = Cursor(index)
    cursor.move(text)
    return cursor


def test_one_token_again_and_again_costs_no_more_than_others() -> None:
    """Such a text nests as many matches as it is long."""
    index = SuffixAutomaton([7] * 3000)
    assert list(index.matches()) == [Match(2999, 2999)]
    assert len(list(index._path())) == DEEPEST
    assert len(index._next) == 3001
