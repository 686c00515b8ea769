"""DSpark and DFlash: training and serving see the same logits, output stays the target's, and so it does where drafting
stops by the draft's own predictions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, RepetitionPenaltyLogitsProcessor

from decode.autotune.budget import Budget
from decode.drafters import drafting
from decode.drafters.base import Batch, Context
from decode.drafters.drafting import Above, Processed
from decode.drafters.dspark import DSparkConfig, DSparkDraft
from decode.forward.cache import SlotCache
from decode.forward.kept.lease import Lease
from decode.forward.packed_linear import Together
from decode.forward.runner import Runner
from decode.loop import Loop
from decode.models.hidden_states import Taps
from decode.models.output_head import ends_of
from decode.requests import Request
from decode.sampling.noise import Noise
from decode.sampling.warp import Sampling
from decode.stats import Round
from decode.trees.tree import Tree
from decode.trees.tree_plans import chain
from tests.decode import checks, distributions
from tests.tiers import by_default
from tests.tiny import tiny_llama

PROMPTS = [[5, 9, 2, 7], [1, 8], [4, 4, 6, 3, 2]]
TAPS = (1, 2, 3)


def target() -> PreTrainedModel:
    return tiny_llama(num_layers=4, dtype=torch.float64).requires_grad_(False)


def draft_of(model: PreTrainedModel, **changed: Any) -> DSparkDraft:
    """Random weights, in fp64, those of the bias among them."""
    sizes = {"hidden_size": 32, "vocab_size": 64, "taps": TAPS, "depth": 4, "layers": 2, "mlp_width": 48}
    attention = {"heads": 4, "kv_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "max_positions": 256}
    own = {"markov_rank": 4, "confidence": True, "anchors": 100, "rope": {"rope_type": "default", "rope_theta": 1e4}}
    vocab = changed.pop("vocab", None)
    fields: dict[str, Any] = sizes | attention | own | changed
    torch.manual_seed(1)
    draft = DSparkDraft(DSparkConfig(**fields), ends_of(model), vocab).double().eval().requires_grad_(False)
    if draft.config.markov_rank:
        torch.nn.init.normal_(draft.markov_in.weight)
        torch.nn.init.normal_(draft.markov_out.weight)
    return draft


def batch_of(model: PreTrainedModel, *documents: list[int], padding: int = 0) -> Batch:
    """The documents packed into one row, behind them padding."""
    rows, features = [], []
    for number, ids in enumerate(documents):
        with torch.no_grad(), Taps(model, TAPS) as taps:
            model(torch.tensor([ids]))
        features.append(taps.stacked())
        rows += [(token, place, number) for place, token in enumerate(ids)]
    rows += [(0, 0, -1)] * padding
    features.append(features[0].new_ones(1, padding, *features[0].shape[2:]))
    ids, positions, document = (torch.tensor([column]) for column in zip(*rows, strict=True))
    return Batch(ids, positions, document, document >= 0, features=torch.cat(features, 1))


def logits_after(draft: DSparkDraft, batch: Batch, place: int) -> Tensor:
    """(S, V) of the block whose anchor is the token at this place of the first row."""
    found = []
    for slot, step in enumerate(draft.unroll(batch)):
        at = ((step.target_rows[0] == place + slot) & step.valid[0]).nonzero()[0, 0]
        found.append(draft.logits(step.hidden[0, at]))
    return torch.stack(found)


def proposals(draft: DSparkDraft, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[list[int]], Tree]]:
    """Filled with the committed tokens and the tree of every round."""
    seen: list[tuple[list[list[int]], Tree]] = []
    real = draft.propose

    def propose(context: Context) -> Tree:
        tree = real(context)
        known = [context.ids[row, :length].tolist() for row, length in enumerate(context.lengths)]
        seen.append((known, tree))
        return tree

    monkeypatch.setattr(Loop, "_waits", property(lambda self: True))  # a captured round proposes out of sight
    monkeypatch.setattr(draft, "propose", propose)
    return seen


def test_a_block_sees_hidden_states_before_its_anchor_alone() -> None:
    """Those of the anchor and of later tokens are not there when it is drafted; other blocks never are."""
    model = target()
    draft, batch = draft_of(model, confidence=False), batch_of(model, [5, 9, 2, 7, 1, 3, 3, 8])
    assert batch.features is not None
    before, alone = logits_after(draft, batch, 3), draft_of(model, confidence=False, anchors=1)
    for place, changes in ((3, False), (7, False), (2, True)):
        features = batch.features.clone()
        features[:, place] += 1
        after = logits_after(draft, dataclasses.replace(batch, features=features), 3)
        assert torch.equal(before, after) != changes
    only = dataclasses.replace(batch, loss_mask=torch.arange(8)[None] > 3)
    torch.testing.assert_close(logits_after(alone, only, 3), before, rtol=0, atol=1e-9)


def test_a_slot_counts_as_far_as_its_block_is_to_be_learned() -> None:
    """Blocks are cut by the end of the document, of the row, and by tokens that are not to be learned."""
    model = target()
    batch = batch_of(model, [1, 2, 3, 4, 5, 6], [7, 8], padding=1)
    batch.loss_mask[0, 3] = False
    steps = list(draft_of(model, depth=3).unroll(batch))
    valid = torch.stack([step.valid[0] for step in steps], -1)
    rows = torch.stack([step.target_rows[0] for step in steps], -1)
    anchors = {int(rows[m, 0]): valid[m].tolist() for m in range(len(valid)) if valid[m, 0]}
    assert anchors == {
        0: [True, True, False],
        1: [True, False, False],
        3: [True, True, False],
        4: [True, False, False],
        6: [True, False, False],
    }
    assert (rows >= 0).all()
    assert (rows < batch.ids.numel()).all()


def test_anchors_are_drawn_from_the_generator_that_checkpoints_keep() -> None:
    """The same state draws the same anchors; validation draws none, and takes evenly spaced ones."""
    model = target()
    draft, batch = draft_of(model, anchors=5), batch_of(model, list(range(1, 41)))

    def anchors() -> list[int]:
        first = next(iter(draft.unroll(batch)))
        assert first.valid.all()
        return first.target_rows[0].tolist()

    state = torch.get_rng_state()
    assert anchors() == [0, 7, 15, 23, 31]
    assert torch.equal(torch.get_rng_state(), state)
    draft.train()
    one, other = anchors(), anchors()
    assert sorted(one) != sorted(other)
    assert len(set(one)) == 5
    torch.set_rng_state(state)
    assert [anchors(), anchors()] == [one, other]


def test_without_the_bias_of_the_token_before_it_is_dflash() -> None:
    """Equal weights and a bias of zero: equal logits; with a bias, what was drafted before changes them."""
    model = target()
    flash, spark = draft_of(model, markov_rank=0, confidence=False), draft_of(model, markov_rank=4)
    spark.load_state_dict(flash.state_dict(), strict=False)
    torch.nn.init.zeros_(spark.markov_out.weight)
    one, other = batch_of(model, [5, 9, 2, 7, 1, 3]), batch_of(model, [5, 9, 2, 8, 8, 3])
    torch.testing.assert_close(logits_after(flash, one, 1), logits_after(spark, one, 1), rtol=0, atol=1e-12)
    torch.testing.assert_close(logits_after(flash, one, 1), logits_after(flash, other, 1), rtol=0, atol=1e-12)
    torch.nn.init.normal_(spark.markov_out.weight)
    changed = (logits_after(spark, one, 1) - logits_after(spark, other, 1)).abs().amax(-1)
    assert (changed > 1e-3).tolist() == [False, False, True, True]
    assert all(step.confidence is None for step in flash.unroll(one))


def test_the_bias_begins_at_zero() -> None:
    model = target()
    config = dataclasses.replace(draft_of(model).config, markov_rank=8)
    assert not DSparkDraft(config, ends_of(model)).markov_out.weight.any()


def test_layers_are_spread_over_the_target() -> None:
    """As indices of hidden states: one higher than the published layer numbers 1, 9, 17, 25, 33 of 36 layers."""
    assert DSparkConfig.default_taps(36) == (2, 10, 18, 26, 34)
    assert DSparkConfig.default_taps(8) == (2, 3, 4, 5, 6)
    assert [DSparkConfig.default_taps(layers) for layers in (1, 2, 3, 4, 5)] == [(-1,), (1,), (2,), (2,), (2, 3)]
    for layers in range(2, 80):
        taps = DSparkConfig.default_taps(layers)
        assert list(taps) == sorted(set(taps))
        assert 0 < taps[0]
        assert taps[-1] < layers


def test_a_configuration_survives_json() -> None:
    config = dataclasses.replace(draft_of(target()).config, temperatures=(1.0, 1.5, 1.0, 0.5))
    assert DSparkConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config


# confidence


def ready(budget: Budget, step: float = 0.4) -> Budget:
    """One that has timed rounds: a plain one costs 1, a drafted token `step`."""
    for depth in (0, 0, 1, 4):
        budget._confidences = []
        budget.learn([Round(0, depth, depth, depth + 1)], 1 + step * depth, depth)
    budget.depth = 4
    return budget


def stopped_at(steps: Any, script: tuple[int, ...], vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tokens that a round drafts whose draws come out as scripted."""
    left = list(script)

    def draw(scores: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return torch.tensor([[left.pop(0)]]), scores

    monkeypatch.setattr(drafting, "draw", draw)
    noise = Noise.of(0, [0], vocab_size, torch.device("cpu"))
    ids, shape = torch.zeros(1, 8, dtype=torch.long), chain(len(script))
    settings: dict[str, Any] = {
        "drawn": "iid",
        "shares_noise": False,
        "budget": ready(Budget(4, True)),
        "lease": Lease(),
    }
    context = Context(
        ids=ids,
        lengths=torch.tensor([2]),
        shortest=2,
        longest=2,
        sampling=Sampling(),
        temperature=torch.ones(1),
        noise=noise,
        shape=shape,
        **settings,
    )
    runner = Runner(SlotCache(1, 1, 8), torch.device("cpu"), Together(()))
    return drafting.propose_steps(Processed(steps, context, runner), context).num_nodes - 1


class Whims:
    """Steps whose predictions depend on the tokens drafted so far: of the next token, or, `peeking`, of the token that
    is yet to be drawn."""

    def __init__(self, vocab_size: int, script: tuple[int, ...], peeking: bool) -> None:
        self.vocab_size, self.script, self.peeking, self.sums = vocab_size, script, peeking, [0]

    def first(self) -> Tensor:
        return torch.zeros(1, 1, self.vocab_size)

    def step(self, tokens: Tensor, depth: int, above: Above | None = None) -> Tensor:
        assert above is None, "a chain is not grown as a tree"
        self.sums.append(self.sums[-1] + int(tokens))
        return self.first()

    def chance(self, depth: int) -> Tensor:
        seen = self.script[depth] if self.peeking else self.sums[-1] + depth
        return torch.tensor([0.02 if seen % 2 else 0.98])


@pytest.mark.parametrize("in_blocks", [False, True])
def test_drafting_that_stops_by_predictions_keeps_the_distribution(
    in_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every draft, throw and round enumerated; a prediction that knew the token to come would bias them."""

    def rule(vocab_size: int, peeking: bool) -> distributions.Rule:
        def length(script: tuple[int, ...]) -> int:
            return stopped_at(Whims(vocab_size, script, peeking), script, vocab_size, monkeypatch)

        return distributions.stopping_rule(3, length, in_blocks)

    for vocab_size, seed in ((2, 0), (2, 1), (3, 0)):
        toy = distributions.Toy.random(vocab_size, seed)
        assert distributions.distance_from_target(toy, rule(vocab_size, peeking=False), 3) < 1e-12
    lengths = {stopped_at(Whims(2, s, False), s, 2, monkeypatch) for s in ((0, 0, 0), (1, 0, 0), (1, 1, 1))}
    assert len(lengths) > 1
    toy = distributions.Toy.constant([0.85, 0.15], [0.7, 0.3])
    assert distributions.distance_from_target(toy, rule(2, peeking=True), 3) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["anchor", "fill_in"])
def test_predictions_are_those_that_were_trained(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget is asked before each token, with the sigmoid of training's logit over the place's temperature, and
    outputs stay those of autoregressive decoding wherever it stops."""
    model, asked = target(), []
    temperatures = (1.0, 0.5, 2.0, 4.0)
    draft = draft_of(model, temperatures=temperatures, layout=layout)
    seen, running = proposals(draft, monkeypatch), []
    propose = draft.propose
    monkeypatch.setattr(draft, "propose", lambda context: running.append(context.running) or propose(context))

    def takes(self: Budget, chance: list[float], drafted: int) -> bool:
        asked.append((drafted, torch.tensor(chance)))
        return not drafted or sum(chance) * 1e4 % 1 < 0.7

    monkeypatch.setattr(Budget, "takes", takes)
    monkeypatch.setattr(Budget, "next_shape", lambda self, shape, left: shape)
    settings = {"max_new_tokens": 16, "num_draft_tokens": 4, "adaptive": True, "confidence": True}
    checks.check_pathwise_equality(model, draft, 3, **settings)
    assert {tree.num_nodes for _, tree in seen} == {2, 3, 4, 5}
    starts = [at for at, (drafted, _) in enumerate(asked) if not drafted]
    for (known, tree), rows, start, end in zip(seen, running, starts, [*starts[1:], len(asked)], strict=True):
        given = [chance for _, chance in asked[start:end]]
        assert tree.num_nodes - 1 <= len(given) <= tree.num_nodes
        for place, row in enumerate(range(len(known)) if rows is None else rows):  # those that have not ended
            ids = known[row]
            batch = batch_of(model, ids + tree.tokens[row, 1:].tolist() + [0])
            for slot, step in enumerate(draft.unroll(batch)):
                if slot < len(given):
                    at = (step.target_rows[0] == len(ids) - 1 + slot).nonzero()[0, 0]
                    assert step.confidence is not None
                    want = (step.confidence[0, at] / temperatures[slot]).sigmoid()
                    torch.testing.assert_close(given[slot][place], want.float(), rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verifier", "layout"), [("coupled", "anchor"), ("rejection", "anchor"), ("coupled", "fill_in")]
)
def test_a_block_cut_afterwards_is_one_that_was_stopped(
    verifier: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without processors all tokens are drafted as one captured unit and cut by their predictions; with one, which
    changes nothing here, they are drafted until a prediction stops them."""

    def takes(self: Budget, chance: Any, drafted: int) -> bool:
        row = chance.tolist() if isinstance(chance, Tensor) else chance
        return not drafted or sum(row) * 1e4 % 1 < 0.7

    monkeypatch.setattr(Budget, "takes", takes)
    monkeypatch.setattr(Budget, "next_shape", lambda self, shape, left: shape)
    monkeypatch.setattr("decode.forward.runner.CAPTURE_AFTER", 2)
    model, runs = target(), []
    idle = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.0)])
    for processors in (None, idle):
        draft = draft_of(model, layout=layout)
        seen = proposals(draft, monkeypatch)
        request = Request(PROMPTS, 16, shape=chain(4), verifier=verifier, adaptive=True, confidence=True)
        out, _ = Loop(model, draft, dataclasses.replace(request, processors=processors)).run()
        runs.append((out, [tree.tokens.tolist() for _, tree in seen]))
        assert bool(draft.runner._passes) == (processors is None)
    assert runs[0] == runs[1]
    assert len({len(tree[0]) for tree in runs[0][1]}) >= 3


def test_a_draft_that_foresees_failure_does_not_pay_for_the_token() -> None:
    """The first token is always taken; what is refused leaves no trace in the books."""
    budget = ready(Budget(4, True), step=0.1)
    assert budget.takes([0.01], 0)
    budget = ready(Budget(4, True), step=0.1)
    assert budget.takes([0.95], 0)
    assert budget.takes([0.95], 1)
    assert not budget.takes([0.01], 2)
    assert budget._confidences == [[0.95], [0.95]]
    budget.learn([Round(0, 2, 2, 3)], 1.2, 2)
    assert budget.experience.clock.knows(2)


@pytest.mark.parametrize("verifier", by_default(1, ["coupled", "rejection", "block"]))
def test_a_draft_with_confidence_decodes_adaptively(verifier: str) -> None:
    """With the clock of this very machine."""
    model = target()
    request = Request(PROMPTS, 30, shape=chain(4), verifier=verifier, adaptive=True, confidence=True, audit=True)
    out, stats = Loop(model, draft_of(model), request).run()
    assert [len(row) for row in out] == [len(prompt) + 30 for prompt in PROMPTS]
    assert any(one.drafted for one in stats.rounds)


def test_the_loss_reaches_every_weight() -> None:
    """Confidence is not detached, and the bias is trained although it begins at zero."""
    model = target()
    draft = draft_of(model).train().requires_grad_(True)
    torch.nn.init.zeros_(draft.markov_out.weight)
    total: Callable[[Tensor], Tensor] = lambda logits: logits.log_softmax(-1)[..., 0].sum()  # noqa: E731
    steps = list(draft.unroll(batch_of(model, list(range(1, 30)))))
    loss = sum(total(step.head(step.hidden)) + step.confidence.sum() for step in steps if step.confidence is not None)
    assert isinstance(loss, Tensor)
    loss.backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in draft.parameters())
