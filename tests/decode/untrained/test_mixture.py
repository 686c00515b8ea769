"""Drafts within drafts: mixtures and cascades; the text stays what it is, members read what others had accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from decode import generate, load_drafter
from decode.common.errors import ConfigError
from decode.config import DrafterConfig, ModelConfig
from decode.drafters.lm import LMDraft
from decode.drafters.untrained import cascade, mixture
from decode.drafters.untrained.cascade import CascadeDrafter
from decode.drafters.untrained.config import NgramConfig
from decode.drafters.untrained.edit import EditDrafter
from decode.drafters.untrained.mixture import Candidate, MixtureDrafter, SurvivalRates, merged_by_worth, paths
from decode.drafters.untrained.ngram import NgramDrafter
from decode.loop import Loop
from decode.models.load import load_model
from decode.requests import Request
from decode.trees.tree_plans import chain
from tests.decode.drafters import Oracle
from tests.decode.heads import random_head
from tests.decode.untrained.models import draft_lm, target
from tests.tiers import by_default
from tests.tiny import save_tiny_target, tiny_llama


@pytest.fixture
def model() -> Any:
    return target()


def lookup() -> NgramDrafter:
    return NgramDrafter(NgramConfig(least_match=1, memory=1000))


MEMBERS = {
    "lookups": lambda model: [lookup(), EditDrafter()],
    "lookup and draft": lambda model: [lookup(), draft_lm()],
    "lookup and the target itself": lambda model: [lookup(), LMDraft(model)],
    "lookup and head": lambda model: [lookup(), random_head("eagle3", model)],
}


@pytest.mark.parametrize("tree", ["chain", "dynamic", "2x2x1"])
@pytest.mark.parametrize("name", by_default(3, MEMBERS))
def test_the_text_is_that_of_plain_decoding(model: Any, name: str, tree: str) -> None:
    """Twice, so that the second call finds the first one's texts."""
    ids = torch.randint(0, 20, (3, 6), generator=torch.Generator().manual_seed(0))
    asked: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.5, "seed": 3, "eos_token_id": (), "batch_size": 2}
    plain = generate(model, None, ids, **asked)
    drafter = MixtureDrafter(MEMBERS[name](model))
    for _ in range(2):
        out = generate(model, drafter, ids, num_draft_tokens=3, tree=tree, tree_nodes=6, audit=True, **asked)
        assert torch.equal(out.sequences, plain.sequences)
    assert any(one.accepted for one in out.stats.rounds)


def test_members_read_what_the_others_had_accepted() -> None:
    check_members_read()


def check_members_read() -> None:
    """A member that is the target itself, asked now and then beside a lookup that knows half of the text: whatever the
    lookup has brought in between, its own guess is right whenever it is asked."""
    model, prompt = target(), [[5, 6, 7]]
    texts, _ = Loop(model, None, Request(prompt, 80, shape=chain(0), seed=1)).run()
    known = lookup()
    known.end(known.begin([token if place % 9 else 1 for place, token in enumerate(texts[0])]))
    rounds, asked, real = iter(range(1000)), list[tuple[list[int], list[int]]](), mixture.Model.guesses

    def guesses(self: mixture.Model, context: Any) -> Any:
        found, begin = real(self, context), int(context.lengths[0])
        asked.append((found[0][0], texts[0][begin : begin + len(found[0][0])]))
        return found

    drafter = MixtureDrafter([known, LMDraft(model)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture.Model, "guesses", guesses)
        patch.setattr(
            MixtureDrafter, "_worth_asking", lambda self, context: self.models[0] if next(rounds) % 4 == 3 else None
        )
        found, _ = Loop(model, drafter, Request(prompt, 80, shape=chain(6), seed=1)).run()
    assert found == texts
    assert len(asked) > 2
    assert all(guess[: len(right)] == right for guess, right in asked)


def test_standing_is_the_share_that_reached_each_depth() -> None:
    one = SurvivalRates()
    for _ in range(200):
        one.learn([1, 2, 3], [1, 2, 9, 9])
        one.learn([1, 2, 3], [1, 9])
    first, second, third = one.chances(3)
    assert first > 0.95
    assert second / first == pytest.approx(0.5, abs=0.06)
    assert third < 0.05


def test_tokens_behind_the_last_one_written_say_nothing() -> None:
    one, other = SurvivalRates(), SurvivalRates()
    one.learn([1, 2, 3], [1])
    other.learn([1], [1])
    assert one.chances(3) == other.chances(3)


def test_the_budget_goes_to_the_likeliest_tokens_and_to_no_child_before_its_parent() -> None:
    candidates = [
        Candidate((0, 0), [1, 2, 3], [0.9, 0.5, 0.1]),
        Candidate((1, 0), [4, 5], [0.6, 0.2]),
        Candidate((2, 0), [1, 7], [0.3, 0.15]),
    ]
    trie = merged_by_worth(candidates, 5, False)
    assert [(token, parent) for token, parent in zip(trie.tokens, trie.parents, strict=True)][1:] == [
        (1, 0),
        (4, 0),
        (2, 1),
        (5, 2),
    ]
    assert merged_by_worth(candidates, 3, True).tokens[1:] == [1, 2]
    assert merged_by_worth([], 3, True).tokens == [0]


def test_a_member_that_is_never_right_gets_no_place(model: Any) -> None:
    """An oracle of the text beside an edit of a text that never comes: after some rounds the tree is the oracle's."""
    prompt = [[5, 6, 7]]
    texts, _ = Loop(model, None, Request(prompt, 60, shape=chain(0), seed=1)).run()
    right, wrong = EditDrafter(texts[0][3:]), EditDrafter([63] * 100)
    for members in ([right, wrong], [wrong, right]):
        _, stats = Loop(model, MixtureDrafter(members), Request(prompt, 60, shape=chain(3), seed=1)).run()
        accepted = [one.accepted for one in stats.rounds]
        assert sum(accepted[4:]) >= 3 * len(accepted[4:]) - 3


def test_paths_lead_to_the_leaves() -> None:
    assert paths([9, 1, 2, 3, 4], [-1, 0, 0, 1, 3]) == [[1, 3, 4], [2]]


def test_a_member_with_weights_is_asked_where_it_is_worth_its_time(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no cost in every round; at a cost that nothing makes up for, once in a while."""
    prompt, shares, real = [[5, 6, 7]], [], mixture.Model.prepare
    asked: list[bool] = []

    def prepare(self: mixture.Model, context: Any, lengths: Any) -> bool:
        asked.append(True)
        return real(self, context, lengths)

    monkeypatch.setattr(mixture.Model, "prepare", prepare)
    for seconds in (0.0, 1e9):
        always = property(lambda self, seconds=seconds: seconds, lambda self, value: None)
        monkeypatch.setattr(mixture.Model, "seconds", always, raising=False)
        asked.clear()
        _, stats = Loop(
            model, MixtureDrafter([lookup(), draft_lm()]), Request(prompt, 60, shape=chain(3), seed=1)
        ).run()
        shares.append(len(asked) / len(stats.rounds))
    assert shares[0] > 0.7
    assert shares[1] < 0.15


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "mixture of nothing"),
        ({"members": ["ngram", "ngram"]}, "names one twice"),
        ({"members": ["ngram"], "settings": {"edit": {}}}, r"settings are for \['edit'\]"),
        ({"members": ["ngram"], "settings": {"ngram": {"memory": -1}}}, "memory=-1"),
        ({"members": ["cascade"]}, "draft=null"),
    ],
)
def test_mixtures_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DrafterConfig(path="mixture", settings=settings)


def test_members_are_loaded_by_name_and_from_folders(tmp_path: Path) -> None:
    draft = save_tiny_target(tmp_path / "draft", num_layers=1, seed=2)
    target = tiny_llama(load_model(ModelConfig(str(draft))).config.vocab_size, dtype=torch.float64)
    drafter = load_drafter("mixture", target=target, members=["ngram", str(draft)], check=False)
    assert isinstance(drafter, MixtureDrafter)
    assert [type(one.drafter) for one in drafter.models] == [LMDraft]
    assert [type(one) for one in drafter.readers] == [NgramDrafter]
    helped = load_drafter("cascade", target=target, draft=str(draft), helper="edit", check=False)
    assert isinstance(helped, CascadeDrafter)
    assert isinstance(helped.draft, LMDraft)


def helpers(texts: list[list[int]]) -> dict[str, Any]:
    return {
        "ngram": NgramDrafter(NgramConfig(least_match=1)),
        "oracle of the target": Oracle(texts, 64),
        "another draft": draft_lm(5),
        "cascade": CascadeDrafter(draft_lm(7), NgramDrafter(NgramConfig(least_match=1))),
    }


@pytest.mark.usefixtures("uncaptured")
@pytest.mark.parametrize("verifier", by_default(2, ["coupled", "rejection", "block"]))
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", ["ngram", "oracle of the target", "another draft", "cascade"])
def test_the_rounds_are_those_of_the_draft_alone(name: str, temperature: float, verifier: str) -> None:
    check_rounds(name, temperature, verifier)


def check_rounds(name: str = "another draft", temperature: float = 0.7, verifier: str = "coupled") -> None:
    """Under every rule: the same tokens drafted, so the same text and the same tokens accepted. The draft is the target
    itself, so that tokens deep in a chain count."""
    model, ids = target(), torch.randint(0, 20, (3, 6), generator=torch.Generator().manual_seed(0))
    asked: dict[str, Any] = {"max_new_tokens": 40, "temperature": temperature, "seed": 3, "eos_token_id": ()}
    texts = generate(model, None, ids, **asked).sequences.tolist()
    asked |= {"num_draft_tokens": 4, "verifier": verifier, "audit": True}
    alone = generate(model, LMDraft(model), ids, **asked)
    out = generate(model, CascadeDrafter(LMDraft(model), helpers(texts)[name]), ids, **asked)
    assert torch.equal(out.sequences, alone.sequences)
    assert [one.accepted for one in out.stats.rounds] == [one.accepted for one in alone.stats.rounds]


@pytest.mark.parametrize("tree", ["2x2", "dynamic"])
def test_where_a_tree_is_wanted_a_chain_is_drafted(model: Any, tree: str) -> None:
    ids, asked = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 20, "seed": 3, "eos_token_id": ()}
    plain = generate(model, None, ids, **asked)
    for verifier in ("coupled", "rejection"):
        drafter = CascadeDrafter(draft_lm(), NgramDrafter(NgramConfig(least_match=1)))
        out = generate(model, drafter, ids, num_draft_tokens=2, tree=tree, verifier=verifier, **asked)
        assert {one.drafted for one in out.stats.rounds} <= {0, 2}
        assert verifier == "rejection" or torch.equal(out.sequences, plain.sequences)


def test_right_guesses_spare_the_draft_its_passes(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft is the target: an oracle of its text is always right, and four tokens take one pass."""
    ids = torch.tensor([[5, 6, 7]])
    asked: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0, "eos_token_id": ()}
    texts = generate(model, None, ids, **asked).sequences.tolist()
    passes: list[int] = []
    real = cascade._drawn

    def counted(steps: Any, guessed: Any, context: Any) -> Any:
        tree = real(steps, guessed, context)
        passes.append(guessed.num_passes)
        return tree

    monkeypatch.setattr(cascade, "_drawn", counted)

    class Knowing(Oracle):
        def propose(self, context: Any) -> Any:
            rows = [self.texts[0][int(context.lengths[0]) - 1 :][: context.num_draft_tokens + 1]]
            rows[0] += [0] * (context.num_draft_tokens + 1 - len(rows[0]))
            return cascade.Tree(torch.tensor(rows), cascade.chain_parents(context.num_draft_tokens + 1))

    drafter = CascadeDrafter(LMDraft(model), Knowing(texts, 64))
    out = generate(model, drafter, ids, num_draft_tokens=4, **asked)
    assert out.sequences.tolist() == texts
    assert set(passes[:-1]) == {1}
    assert out.stats.tau > 4
