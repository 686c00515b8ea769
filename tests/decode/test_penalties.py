"""Penalties, biases and bans: the arithmetic, every node's own prefix, equality with autoregressive decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from decode import generate
from decode.common.errors import ConfigError
from decode.config import SamplingConfig
from decode.drafters.lm import LMDraft
from decode.sampling.penalties import GeneratedTokenPenalty, penalties
from decode.sampling.processors import History
from decode.trees.tree import Tree
from tests.decode import checks
from tests.tiers import by_default
from tests.tiny import tiny_llama, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("uncaptured")

VOCAB = checks.VOCAB
SETTINGS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.5},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": 0.7},
    "bias": {"logit_bias": {3: 4.0, 5: -3.0}},
    "ban": {"banned_words": [7, 11, 13]},
    "all": {"repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 1.0, "logit_bias": {9: 2.0}},
}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(VOCAB, dtype=torch.float64)


@pytest.mark.parametrize("kind", by_default(3, ["oracle", "tree", "dynamic", "same", "2x2x1"]))
@pytest.mark.parametrize("name", SETTINGS)
def test_speculative_output_is_that_of_autoregressive_decoding(model, name: str, kind: str) -> None:
    tree = kind if kind in ("2x2x1", "dynamic") else None
    drafter = kind if kind in ("oracle", "tree") else LMDraft(model)
    settings = {"max_new_tokens": 24, "num_draft_tokens": 3, "tree": tree, **SETTINGS[name]}
    out = checks.check_pathwise_equality(model, drafter, 2, **settings)
    assert any(one.accepted for one in out.stats.rounds)
    free = generate(model, None, *checks.ragged_prompts(2), max_new_tokens=24, eos_token_id=(), seed=0)
    assert not torch.equal(free.sequences, out.sequences)


def test_presence_and_frequency_count_what_was_generated() -> None:
    """The prompt holds tokens 1 and 2, the text 2, 2 and 3; token by token as OpenAI's formula says."""
    penalty = GeneratedTokenPenalty(presence=0.5, frequency=0.25)
    ids, scores = torch.tensor([[1, 2, 2, 2, 3], [1, 2, 2, 2, 3]]), torch.zeros(2, 5, dtype=torch.float64)
    have = penalty(ids, scores, torch.tensor([2, 5]))
    assert have.tolist() == [[0.0, 0.0, -1.0, -0.75, 0.0], [0.0] * 5]


def test_a_penalty_at_rest_is_no_processor() -> None:
    assert penalties(VOCAB, None, SamplingConfig()) == []
    assert len(penalties(VOCAB, None, SamplingConfig(**SETTINGS["all"]))) == 3


@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.7}, {"banned_words": [7, 11]}, {"logit_bias": {3: 4.0}}])
def test_settings_shared_with_transformers_mean_the_same(model, settings: dict[str, Any]) -> None:
    theirs = dict(settings)
    if "banned_words" in theirs:
        theirs["bad_words_ids"] = [[token] for token in theirs.pop("banned_words")]
    if "logit_bias" in theirs:
        theirs["sequence_bias"] = [[[token], bias] for token, bias in theirs.pop("logit_bias").items()]
    ids, _ = checks.ragged_prompts(1)
    ours = generate(model, None, ids, max_new_tokens=16, temperature=0, eos_token_id=(), **settings, seed=0)
    assert torch.equal(ours.sequences, model.generate(ids, do_sample=False, max_new_tokens=16, **theirs))


def test_words_are_banned_at_the_start_and_after_a_space() -> None:
    """A model that is made to write little but z, q and spaces never writes the banned text; unhindered it does."""
    tokenizer = tiny_tokenizer()
    model = tiny_llama(len(tokenizer), dtype=torch.float64)
    ids = torch.tensor([tokenizer("def ")["input_ids"]])
    call: dict[str, Any] = {"max_new_tokens": 60, "tokenizer": tokenizer, "eos_token_id": ()}
    call["logit_bias"] = {"z": 12.0, "q": 12.0}
    free = tokenizer.decode(generate(model, None, ids, **call, seed=0).sequences[0])
    assert "zq" in free
    for drafter in (None, LMDraft(model)):
        banned = generate(model, drafter, ids, banned_words=["zq"], **call, seed=0)
        text = tokenizer.decode(banned.sequences[0, ids.shape[1] :])
        assert text.count("z") > 5
        assert "zq" not in text


def test_banned_sequences_are_refused_only_as_a_whole(model) -> None:
    """Of two tokens in a row the second is banned after the first; each alone may be said."""
    history = LogitsProcessorList(penalties(VOCAB, _Spelling({"ab": [4, 5]}), SamplingConfig(banned_words=["ab"])))  # type: ignore[arg-type]
    scores = torch.zeros(2, VOCAB)
    have = history(torch.tensor([[1, 4], [4, 1]]), scores)  # type: ignore[arg-type]
    assert have[0, 5] == -torch.inf
    assert have.isinf().sum() == 1


class _Spelling:
    """A tokenizer of a few known texts."""

    def __init__(self, known: dict[str, list[int]]) -> None:
        self.known = known

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": self.known.get(text.strip(), [])}


class Seen(LogitsProcessor):
    """Writes down every prefix it is shown and leaves the scores alone but for the number of the call."""

    def __init__(self) -> None:
        self.calls: list[list[list[int]]] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.calls.append(input_ids.tolist())
        scores += input_ids.double().mean(-1, keepdim=True).to(scores.dtype)  # in place, as some do
        return scores


@pytest.mark.parametrize("own_trees", [False, True])
def test_nodes_of_a_depth_are_shown_together_and_each_with_its_own_prefix(own_trees: bool) -> None:
    seen = Seen()
    ids = torch.tensor([[1, 2, 3, 0], [4, 5, 6, 0], [7, 8, 0, 0]])
    parents: Any = (-1, 0, 0, 1, 2, 2)
    if own_trees:
        parents = torch.tensor([parents, (-1, 0, 1, 1, 2, 3), parents])
    tree = Tree(torch.arange(10, 28).view(3, 6), parents, depth_bound=3)
    logits = torch.zeros(3, 6, 30, dtype=torch.float64)
    out = History(LogitsProcessorList([seen]), ids, [3, 3, 2], [3, 3, 2], [0, 1, 2]).of_tree(tree, logits)
    assert logits.abs().max() == 0
    rows = tree.parents_of_rows()
    for row, committed in enumerate(([1, 2, 3], [4, 5, 6], [7, 8])):
        for node in range(6):
            path, at = [], node
            while at:
                path.insert(0, int(tree.tokens[row, at]))
                at = rows[row][at]
            prefix = committed + path
            assert any(prefix in call for call in seen.calls)
            torch.testing.assert_close(out[row, node], torch.full((30,), sum(prefix) / len(prefix)).double())
    assert len(seen.calls) == (3 + 4 + 3 if own_trees else 3 + 3)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"banned_words": list(range(VOCAB))}, "ban all 64 tokens"),
        ({"banned_words": [64]}, "token 64, but the target knows 0 to 63"),
        ({"logit_bias": {-1: 1.0}}, "token -1"),
        ({"logit_bias": {"word": 1.0}}, "needs tokenizer="),
    ],
    ids=str,
)
def test_what_cannot_be_banned_or_biased_is_refused(model, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        generate(model, None, torch.tensor([[1, 2]]), max_new_tokens=2, **settings)
