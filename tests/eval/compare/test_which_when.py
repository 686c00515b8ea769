"""What is the fastest for which text, from numbers that are known."""

from __future__ import annotations

import pytest

from eval.modes.compare.which_when import mixtures, which_when
from tests.eval.compare.tiny_comparison import PLAIN, Paces, arm, cell, ours

OWN, HF = PLAIN
ARMS = {
    "ngram": arm("ngram"),
    "tree": arm("ngram"),
    "edit": arm("edit"),
    "both": arm("mixture", ["ngram", "edit"]),
    "mine": arm("runs/mine", has_weights=True),
}
PLAIN_PACES: Paces = {OWN: [0.4] * 5, HF: [0.5] * 5}


def test_the_best_is_the_fastest_and_without_training_the_fastest_of_those() -> None:
    paces = ours(ngram=[0.2] * 5, edit=[0.16] * 5, mine=[0.1] * 5)
    (found,) = which_when([[cell(PLAIN_PACES | paces)]], ARMS, 0)
    assert (found["text"], found["batch_size"], found["temperature"]) == ("edit", 1, 0.0)
    assert (found["best"]["arm"], found["best_without_training"]["arm"]) == ("mine", "edit")
    assert found["best"]["over_plain"] == pytest.approx(4.0)  # over our loop, the faster of both without a draft
    assert found["best_without_training"]["over_plain"] == pytest.approx(2.5)
    assert found["best"]["as_good"] == []


def test_plain_decoding_is_the_best_where_nothing_beats_it() -> None:
    (found,) = which_when([[cell(PLAIN_PACES | ours(ngram=[0.45] * 5, mine=[0.9] * 5))]], ARMS, 0)
    assert found["best"]["arm"] == found["best_without_training"]["arm"] == OWN
    assert found["best"]["over_plain"] == pytest.approx(1.0)


def test_as_good_are_those_that_prompts_do_not_tell_from_the_best() -> None:
    paces = ours(ngram=[0.1, 0.2, 0.1, 0.2, 0.12], edit=[0.2, 0.1, 0.2, 0.1, 0.12], tree=[0.3] * 5)
    (found,) = which_when([[cell(PLAIN_PACES | paces)]], ARMS, 0)
    assert {found["best"]["arm"], *found["best"]["as_good"]} == {"ngram", "edit"}


def test_one_batch_tells_nothing_of_others() -> None:
    (found,) = which_when([[cell({OWN: [0.4], HF: [0.5]} | ours(ngram=[0.2], edit=[0.201]))]], ARMS, 0)
    assert found["best"] == {"arm": "ngram", "over_plain": pytest.approx(2.0), "over_plain_ci95": None, "as_good": None}


def test_a_mixture_is_held_against_the_fastest_of_what_its_members_do_alone() -> None:
    paces = ours(ngram=[0.2] * 5, tree=[0.15] * 5, edit=[0.3] * 5, mine=[0.01] * 5, both=[0.1] * 5)
    (found,) = mixtures([[cell(PLAIN_PACES | paces)]], ARMS, 0)
    assert (found["arm"], found["member"]) == ("both", "tree")  # mine is none of its members
    assert found["over_member"] == pytest.approx(1.5)
    assert mixtures([[cell(PLAIN_PACES | ours(both=[0.1] * 5, mine=[0.1] * 5))]], ARMS, 0) == []


def test_several_runs_are_one_answer() -> None:
    """In the second run another arm was the faster one, by less than the first said."""
    one = cell(PLAIN_PACES | ours(ngram=[0.1] * 5, edit=[0.2] * 5))
    other = cell(PLAIN_PACES | ours(ngram=[0.19] * 5, edit=[0.18] * 5))
    (found,) = which_when([[one, other, one]], ARMS, 0)
    assert (found["best"]["arm"], found["best"]["over_plain"]) == ("ngram", pytest.approx(4.0))
    assert found["best"]["over_plain_ci95"][0] == pytest.approx(0.4 / 0.19)
