"""Heads that others published, trained further by `draft.init_from` and described by `python -m train.check`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from decode import generate, load_drafter
from decode.common.errors import UserError
from decode.common.typed_config import build
from decode.drafters.head_draft import HeadDraft
from tests.decode.published_folders import PUBLISHED, save_target
from tests.tiers import by_default
from tests.train.toy import data_settings, head_settings, metrics
from train.check.__main__ import main as check
from train.config import TrainConfig
from train.export import stage as export
from train.export.config import ExportConfig, SavedDraftConfig
from train.stage import run

READ = {
    "yuhuili": "parameters on the hidden states [2, 4, 5] of the target; drafts 151 of 300 tokens "
    "by an output head of its own",
    "FasterDecoding": "on the final hidden state of the target; drafts 300 of 300 tokens by an output head of its own; "
    "4 heads",
    "TGI": "drafts 300 of 300 tokens by the target's; 3 heads",
    "z-lab": "4 tokens a block, 2 layers, Markov rank 0",
    "deepseek-ai": "4 tokens a block, 2 layers, Markov rank 6",
}
"""What `train.check` says that draftsmith makes of them."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("published") / "target", initializer_range=0.1)


def publish(who: str, folder: Path, target: Path) -> Path:
    return PUBLISHED[who][0](folder / who, LlamaForCausalLM.from_pretrained(target).model.embed_tokens.weight.detach())


def further(output_dir: Path, target: Path, corpus: Path, who: str, folder: Path, **changes: Any) -> TrainConfig:
    """A run of a few steps, with no more said of the head than its family."""
    settings = head_settings(output_dir, target, PUBLISHED[who][2], data=data_settings(corpus), **changes)
    settings["draft"] = {"family": PUBLISHED[who][2], "init_from": str(folder)}
    return build(TrainConfig, settings)


@pytest.mark.parametrize("who", by_default(3, PUBLISHED))
def test_a_published_head_is_trained_further(who: str, tmp_path: Path, target: Path, corpus: Path) -> None:
    folder = publish(who, tmp_path, target)
    run(further(tmp_path / "out", target, corpus, who, folder, steps=8, validate_every=8))
    lines = metrics(tmp_path / "out", "train")
    assert min(line["loss"] for line in lines[1:]) < lines[0]["loss"]
    model = LlamaForCausalLM.from_pretrained(target)
    before, after = load_drafter(folder, target=model), load_drafter(tmp_path / "out", target=model)
    assert isinstance(before, HeadDraft)
    assert isinstance(after, HeadDraft)
    assert after.taps == before.taps
    ours, theirs = before.state_dict(), after.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(one, theirs[name]) == (name == "vocab") for name, one in ours.items())
    prompt = torch.arange(10, 18)[None]
    settings: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.0, "eos_token_id": ()}
    drafted = generate(model, after, prompt, **settings).sequences
    assert torch.equal(drafted, generate(model, None, prompt, **settings).sequences)


def test_a_step_of_no_length_leaves_it_as_it_was(tmp_path: Path, target: Path, corpus: Path) -> None:
    folder = publish("RedHatAI", tmp_path, target)
    run(further(tmp_path / "out", target, corpus, "RedHatAI", folder, lr=1e-9, muon_lr=1e-9))
    model = LlamaForCausalLM.from_pretrained(target)
    before, after = (load_drafter(one, target=model) for one in (folder, tmp_path / "out"))
    assert isinstance(before, HeadDraft)
    assert isinstance(after, HeadDraft)
    assert after.config.norm_before_residual  # type: ignore[attr-defined]
    for name, one in before.state_dict().items():
        assert torch.allclose(one, after.state_dict()[name], atol=1e-6), name


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        ({"family": "medusa"}, "of family eagle3, and draft.family=medusa"),
        ({"family": "eagle3", "heads": 8}, "draft.heads=8, and the head .* has 4"),
        ({"family": "eagle3", "head": {"taps": [1, 2, 3]}}, "draft.head.taps=.*2, 4, 5"),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    draft: dict[str, Any], words: str, tmp_path: Path, target: Path, corpus: Path
) -> None:
    folder = publish("RedHatAI", tmp_path, target)
    settings = head_settings(tmp_path / "out", target, data=data_settings(corpus))
    settings["draft"] = draft | {"init_from": str(folder)}
    with pytest.raises(UserError, match=words):
        run(build(TrainConfig, settings))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("who", by_default(2, ["RedHatAI", "speculators-qwen3", "FasterDecoding", "TGI", "z-lab"]))
def test_one_that_was_trained_further_is_exported_with_its_own_head(
    who: str, tmp_path: Path, target: Path, corpus: Path
) -> None:
    run(further(tmp_path / "out", target, corpus, who, publish(who, tmp_path, target)))
    export.run(ExportConfig("vllm", str(tmp_path / "served"), SavedDraftConfig(str(tmp_path / "out/model"))))
    model = LlamaForCausalLM.from_pretrained(target)
    saved, read = (load_drafter(tmp_path / name, target=model) for name in ("out", "served"))
    assert isinstance(saved, HeadDraft)
    assert isinstance(read, HeadDraft)
    ours, theirs = saved.state_dict(), read.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(one, theirs[name]) for name, one in ours.items())


@pytest.mark.parametrize(("who", "part"), [("RedHatAI", "norm_before_residual"), ("speculators-qwen3", "qk_norm")])
def test_an_engine_that_does_not_know_its_layer_is_not_given_it(
    who: str, part: str, tmp_path: Path, target: Path, corpus: Path
) -> None:
    run(further(tmp_path / "out", target, corpus, who, publish(who, tmp_path, target)))
    with pytest.raises(UserError, match=f"SGLang does not know {part}"):
        export.run(ExportConfig("sglang", str(tmp_path / "served"), SavedDraftConfig(str(tmp_path / "out/model"))))
    assert not (tmp_path / "served").exists()


@pytest.mark.parametrize("who", by_default(6, PUBLISHED))
def test_a_published_head_is_described(
    who: str, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = publish(who, tmp_path, target)
    settings = [f"draft.path={folder}", f"target.path={target}", "tokens=0", "format=all"]
    monkeypatch.setattr(sys, "argv", ["draftsmith-check", *settings])
    with pytest.raises(SystemExit):
        check()
    shown = capsys.readouterr().err
    assert f"draftsmith reads it as a draft of family {PUBLISHED[who][2]}" in shown
    assert READ.get(who, "") in shown
    assert f"published ({PUBLISHED[who][1]}, for " in shown or "ok: values" in shown
