"""Known bugs of lookup drafts, as patches of ours: none can change a text, all of them cost acceptance unnoticed."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from decode.drafters.untrained import memory
from decode.drafters.untrained.automaton import Match, SuffixAutomaton
from decode.drafters.untrained.ngram import NgramText
from decode.drafters.untrained.text_drafter import TextDrafter
from decode.drafters.untrained.trie import Trie

real_split, real_repeated, real_read = SuffixAutomaton._split, NgramText._repeated, TextDrafter.read


def oldest_match(patch: pytest.MonkeyPatch) -> None:
    """prompt-lookup-decoding, transformers: the first place that fits is taken, not the last."""
    patch.setattr(SuffixAutomaton, "_note_places", lambda self: None)


def split_state_without_a_place(patch: pytest.MonkeyPatch) -> None:
    """A state that is split off has been nowhere."""

    def mutant(self: SuffixAutomaton, state: int, token: int) -> int:
        before = len(self._recent)
        found = real_split(self, state, token)
        self._recent[before:] = [0] * (len(self._recent) - before)
        return found

    patch.setattr(SuffixAutomaton, "_split", mutant)


def one_token_late(patch: pytest.MonkeyPatch) -> None:
    """The guess begins a token behind what followed."""

    def mutant(self: NgramText, match: Match, depth: int) -> list[int]:
        return list(real_repeated(self, match, depth + 1))[1:]

    patch.setattr(NgramText, "_repeated", mutant)


def guesses_hang_from_pending(patch: pytest.MonkeyPatch) -> None:
    """Every token of a guess is a child of pending."""
    real = Trie.add

    def mutant(self: Trie, guess: Iterable[int]) -> None:
        for token in guess:
            real(self, [token])

    patch.setattr(Trie, "add", mutant)


def texts_run_together(patch: pytest.MonkeyPatch) -> None:
    """A guess goes on from one text of the memory into the next."""
    patch.setattr(memory, "_until_end", lambda tokens: [token for token in tokens if token >= 0])


def row_keeps_the_text_before(patch: pytest.MonkeyPatch) -> None:
    """A request that takes over a row is looked up in the text of the one before."""

    def mutant(self, context, lengths) -> None:  # noqa: ANN001
        real_read(self, context, {row: length for row, length in lengths.items() if self._texts[row] is None})

    patch.setattr(TextDrafter, "read", mutant)
