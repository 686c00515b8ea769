"""Drafts within drafts: mixtures and cascades; the text stays what it is, members read what others had accepted."""

from __future__ import annotations

import itertools
import operator
import random
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from decode import generate, load_drafter
from decode.common.errors import ConfigError
from decode.config import DrafterConfig, ModelConfig
from decode.drafters.lm import LMDraft
from decode.drafters.untrained import cascade, mixture, weighted_member
from decode.drafters.untrained.cascade import CascadeDrafter
from decode.drafters.untrained.config import NgramConfig
from decode.drafters.untrained.edit import EditDrafter
from decode.drafters.untrained.mixture import MixtureDrafter
from decode.drafters.untrained.ngram import NgramDrafter
from decode.drafters.untrained.pace import STALE, Offer, Pace, Plan, Times, best_plan, lengths_of
from decode.drafters.untrained.survival import Candidate, SurvivalRates, merged_by_worth, paths
from decode.loop import Loop
from decode.models.load import load_model
from decode.rehearsal import warm_up
from decode.requests import Request
from decode.trees.tree import Tree, chain_parents
from decode.trees.tree_plans import chain, parse
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


@pytest.mark.parametrize("tree", by_default(2, ["2x2x1", "chain", "dynamic"]))
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
    rounds, asked, real = iter(range(1000)), list[tuple[list[int], list[int]]](), weighted_member.Model.guesses

    def guesses(self: weighted_member.Model, context: Any) -> Any:
        found, begin = real(self, context), int(context.lengths[0])
        asked.append((found[0][0][0], texts[0][begin : begin + len(found[0][0][0])]))
        return found

    drafter = MixtureDrafter([known, LMDraft(model)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weighted_member.Model, "guesses", guesses)
        patch.setattr(MixtureDrafter, "_chosen", lambda self, _: Plan(6, 0, 6) if next(rounds) % 4 == 3 else Plan(6))
        found, _ = Loop(model, drafter, Request(prompt, 80, shape=chain(6), seed=1)).run()
    assert found == texts
    assert len(asked) > 2
    assert all(guess[: len(right)] == right for guess, right in asked)


@pytest.mark.parametrize("name", ["lookup and draft", "lookup and head"])
@pytest.mark.parametrize("verifier", by_default(1, ["block", "rejection"]))
def test_chains_are_sampled_where_the_rule_judges_by_q(model: Any, verifier: str, name: str) -> None:
    """Likeliest tokens instead, which a sampled text refuses more often, made T=1 slower with a lookup than without.
    A lookup that knows nothing leaves the rounds what they are of the draft alone."""
    ids = torch.randint(0, 20, (3, 6), generator=torch.Generator().manual_seed(0))
    asked: dict[str, Any] = {"max_new_tokens": 30, "seed": 3, "eos_token_id": (), "num_draft_tokens": 3}
    _, draft = MEMBERS[name](model)
    nothing = NgramDrafter(NgramConfig(least_match=50))
    alone = generate(model, draft, ids, verifier=verifier, **asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MixtureDrafter, "_chosen", lambda self, context: Plan(3, 0, 3))
        out = generate(model, MixtureDrafter([nothing, draft]), ids, verifier=verifier, **asked)
    assert torch.equal(out.sequences, alone.sequences)
    assert [one.accepted for one in out.stats.rounds] == [one.accepted for one in alone.stats.rounds]


def test_a_draft_that_samples_knows_what_stands() -> None:
    """The target itself: q is p, so all that it samples stands where the row is its own, whoever drafted before: a
    lookup in every third round of one row, nobody in the round after that."""
    model, ids = target(), torch.randint(0, 20, (2, 6), generator=torch.Generator().manual_seed(0))
    real, judged, asked = weighted_member.with_chains, list[list[int]](), list[int]()

    def sampled(tree: Any, tokens: Any, rows: Any) -> Any:
        judged.append(rows)
        return real(tree, tokens, rows)

    class AtTimes(NgramDrafter):
        def guesses(self, context: Any) -> Any:
            asked.append(len(asked) % 3)
            return [[], [] if asked[-1] else [[7] * context.num_draft_tokens]]

    drafter = MixtureDrafter([AtTimes(NgramConfig()), LMDraft(model)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture, "with_chains", sampled)
        patch.setattr(SurvivalRates, "chances", lambda self, depth: [1.0] * depth)  # the first candidate is the best
        patch.setattr(MixtureDrafter, "_chosen", lambda self, _: Plan(0) if asked[-1] == 1 else Plan(4, 0, 4))
        out = generate(model, drafter, ids, max_new_tokens=60, num_draft_tokens=4, verifier="block", eos_token_id=())
    assert [1] in judged
    assert [] in judged
    for row in (0, 1):
        *rounds, _last = [one for one in out.stats.rounds if one.row == row]  # which has no room for all
        own = [one for kind, one in zip(asked, rounds, strict=False) if kind == 2 or (kind == 0 and row == 0)]
        assert len(own) > 3
        assert all(one.accepted == one.drafted == 4 for one in own), row


def test_rounds_without_drafts_are_read_by_a_draft_that_samples(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an adaptive budget makes them: the mixture is not asked then, and hears of them afterwards."""
    rounds, real = iter(range(1000)), Loop._shape
    monkeypatch.setattr(Loop, "_shape", lambda self, left: chain(0) if next(rounds) % 4 > 1 else real(self, left))
    monkeypatch.setattr(MixtureDrafter, "_chosen", lambda self, context: Plan(4, 0, 4))
    drafter = MixtureDrafter([NgramDrafter(NgramConfig(least_match=50)), LMDraft(model)])
    out = generate(
        model, drafter, torch.tensor([[5, 6, 7]]), max_new_tokens=80, num_draft_tokens=4, verifier="block",
        eos_token_id=(),
    )  # fmt: skip
    *drafted, _last = [one for one in out.stats.rounds if one.drafted]
    assert len(drafted) > 8
    assert len(drafted) + 8 < len(out.stats.rounds)
    assert all(one.accepted == 4 for one in drafted)


@pytest.mark.parametrize("longer", [0, 2])
def test_a_row_of_another_has_its_chain_for_certain(longer: int) -> None:
    """Of any length: a head may draft fewer tokens than a lookup."""
    log_q = torch.randn(2, 3, 5).log_softmax(-1)
    tree = Tree(torch.tensor([[4, 1, 2], [4, 3, 3]]), chain_parents(3), "iid", log_q)
    assert weighted_member.with_chains(tree, tree.tokens, []) is tree
    found = weighted_member.with_chains(tree, torch.tensor([[9] * (3 + longer), [4, 0, 1, 2, 3][: 3 + longer]]), [1])
    assert found.tokens.tolist() == [[4, 1, 2] + [0] * longer, [4, 0, 1, 2, 3][: 3 + longer]]
    assert found.is_chain
    assert found.log_q is not None
    assert torch.equal(found.log_q[0, :2], log_q[0, :2])
    certain = found.log_q.exp().gather(-1, found.tokens[:, 1:, None].expand(-1, -1, 1))[..., 0]
    assert certain[1].tolist() == [1] * (2 + longer)
    assert certain[0, 2:].tolist() == [1] * longer
    torch.testing.assert_close(found.log_q.exp().sum(-1), torch.ones(2, 3 + longer))


def test_standing_is_the_share_that_reached_each_depth() -> None:
    one = SurvivalRates()
    for _ in range(200):
        one.learn([1, 2, 3], [1, 2, 9, 9])
        one.learn([1, 2, 3], [1, 9])
    first, second, third = one.chances(3)
    assert first > 0.95
    assert second / first == pytest.approx(0.5, abs=0.06)
    assert third < 0.05


def test_a_token_is_expected_to_stand_as_those_before_it_until_it_was_tried() -> None:
    """And again where it is no longer tried: a head that was asked for one token for ever could not be right twice."""
    one = SurvivalRates()
    for _ in range(50):
        one.learn([1, 2], [1, 9])
    assert one.chances(2)[1] < 0.1
    for _ in range(200):
        one.learn([1], [1])
        one.forget_beyond(1)
    assert one.chances(3)[2] > 0.6


def test_warming_up_teaches_nothing_of_what_stands(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers one prompt over and over."""
    learned: list[Any] = []
    monkeypatch.setattr(SurvivalRates, "learn", lambda self, *given: learned.append(given))
    drafter = MixtureDrafter([NgramDrafter(), draft_lm()])
    prompt = torch.tensor([[5, 9, 5, 9, 5, 9]])
    warm_up(model, drafter, prompt, 24, temperature=0.0, num_draft_tokens=2)
    assert not learned
    generate(model, drafter, prompt, max_new_tokens=24, temperature=0.0, num_draft_tokens=2, eos_token_id=())
    assert learned


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


def test_a_member_that_is_never_right_gets_no_place(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An oracle of the text beside an edit of a text that never comes: after some rounds the tree is the oracle's."""
    prompt = [[5, 6, 7]]
    texts, _ = Loop(model, None, Request(prompt, 60, shape=chain(0), seed=1)).run()
    right, wrong = EditDrafter(texts[0][3:]), EditDrafter([63] * 100)
    monkeypatch.setattr(Pace, "rests", lambda self, depth: [1.0] * (depth + 1))
    for members in ([right, wrong], [wrong, right]):
        _, stats = Loop(model, MixtureDrafter(members), Request(prompt, 60, shape=chain(3), seed=1)).run()
        accepted = [one.accepted for one in stats.rounds]
        assert sum(accepted[4:]) >= 3 * len(accepted[4:]) - 3


def test_paths_lead_to_the_leaves() -> None:
    assert paths([9, 1, 2, 3, 4], [-1, 0, 0, 1, 3]) == [[1, 3, 4], [2]]


def test_a_member_with_weights_is_asked_where_it_is_worth_its_time(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no cost in every round; at a cost that nothing makes up for, once in a while."""
    prompt, shares, real = [[5, 6, 7]], [], weighted_member.Model.prepare
    asked: list[bool] = []

    def prepare(self: weighted_member.Model, context: Any, lengths: Any) -> bool:
        asked.append(True)
        return real(self, context, lengths)

    monkeypatch.setattr(weighted_member.Model, "prepare", prepare)
    for seconds in (0.0, 1e9):
        monkeypatch.setattr(
            weighted_member.Model, "seconds", lambda self, depth, seconds=seconds: [seconds] * (depth + 1)
        )
        asked.clear()
        _, stats = Loop(
            model, MixtureDrafter([lookup(), draft_lm()]), Request(prompt, 60, shape=chain(3), seed=1)
        ).run()
        shares.append(len(asked) / len(stats.rounds))
    assert shares[0] > 0.7
    assert shares[1] < 0.15


def test_the_plan_of_most_tokens_less_their_price_is_found() -> None:
    """Beside every plan that there is, counted by hand; the tokens of rows, of which each has the better chain."""
    draws = random.Random(0)

    def chances(depth: int) -> list[float]:
        return list(accumulate((draws.random() for _ in range(depth)), operator.mul))

    for _ in range(300):
        texts = [[chances(draws.randrange(7)) for _ in range(draws.randrange(3))] for _ in range(draws.randint(1, 3))]
        offers = {at: Offer(chances(6), [at * draws.random() * one for one in range(7)]) for at in (0, 1)}
        rests, price, lengths = [1 + draws.random() * one for one in range(7)], draws.random(), lengths_of(chain(6))

        def value(plan: Plan, given: Any = (texts, offers, rests, price)) -> float:
            texts, offers, rests, price = given
            offer = [] if plan.member is None else offers[plan.member].chances[: plan.depth]
            spent = rests[plan.length] + (0 if plan.member is None else offers[plan.member].seconds[plan.depth])
            return sum(max(sum(one[: plan.length]) for one in [offer, *row]) for row in texts) - price * spent

        asked = [(None, 0), *itertools.product(offers, lengths)]
        plans = [Plan(0), *(Plan(one, *ask) for ask in asked for one in lengths if one >= ask[1])]
        best = best_plan(texts, offers, rests, price, lengths)
        assert best in plans
        assert value(best) == pytest.approx(max(map(value, plans)))
    assert best_plan([[]], {}, [1, 2], 0.0, (1,)) == Plan(0)
    assert best_plan([[[0.9, 0.8]]], {}, [1, 1, 1], 9.0, (1, 2)) == Plan(2)
    assert lengths_of(chain(6)) == (1, 2, 3, 5, 6)
    assert lengths_of(chain(6), [4, 6, 9]) == (1, 2, 3, 4, 5, 6)
    assert lengths_of(parse("dynamic", 6, 9)) == (6,)


def test_a_place_in_a_pass_has_the_price_of_its_seconds() -> None:
    pace = Pace()
    assert pace.rests(4) is None
    for _ in range(30):
        pace.time(1, 0.3)
        pace.time(3, 0.5)
        pace.earn(4, 0.5)
    pace.time(3, 90.0)  # a hiccup
    assert pace.rests(4) == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.6])
    assert pace.price == pytest.approx(8)


def test_a_length_that_is_not_timed_for_long_is_forgotten() -> None:
    """One slow time kept it from ever being chosen again."""
    times = Times(min)
    times.learn(8, 99.0)
    for one in range(STALE):
        times.learn(one % 2 + 1, 1.0)
        assert times.num_sizes == (2 if one in (0, STALE - 1) else 3)
    assert times.up_to(8)[8] == 1.0


def test_the_better_chain_is_that_of_the_rounds_length() -> None:
    """Twenty tokens of small chances are worth more in all than a head's three, and less where three are drafted."""
    long, short = [0.3] * 20, [0.9, 0.8, 0.7]
    plan = best_plan([[long]], {0: Offer(short, [0.0] * 4)}, [1 + one / 4 for one in range(21)], 1.0, (1, 3, 20))
    assert plan == Plan(3, 0, 3)
    candidates = [Candidate((0, 0), [7] * 20, long), Candidate((1, 0), [1, 2, 3], short)]
    assert merged_by_worth(candidates, 4, True).tokens[1:] == [1, 2, 3]
    assert merged_by_worth(candidates, 21, True).tokens[1:] == [7] * 20


@pytest.mark.usefixtures("uncaptured")
@pytest.mark.parametrize("dear", [False, True])
def test_chains_end_where_a_token_is_not_worth_its_place(dear: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup that is right of the first two tokens and wrong of all others, where places cost nothing and a third of
    a round each; and where it is always right, at a third of a round as well."""
    model, prompt, depths = target(), [[5, 6, 7]], list[set[int]]()
    texts, _ = Loop(model, None, Request(prompt, 200, shape=chain(0), seed=1)).run()
    monkeypatch.setattr(Pace, "rests", lambda self, depth: [1 + dear * one / 3 for one in range(depth + 1)])
    monkeypatch.setattr(Pace, "price", 1.0)

    class Known(EditDrafter):
        wrong = True

        def guesses(self, context: Any) -> Any:
            at = int(context.lengths[0])
            return [[[t + (self.wrong and n > 1) for n, t in enumerate(texts[0][at : at + context.shape.depth])]]]

    for Known.wrong in (True, False):
        _, stats = Loop(model, MixtureDrafter([Known()]), Request(prompt, 200, shape=chain(8), seed=1)).run()
        depths.append({one.drafted for one in stats.rounds[-9:-3]})
    assert depths == ([{2}, {8}] if dear else [{8}, {8}])


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
@pytest.mark.parametrize("verifier", by_default(1, ["coupled", "rejection", "block"]))
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
    rounds: list[Any] = []

    class Counted(cascade.Guessed):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            rounds.append(self)

    monkeypatch.setattr(cascade, "Guessed", Counted)

    class Knowing(Oracle):
        def propose(self, context: Any) -> Any:
            rows = [self.texts[0][int(context.lengths[0]) - 1 :][: context.num_draft_tokens + 1]]
            rows[0] += [0] * (context.num_draft_tokens + 1 - len(rows[0]))
            return Tree(torch.tensor(rows), chain_parents(context.num_draft_tokens + 1))

    drafter = CascadeDrafter(LMDraft(model), Knowing(texts, 64))
    out = generate(model, drafter, ids, num_draft_tokens=4, **asked)
    assert out.sequences.tolist() == texts
    assert {one.num_passes for one in rounds[:-1]} == {1}
    assert out.stats.tau > 4
