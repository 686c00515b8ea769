"""A draft model with a reduced vocabulary: trained, decoded and continued on some rows of a head that stays whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from decode import generate, load_drafter
from decode.common.errors import UserError
from decode.drafters.lm import LMDraft
from decode.models.few_rows import FewRows, keep_few_rows, own_vocab, why_not_few
from distill.engines.vllm_support import drafting_with_model
from tests.tiers import by_default
from tests.tiny import tiny_llama
from tests.train.test_inputs import two_texts
from tests.train.toy import tiny_config
from train.export import stage as export
from train.export.config import ExportConfig, SavedDraftConfig
from train.stage import run

PROMPT = torch.arange(10, 18)[None]


def train(folder: Path, target: Path, records: Path, **draft: Any) -> Path:
    run(tiny_config(folder, target, records=str(records), steps=4, draft={"head": {"vocab": 100}} | draft))
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, target: Path, records: Path) -> Path:
    return train(tmp_path_factory.mktemp("few") / "lm", target, records)


@pytest.mark.parametrize("parallel", by_default(1, [3, 0]))
def test_it_drafts_its_tokens_alone_and_the_text_stays_the_targets(
    parallel: int, tmp_path: Path, target: Path, records: Path
) -> None:
    folder = train(tmp_path / "out", target, records, parallel={"tokens": parallel} if parallel else {})
    model, whole = (AutoModelForCausalLM.from_pretrained(one) for one in (target, folder / "model"))
    drafter: Any = load_drafter(folder, target=model)
    vocab = own_vocab(whole.config)
    assert vocab is not None
    assert len(vocab) == 100 < whole.config.vocab_size
    ours, theirs = drafter.model(PROMPT).logits, whole(PROMPT).logits
    torch.testing.assert_close(ours[..., vocab], theirs[..., vocab])
    assert torch.equal(ours[0, 0].isfinite().nonzero()[:, 0], vocab)
    for temperature in (0.0, 1.0):
        settings: dict[str, Any] = {"max_new_tokens": 64, "temperature": temperature, "eos_token_id": (), "seed": 0}
        out = generate(model, drafter, PROMPT, num_draft_tokens=3, **settings)
        assert torch.equal(out.sequences, generate(model, None, PROMPT, **settings).sequences)
        new, accepted = out.sequences[0, PROMPT.shape[1] :].tolist(), []
        for one in out.stats.rounds:
            accepted += new[: one.accepted]
            new = new[one.emitted :]
        assert set(accepted) <= set(vocab.tolist())


def test_training_sees_the_rows_that_decoding_drafts_by(trained: Path) -> None:
    learner, served = (LMDraft.from_pretrained(trained / "model") for _ in range(2))
    served = LMDraft(keep_few_rows(served.model))
    (learned,), (drafted,) = (list(one.unroll(two_texts())) for one in (learner, served))
    assert learned.vocab is not None
    assert drafted.vocab is None
    assert isinstance(served.head.module, FewRows)
    ours, theirs = learned.head(learned.hidden), drafted.head(drafted.hidden)
    assert ours.shape[-1] == 100
    torch.testing.assert_close(ours, theirs[..., learned.vocab])
    ours.sum().backward()
    grown = learner.head.weight.grad
    assert grown is not None
    assert grown[learned.vocab].abs().sum(-1).all()
    whole, _ = learner.drafting_head()
    head: Any = learner.head.module
    head.weight = torch.nn.Parameter(learner.head.weight.detach().clone()[:50])
    with pytest.raises(IndexError):  # as an engine that spreads it may have it: all rows are asked for, not its own
        learner.drafting_head()[0](learned.hidden)
    torch.testing.assert_close(whole(learned.hidden), ours)


def test_a_saved_one_is_continued_with_its_tokens(tmp_path: Path, trained: Path, target: Path, records: Path) -> None:
    sizes: dict[str, Any] = {"width": None, "heads": None, "init_from": str(trained), "head": {"vocab": None}}
    again = train(tmp_path / "again", target, records, **sizes)
    before, after = (json.loads((one / "model/config.json").read_text()) for one in (trained, again))
    assert after["draft_vocab"] == before["draft_vocab"]
    with pytest.raises(UserError, match="draft.head.vocab=50, and the draft .* has 100, which stay"):
        train(tmp_path / "other", target, records, **sizes | {"head": {"vocab": 50}})


def test_what_cannot_be_had_is_refused(tmp_path: Path, trained: Path, target: Path, records: Path) -> None:
    text: dict[str, Any] = {"data": {"name": "python_stdlib"}, "objective": {"name": "cross_entropy"}}
    text["tokenizer"] = {"train_entries": 300}
    with pytest.raises(UserError, match="and there is no target"):
        run(tiny_config(tmp_path / "out", None, **text, draft={"head": {"vocab": 100}}))
    with pytest.raises(UserError, match="more than the 300 tokens of the target"):
        train(tmp_path / "out", target, records, head={"vocab": 1000})
    with pytest.raises(UserError, match="drafts 100 of its tokens .*engines do not heed"):
        export.run(ExportConfig("vllm", str(tmp_path / "served"), SavedDraftConfig(str(trained))))
    with pytest.raises(UserError, match="drafts 100 of its tokens, and vLLM would draft the others"):
        drafting_with_model(str(trained), 3)
    assert "draft with draftsmith" in (trained / "model/README.md").read_text()
    config = tiny_llama().config
    assert why_not_few(config, torch.nn.Linear(2, 2)) == "has an output head with a bias"
    config.final_logit_softcapping = 30.0
    assert "caps its logits" in str(why_not_few(config, None))
    for ids in ([], [3, 2], [1, 1], [0, 999], "all", [True]):
        config.draft_vocab = ids
        with pytest.raises(UserError, match="are not ascending tokens below vocab_size"):
            own_vocab(config)
