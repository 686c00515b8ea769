"""engine.recompute: the same gradients of every draft, from fewer bytes kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from decode.drafters.base import Batch
from decode.drafters.eagle3 import Eagle3Config, Eagle3Draft
from decode.drafters.lm import LMDraft
from distill.objectives.config import ObjectiveConfig
from tests.decode.heads import VARIANTS, batch_of, random_head
from tests.tiers import by_default
from tests.tiny import tiny_llama
from train.drafts.head_blueprint import TrainableHead
from train.drafts.lm_blueprint import TrainableLM
from train.live_target import LiveTarget
from train.loss import DraftLoss

TEXTS = [[5, 6, 7, 8, 9, 10, 11, 12], [3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 9, 11]]


def kept(run: Callable[[], Any], *known: Tensor) -> int:
    """Bytes that autograd keeps of what `run` does, besides what is `known`."""
    seen: dict[int, int] = {}

    def pack(one: Tensor) -> Tensor:
        seen[one.untyped_storage()._cdata] = one.untyped_storage().nbytes()
        return one

    with saved_tensors_hooks(pack, lambda one: one):
        alive = run()
    del alive
    return sum(size for place, size in seen.items() if place not in {one.untyped_storage()._cdata for one in known})


def unrolled(head: Eagle3Draft, batch: Batch) -> list[Tensor]:
    return [step.hidden for step in head.unroll(batch)]


def draft_of(name: str) -> tuple[Any, Any, Batch]:
    """(what is trained, its module, a batch with p)."""
    target = tiny_llama(seed=1, dtype=torch.float64)
    if name == "lm":
        model = tiny_llama(seed=2, dtype=torch.float64)
        draft: Any = LMDraft(model)
        batch = batch_of(target, random_head("medusa", target), TEXTS)
        return TrainableLM(draft), draft, LiveTarget(target)(batch)
    head = random_head(name, target)
    return TrainableHead(head), head, LiveTarget(target, head.taps)(batch_of(target, head, TEXTS))


@pytest.mark.parametrize("name", by_default(6, ["lm", *VARIANTS]))
def test_gradients_are_the_same_of_every_family(name: str) -> None:
    found = []
    for recomputes in (False, True):
        trainable, module, batch = draft_of(name)
        module.requires_grad_(True)
        if recomputes:
            trainable.recompute()
        loss = DraftLoss(module, ObjectiveConfig(), None if batch.features is not None else 2)
        loss.train()
        torch.manual_seed(0)  # of anchors that are drawn
        loss(batch)[0].backward()
        found.append([one.grad for one in loss.parameters() if one.grad is not None])
    assert found[0]
    assert len(found[0]) == len(found[1])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_step_of_eagle3_keeps_what_it_is_given() -> None:
    """Of a head for an 8B target: state, keys and values, 23 kB a token and step in float32; on this device also the
    chances of attention, which kernels do not keep. The scores of its output head keep a state and a gradient besides.
    """
    tokens, depth = 512, 7
    config = Eagle3Config(
        hidden_size=4096, vocab_size=128256, taps=(2, 16, 29), depth=depth, heads=32, kv_heads=8, head_dim=128,
        mlp_width=14336, rms_norm_eps=1e-5, rope={"rope_type": "default", "rope_theta": 500000.0},
        max_positions=8192, draft_vocab_size=32000, fc_norm=True, norm_output=True,
    )  # fmt: skip
    counted = []
    for recomputes in (False, True):
        with torch.device("meta"):
            ends: Any = nn.Module()
            ends.embed = nn.Embedding(128256, 4096).requires_grad_(False)
            head = Eagle3Draft(config, ends, torch.arange(32000))
            ids = torch.zeros(1, tokens, dtype=torch.long)
            features = torch.zeros(1, tokens, 3, 4096)
        batch = Batch(ids, ids, ids, ids >= 0, features)
        head.recomputes = recomputes
        counted.append(kept(partial(unrolled, head, batch), features, *head.parameters(), ends.embed.weight))
    plain, again = (one / tokens / depth for one in counted)
    assert again < 25_000
    assert plain > 12 * again


def test_nothing_is_kept_for_a_pass_without_gradients() -> None:
    trainable, module, batch = draft_of("eagle3")
    trainable.recompute()
    with torch.no_grad():
        again = [step.hidden for step in module.unroll(batch)]
        module.recomputes = False
        plain = [step.hidden for step in module.unroll(batch)]
    assert all(map(torch.equal, again, plain))
