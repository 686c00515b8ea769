"""A cascade proposes what its draft alone proposes, in fewer passes of it where the guesses are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decode import generate
from decode.drafters.lm import LMDraft
from decode.drafters.untrained import cascade
from decode.drafters.untrained.cascade import CascadeDrafter
from decode.drafters.untrained.config import NgramConfig
from decode.drafters.untrained.ngram import NgramDrafter
from tests.decode.drafters import Oracle
from tests.decode.untrained.models import draft_lm, target
from tests.tiers import by_default


@pytest.fixture
def model() -> Any:
    return target()


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
