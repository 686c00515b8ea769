"""What every family of heads promises: what it is trained as is what it drafts as, and no output changes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from decode import generate
from decode.common.errors import ConfigError
from decode.drafters.base import Batch, Context, Step
from decode.drafters.head_draft import HeadDraft
from decode.drafters.layers import Rotary
from decode.drafters.saved_head import HEADS
from decode.forward.runner import CAPTURE_AFTER
from decode.loop import Loop
from decode.models.output_head import ends_of
from decode.requests import Request
from decode.sampling.warp import Sampling
from decode.trees.tree import Tree, tree_depths
from decode.trees.tree_plans import Dynamic, Shape, Static, chain, k_ary
from tests.decode.heads import DEPTH, VARIANTS, batch_of, features_of, random_head
from tests.tiers import by_default, spread
from tests.tiny import MODELS, tiny_llama

RAGGED = [[5, 9, 2, 7], [1, 8], [4, 4, 6, 3, 2]]
SHAPES: dict[str, Shape] = {"chain": chain(DEPTH), "tree": k_ary([3, 2, 1]), "dynamic": Dynamic(DEPTH, 3, 9)}
every_family = pytest.mark.parametrize("name", VARIANTS)
some_families = pytest.mark.parametrize("name", spread(6, VARIANTS))
"""Where what is tested lies in code that all of them share."""


@pytest.fixture(autouse=True)
def uncaptured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests here are over before a capture has paid for itself; one is about captures."""
    monkeypatch.setattr("decode.forward.runner.CAPTURE_AFTER", 10**9)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_llama(num_layers=6, dtype=torch.float64).requires_grad_(False)


@dataclass(frozen=True)
class Proposal:
    """What a head drafted for one row behind its committed tokens."""

    text: list[int]
    drafted: list[int]
    log_q: Tensor
    """(k, V) of each drafted token."""
    round_index: int


def proposals(model: PreTrainedModel, head: HeadDraft, request: Request) -> list[Proposal]:
    """Of all rounds and rows of a run with chains that are sampled from q."""
    found: list[Proposal] = []
    propose = head.propose

    def noted(context: Context) -> Tree:
        tree = propose(context)
        if tree.log_q is not None:
            for row, length in enumerate(context.lengths.tolist()):
                text = context.ids[row, :length].tolist()
                found.append(
                    Proposal(text, tree.tokens[row, 1:].tolist(), tree.log_q[row], int(context.noise.round_index))
                )
        return tree

    head.propose = noted  # type: ignore[method-assign]
    Loop(model, head, request).run()
    head.propose = propose  # type: ignore[method-assign]
    return found


def check_parity(model: PreTrainedModel, head: HeadDraft, found: list[Proposal]) -> None:
    """Each proposal's distributions are those of a training batch whose rows are the texts with what was drafted."""
    whole = [one for one in found if len(one.drafted) == DEPTH]
    batch = batch_of(model, head, [one.text + one.drafted for one in whole])
    length = batch.ids.shape[1]
    for depth, step in enumerate(head.unroll(batch)):
        for row, one in enumerate(whole):
            slot = slot_of(step, row * length + len(one.text) - 1 + depth, row)
            distribution = logits_of(head, step, row, slot).softmax(-1)
            torch.testing.assert_close(distribution, one.log_q[depth].exp(), rtol=1e-6, atol=1e-12)


def slot_of(step: Step, target_row: int, row: int) -> int:
    (found,) = ((step.target_rows[row] == target_row) & step.valid[row]).nonzero()
    return int(found)


def logits_of(head: HeadDraft, step: Step, row: int, slot: int) -> Tensor:
    drafted = step.drafted(step.hidden[row, slot])
    if step.vocab is None:
        return drafted
    return torch.full((head.config.vocab_size,), -torch.inf, dtype=drafted.dtype).index_copy(0, step.vocab, drafted)


@every_family
@pytest.mark.parametrize("reduced", by_default(1, [True, False]))
def test_it_drafts_what_it_is_trained_as(target: PreTrainedModel, name: str, reduced: bool) -> None:
    """At every position and depth, in ragged batches and after partial acceptance: unroll's q is propose's."""
    vocab = torch.arange(0, 64, 2) if reduced else None
    head = random_head(name, target, vocab=vocab)
    request = Request(RAGGED, 20, shape=chain(DEPTH), verifier="rejection")
    found = proposals(target, head, request)
    assert len({one.round_index for one in found if len(one.drafted) == DEPTH}) > 6
    check_parity(target, head, found)


@every_family
def test_a_packed_document_is_unrolled_as_if_it_stood_alone(target: PreTrainedModel, name: str) -> None:
    head = random_head(name, target)
    texts = [[5, 9, 2, 7, 11, 30, 2], [4, 4, 6, 3, 2, 60, 21, 8, 17]]
    alone = batch_of(target, head, texts)
    packed = packed_batch(target, head, texts)
    length, start = alone.ids.shape[1], len(texts[0])
    for apart, together in zip(head.unroll(alone), head.unroll(packed), strict=True):
        rows = apart.target_rows[1][apart.valid[1]] - length
        assert len(rows)
        for row in rows.tolist():
            want = logits_of(head, apart, 1, slot_of(apart, length + row, 1))
            have = logits_of(head, together, 0, slot_of(together, start + row, 0))
            torch.testing.assert_close(have, want)


def packed_batch(model: PreTrainedModel, head: HeadDraft, texts: list[list[int]]) -> Batch:
    """The texts one after another in one row, with padding behind."""
    padding = [0] * 3
    ids = torch.tensor([[token for text in texts for token in text] + padding])
    positions = torch.tensor([[place for text in texts for place in range(len(text))] + padding])
    document = torch.tensor([[number for number, text in enumerate(texts) for _ in text] + [-1] * 3])
    parts = [features_of(model, head, torch.tensor([text])) for text in (*texts, padding)]
    return Batch(ids, positions, document, document >= 0, torch.cat(parts, 1))


@every_family
def test_steps_are_judged_by_the_rows_before_the_tokens_they_draft(target: PreTrainedModel, name: str) -> None:
    """Valid slots alone: of the same document, to be learned, and step s of a slot one row behind step s - 1."""
    head = random_head(name, target)
    batch = packed_batch(target, head, [[5, 9, 2, 7, 11, 30, 2], [4, 4, 6, 3, 2, 60, 21, 8, 17]])
    batch = replace(batch, loss_mask=batch.loss_mask & (torch.arange(batch.ids.shape[1]) != 10))
    steps = list(head.unroll(batch))
    assert len(steps) == DEPTH
    for number, step in enumerate(steps):
        token = step.target_rows[step.valid] + 1
        assert batch.loss_mask.flatten()[token].all()
        assert (batch.document.flatten()[token] == batch.document.flatten()[token - 1 - number]).all()
        both = step.valid & steps[0].valid
        assert (step.target_rows[both] == steps[0].target_rows[both] + number).all()
    assert steps[0].valid.any()


@every_family
@pytest.mark.parametrize("shape", by_default(1, SHAPES))
def test_output_is_that_of_plain_decoding(target: PreTrainedModel, name: str, shape: str) -> None:
    head = random_head(name, target)
    for temperature in (0.0, 1.0):
        request = Request(RAGGED, 24, Sampling(temperature), shape=SHAPES[shape])
        plain, _ = Loop(target, None, request).run()
        drafted, stats = Loop(target, head, request).run()
        assert drafted == plain
        assert any(one.drafted for one in stats.rounds)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3", "mistral", "gemma3"])
@pytest.mark.parametrize("name", ["eagle3", "dspark"])
def test_targets_of_every_type_are_drafted_for(architecture: str, name: str) -> None:
    """Norms on queries and keys, sliding windows of three tokens, scaled embeddings."""
    model = MODELS[architecture]().requires_grad_(False)
    head = random_head(name, model)
    request = Request(RAGGED, 20, shape=SHAPES["tree"])
    assert Loop(model, head, request).run()[0] == Loop(model, None, request).run()[0]
    check_parity(model, head, proposals(model, head, replace(request, shape=chain(DEPTH), verifier="rejection")))


@pytest.mark.slow
@every_family
def test_waiting_requests_take_rows_over(target: PreTrainedModel, name: str) -> None:
    """Two rows for five requests, twice: what a row held before, or a call before, is never seen."""
    head = random_head(name, target)
    prompts = [[place + 1] * (2 + place % 4) for place in range(5)]
    request = Request(prompts, 12, shape=chain(DEPTH), batch_size=2)
    plain, _ = Loop(target, None, request).run()
    assert Loop(target, head, request).run()[0] == plain
    check_parity(target, head, proposals(target, head, replace(request, verifier="rejection")))


@pytest.mark.slow
@every_family
def test_rounds_are_captured_and_draft_the_same(
    target: PreTrainedModel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(RAGGED, 40, shape=chain(DEPTH), verifier="rejection")
    monkeypatch.setattr(Loop, "_waits", property(lambda self: True))  # the draft's part is then a unit of its own
    plain = proposals(target, random_head(name, target), request)
    monkeypatch.setattr("decode.forward.runner.CAPTURE_AFTER", 6)
    head = random_head(name, target)
    captured = proposals(target, head, request)
    assert head.runner.replayed
    for one, other in zip(captured, plain, strict=True):
        assert one.drafted == other.drafted
        torch.testing.assert_close(one.log_q, other.log_q)


@some_families
def test_prompts_of_one_token_and_penalties(target: PreTrainedModel, name: str) -> None:
    head = random_head(name, target)
    ids = torch.tensor([[3], [9]])
    settings = {"max_new_tokens": 16, "eos_token_id": (), "repetition_penalty": 1.3, "banned_words": [5]}
    plain = generate(target, None, ids, **settings, seed=0)  # type: ignore[arg-type]
    drafted = generate(target, head, ids, **settings, seed=0)  # type: ignore[arg-type]
    assert torch.equal(plain.sequences, drafted.sequences)
    assert any(one.drafted for one in drafted.stats.rounds)


@some_families
@pytest.mark.parametrize("reduced", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_head_may_be_of_another_precision_than_its_target(name: str, reduced: bool) -> None:
    """float32 states into bfloat16 weights, and trained on afterwards with what decoding left behind."""
    model = tiny_llama(num_layers=6).requires_grad_(False)
    head = random_head(name, model, vocab=torch.arange(0, 64, 2) if reduced else None).bfloat16()
    request = Request(RAGGED, 8, shape=chain(2))
    assert Loop(model, head, request).run()[0] == Loop(model, None, request).run()[0]
    head.requires_grad_(True)
    for step in head.unroll(batch_of(model, head, [[5, 9, 2, 7, 11, 30]])):
        step.head(step.hidden).float().sum().backward(retain_graph=True)


def test_rows_of_a_reduced_vocabulary_follow_the_targets_head() -> None:
    model = tiny_llama(num_layers=6).requires_grad_(False)
    vocab = torch.arange(0, 64, 2)
    head, hidden = random_head("eagle3", model, vocab=vocab), torch.randn(3, 32)
    before = head.head(hidden)
    model.lm_head.weight.mul_(2)
    torch.testing.assert_close(head.head(hidden), 2 * before)
    torch.testing.assert_close(head.head(hidden), model.lm_head(hidden)[:, vocab])


VOCAB = 64
REQUEST = Request([[5, 9, 2, 7], [1, 8], [4, 4, 6, 3, 2]], 30, Sampling(), seed=3)
TREES: dict[str, Shape] = {
    "k_ary": k_ary([2, 2, 1]),
    "static": Static((-1, 0, 0, 0, 2, 2, 3, 4, 6, 6)),
    "dynamic": Dynamic(DEPTH, 3, 12),
}
every_kind = pytest.mark.parametrize("kind", ["medusa", "hydra", "hydra-prefix"])


@pytest.fixture(scope="module")
def shallow() -> PreTrainedModel:
    return tiny_llama(VOCAB, dtype=torch.float64).requires_grad_(False)


def fresh(kind: str, model: PreTrainedModel) -> HeadDraft:
    """Heads of two residual layers as they are before training."""
    config = replace(random_head(kind, model).config, mlp_layers=2)  # type: ignore[call-arg]
    return HEADS[config.family][1](config, ends_of(model)).double()


def fit(draft: HeadDraft, model: PreTrainedModel, texts: list[list[int]]) -> HeadDraft:
    """The heads after a few steps on these texts."""
    optimizer, batch = torch.optim.Adam(draft.parameters(), lr=0.02), batch_of(model, draft, texts)
    for _ in range(40):
        loss = torch.zeros(())
        for step in draft.unroll(batch):
            tokens = batch.ids.flatten()[step.target_rows[step.valid] + 1]
            loss = loss + cross_entropy(step.head(step.hidden[step.valid]), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return draft.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def fitted(shallow: PreTrainedModel) -> HeadDraft:
    """Medusa's heads, fitted to what the target writes for REQUEST."""
    return fit(fresh("medusa", shallow), shallow, Loop(shallow, None, REQUEST).run()[0])


def distributions(draft: HeadDraft, model: PreTrainedModel, text: list[int]) -> list[Tensor]:
    """(T, V) logits of every head over one text, by the training face."""
    return [draft.logits(step.hidden)[0] for step in draft.unroll(batch_of(model, draft, [text]))]


@every_kind
def test_training_starts_at_the_targets_own_prediction(kind: str, shallow: PreTrainedModel) -> None:
    draft = fresh(kind, shallow)
    batch = batch_of(shallow, draft, [[5, 9, 2, 7, 3, 1, 1]])
    assert batch.features is not None
    for step in draft.unroll(batch):
        assert torch.equal(step.hidden, batch.features[:, :, 0])


@every_kind
def test_every_layer_of_every_head_learns_weights_of_its_own(kind: str, shallow: PreTrainedModel) -> None:
    before = fresh(kind, shallow).state_dict()
    after = fit(fresh(kind, shallow), shallow, [[5, 9, 2, 7, 3, 1, 1, 30, 2]]).state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    values = [tuple(weight.flatten()[:8].tolist()) for weight in after.values()]
    assert len(set(values)) == len(values)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_two_hidden_states_are_refused(kind: str, shallow: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match=rf"{kind} reads one hidden state.*\[1, -1\]"):
        replace(random_head(kind, shallow).config, taps=(1, -1))


@pytest.mark.parametrize("kind", ["medusa", "hydra", "hydra-prefix", "dspark", "dflash", "peagle"])
def test_no_more_tokens_are_drafted_than_a_head_has_slots(kind: str, shallow: PreTrainedModel) -> None:
    draft = random_head(kind, shallow)
    stats = Loop(shallow, draft, replace(REQUEST, shape=chain(9))).run()[1]
    assert max(one.drafted for one in stats.rounds) == DEPTH


@every_kind
@pytest.mark.parametrize("shape", by_default(1, TREES))
def test_children_in_a_tree_are_the_best_after_their_own_path(
    kind: str, shape: str, shallow: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the training face over the committed text and the path; ragged rows, captured rounds among them."""
    monkeypatch.setattr("decode.forward.runner.CAPTURE_AFTER", CAPTURE_AFTER)
    draft, seen = random_head(kind, shallow), []
    propose = draft.propose

    def noted(context: Context) -> Tree:
        tree = propose(context)
        seen.append(([context.ids[row, :length].tolist() for row, length in enumerate(context.lengths)], tree))
        return tree

    monkeypatch.setattr(draft, "propose", noted)
    Loop(shallow, draft, replace(REQUEST, shape=TREES[shape], sampling=Sampling(0))).run()
    for texts, tree in (*seen[:2], *seen[CAPTURE_AFTER + 1 : CAPTURE_AFTER + 3]):
        for text, tokens, parents in zip(texts, tree.tokens.tolist(), tree.parents_of_rows(), strict=True):
            depths = tree_depths(tuple(parents))
            for node in set(parents) - {-1}:
                path, at = [], node
                while at:
                    path, at = [tokens[at], *path], parents[at]
                distribution = distributions(draft, shallow, [*text, *path, 0])[depths[node]][len(text) - 2]
                children = [tokens[child] for child, parent in enumerate(parents) if parent == node]
                assert children == distribution.topk(len(children)).indices.tolist()


def test_positions_stay_exact_in_half_precision() -> None:
    """A draft trained in fp32 and served in bfloat16 must mean the same positions."""
    rope = Rotary(64, {"rope_type": "default", "rope_theta": 10000.0}, 4096)
    x, positions = torch.randn(1, 1, 3, 64), torch.tensor([[3, 1500, 4000]])
    exact = rope(x, positions)
    for cast in (rope.bfloat16, rope.half, rope.double):
        assert torch.equal(cast()(x, positions), exact)
