"""Penalties, biases, bans and top-p: the arithmetic, every node's own prefix, equality with autoregressive decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from decode import generate
from decode.common.errors import ConfigError
from decode.drafters.lm import LMDraft
from decode.forward.capture import capture, host_reads
from decode.forward.packing import Packing
from decode.sampling.config import SamplingConfig
from decode.sampling.penalties import GeneratedTokenPenalty, penalties
from decode.sampling.processors import History
from decode.sampling.warp import Sampling, warp
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


@pytest.mark.parametrize("kind", by_default(2, ["tree", "oracle", "dynamic", "same", "2x2x1"]))
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


MANY_TIES, BFLOAT16, SPREAD = "many ties", "bfloat16", "spread"


def by_sort(scores: Tensor, top_k: int, top_p: float) -> Tensor:
    if 0 < top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(top_k).values[..., -1:], -torch.inf)
    order = scores.sort(dim=-1, stable=True).indices
    dropped = scores.softmax(-1).gather(-1, order).cumsum(-1) <= 1 - top_p
    dropped[..., -1] = False
    return scores.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)


def logits(kind: str, dtype: torch.dtype, *shape: int) -> Tensor:
    found = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype) * 3
    if kind == MANY_TIES:
        return found.round()
    return found.bfloat16().to(dtype) if kind == BFLOAT16 else found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [MANY_TIES, BFLOAT16, SPREAD])
@pytest.mark.parametrize("shape", [(4, 3, 33), (7, 1), (2, 5, 8192), (1, 2, 151_936)])
def test_what_is_kept_is_what_a_stable_sort_keeps(kind: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    scores = logits(kind, dtype, *shape)
    for top_p in (0.05, 0.8, 0.95):
        for top_k in (0, 1, 20):
            assert torch.equal(warp(scores, Sampling(top_k=top_k, top_p=top_p)), by_sort(scores, top_k, top_p))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_that_are_excluded_already_stay_so_and_count_nothing(dtype: torch.dtype) -> None:
    scores = logits(MANY_TIES, dtype, 40, 60)
    scores[:, ::3] = -torch.inf
    scores[0, 1:] = -torch.inf  # a single one is left
    for top_k in (0, 5, 50):  # 50 are more than are left
        assert torch.equal(warp(scores, Sampling(top_k=top_k, top_p=0.7)), by_sort(scores, top_k, 0.7))


def test_of_equal_tokens_the_first_are_dropped_and_as_many_as_the_rule_says() -> None:
    """0.25 of mass may go; by top_k=2, which keeps all six likely ones as ties, a mass of 1 / 4 is one of six."""
    scores = torch.tensor([[0.0] * 4 + [-torch.inf] * 2])
    assert warp(scores, Sampling(top_p=0.75))[0].isfinite().tolist() == [False, True, True, True, False, False]
    scores = torch.tensor([[1.0, -0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]])
    kept = warp(scores, Sampling(top_k=2, top_p=0.75))[0].isfinite()
    assert kept.tolist() == [False, False, True, False, True, True, True, True]


@pytest.mark.parametrize("top_k", [0, 3])
def test_the_likeliest_is_never_dropped_and_rounding_is_transformers_own(top_k: int) -> None:
    scores = torch.log(torch.tensor([[0.1] * 10, [0.91] + [0.01] * 9, [0.2, 0.8] + [1e-30] * 8]))
    for top_p in (1e-9, 0.2, 0.8, 0.9):  # 1 - 0.9 is less than 0.1 in float64, and equal to it in float32
        assert torch.equal(warp(scores, Sampling(top_k=top_k, top_p=top_p)), by_sort(scores, top_k, top_p))


def test_both_filters_in_a_row_are_those_of_transformers() -> None:
    scores = logits(SPREAD, torch.float32, 50, 500)
    theirs = LogitsProcessorList([TopKLogitsWarper(40), TopPLogitsWarper(0.9)])
    assert torch.equal(warp(scores, Sampling(top_k=40, top_p=0.9)), theirs(None, scores.clone()))  # type: ignore[arg-type]


class Warped(nn.Module):
    """Scores as they are sampled, to be captured."""

    def __init__(self, sampling: Sampling) -> None:
        super().__init__()
        self.sampling = sampling

    def forward(self, scores: Tensor) -> tuple[Tensor]:
        """(B, W, V) -> (B, W, V)."""
        return (warp(scores, self.sampling),)


@pytest.mark.parametrize("sampling", [Sampling(top_p=0.9), Sampling(top_k=20, top_p=0.9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_value_is_read_and_a_capture_serves_other_scores(sampling: Sampling, dtype: torch.dtype) -> None:
    module, first, other = Warped(sampling), logits(SPREAD, dtype, 2, 5, 999), logits(BFLOAT16, dtype, 2, 5, 999)
    assert host_reads(module, (first,)) == []
    captured: Callable[[Tensor], tuple[Tensor, ...]] = capture(module, (first,), (first + 1,), Packing(nn.Module()))
    assert torch.equal(captured(other)[0], by_sort(other, sampling.top_k, sampling.top_p))
    assert module(first.to("meta"))[0].shape == first.shape


@pytest.mark.parametrize("top_k", [0, 20])
def test_scores_that_are_no_numbers_still_show(top_k: int) -> None:
    scores = logits(SPREAD, torch.float32, 3, 50)
    scores[1] = torch.nan
    found = warp(scores, Sampling(top_k=top_k, top_p=0.9))
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], by_sort(scores[[0, 2]], top_k, 0.9))
