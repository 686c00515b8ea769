"""Known bugs of drafts without training, as patches of ours: most can change no text, and cost acceptance unnoticed."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import pytest
from torch import Tensor

from decode.drafters.base import Context
from decode.drafters.untrained.cascade import Guessed
from decode.drafters.untrained.foreign.reader import Reader
from decode.drafters.untrained.foreign.spelling import Spelling
from decode.drafters.untrained.index import memory
from decode.drafters.untrained.index.alignment import Alignment
from decode.drafters.untrained.index.automaton import Match, SuffixAutomaton
from decode.drafters.untrained.member import Member
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
    patch.setattr(memory, "until_end", lambda tokens: [token for token in tokens if token >= 0])


def row_keeps_the_text_before(patch: pytest.MonkeyPatch) -> None:
    """A request that takes over a row is looked up in the text of the one before."""

    def mutant(self, context, lengths) -> None:  # noqa: ANN001
        real_read(self, context, {row: length for row, length in lengths.items() if self._texts[row] is None})

    patch.setattr(TextDrafter, "read", mutant)


def parted_row_goes_on_with_the_guess(patch: pytest.MonkeyPatch) -> None:
    """A cascade's draft is not asked again where its own token differs from what was guessed."""
    real = Guessed.step

    def mutant(self: Guessed, tokens: Tensor, depth: int, above: object = None) -> Tensor:
        return real(self, self._guess[:, depth - 1 : depth], depth, above)

    patch.setattr(Guessed, "step", mutant)


def member_keeps_what_it_drafted(patch: pytest.MonkeyPatch) -> None:
    """A draft in a mixture takes what others had accepted for its own tokens."""
    real = Member.prepare

    def mutant(self: Member, context: Context, lengths: list[int]) -> Hashable:
        self._read = list(lengths)
        return real(self, context, lengths)

    patch.setattr(Member, "prepare", mutant)


def renamed_once(patch: pytest.MonkeyPatch) -> None:
    """What was replaced is not replaced again."""
    patch.setattr(Alignment, "_remember", lambda self, end: None)


def draft_keeps_what_was_refused(patch: pytest.MonkeyPatch) -> None:
    """A draft with other tokens takes its own tokens for the text's, whatever became of them."""
    patch.setattr(Reader, "_read_of", lambda self, row, text: min(len(self._held[row]), len(text) - 1))


def half_a_character(patch: pytest.MonkeyPatch) -> None:
    """The first bytes of a character are read as text, so that what follows them is another character."""
    patch.setattr(Spelling, "whole", lambda self, ids, least: len(ids))
