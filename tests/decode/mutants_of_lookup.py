"""Known bugs of drafts without training, as patches of ours: most can change no text, and cost acceptance unnoticed."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decode.drafters.base import Context
from decode.drafters.untrained.cascade import Guessed
from decode.drafters.untrained.edit import Alignment
from decode.drafters.untrained.foreign.reader import Reader
from decode.drafters.untrained.foreign.spelling import Spelling
from decode.drafters.untrained.index import memory
from decode.drafters.untrained.index.automaton import Match, SuffixAutomaton
from decode.drafters.untrained.jacobi import JacobiDrafter, Pool, Window
from decode.drafters.untrained.member import Member
from decode.drafters.untrained.ngram import NgramText
from decode.drafters.untrained.text_drafter import TextDrafter
from decode.drafters.untrained.trie import Trie
from decode.rounds import round as rounds
from decode.rounds.state import State
from decode.trees.tree import Tree, with_passengers

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


def pool_keyed_by_what_follows(patch: pytest.MonkeyPatch) -> None:
    """An n-gram is found by its second token, and drafted behind it once more."""
    real = Pool.add
    patch.setattr(Pool, "add", lambda self, tokens, place: real(self, [tokens[1], *tokens[1:]], place))


def window_of_the_row_before(patch: pytest.MonkeyPatch) -> None:
    """A request hears what was said to the one whose row it takes over."""
    real = State.seat

    def mutant(self: State, *given: object) -> None:
        before = self.passenger_positions.clone()
        real(self, *given)  # type: ignore[arg-type]
        self.passenger_positions.copy_(before)

    patch.setattr(State, "seat", mutant)


def window_left_behind(patch: pytest.MonkeyPatch) -> None:
    """The window moves by one token a pass, however many were accepted."""
    real = Window.move

    def mutant(self: Window, text: Sequence[int]) -> None:
        real(self, text[: self.begin] if self.refined else text)

    patch.setattr(Window, "move", mutant)


def window_without_noise(patch: pytest.MonkeyPatch) -> None:
    """Windows are filled with argmaxes, also where the target's tokens are drawn."""
    real = JacobiDrafter._said
    patch.setattr(
        JacobiDrafter,
        "_said",
        lambda self, context, passenger_logits, passenger_positions: real(
            self, replace(context, shares_noise=False), passenger_logits, passenger_positions
        ),
    )


def nodes_see_passengers(patch: pytest.MonkeyPatch) -> None:
    """The window's guesses are attended to as if they were text."""

    def mutant(tree: Tree) -> tuple[Tensor, Tensor, Tensor]:
        tokens, depths, above = with_passengers(tree)
        above[:, : tree.num_nodes, tree.num_nodes :] = True
        return tokens, depths, above

    patch.setattr(rounds, "with_passengers", mutant)


def passengers_stay(patch: pytest.MonkeyPatch) -> None:
    """The first passenger is left in the cache, in the slot of what was accepted last."""
    real = rounds.Round._logits

    def mutant(self: rounds.Round, tree: Tree, state: State) -> Tensor:
        logits = real(self, tree, state)
        if tree.passengers is not None:
            at = state.starts + torch.tensor([[0, tree.num_nodes]])
            for layer in self.target.cache.slot_layers:
                for stored in (layer.keys, layer.values):
                    assert stored is not None
                    rows = torch.arange(len(at))
                    stored[rows, :, at[:, 0]] = stored[rows, :, at[:, 1]]
        return logits

    patch.setattr(rounds.Round, "_logits", mutant)
