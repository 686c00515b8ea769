"""`python -m train.check` on folders that others publish: what it says that draftsmith makes of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from tests.decode.formats.folders import PUBLISHED, save_target
from train.check.__main__ import main

READ = {
    "yuhuili": "parameters on the hidden states [2, 4, 5] of the target; drafts 151 of 300 tokens "
    "by an output head of its own",
    "FasterDecoding": "on the final hidden state of the target; drafts 300 of 300 tokens by an output head of its own; "
    "4 heads",
    "TGI": "drafts 300 of 300 tokens by the target's; 3 heads",
    "z-lab": "4 tokens a block, 2 layers, Markov rank 0",
    "deepseek-ai": "4 tokens a block, 2 layers, Markov rank 6",
}


@pytest.mark.parametrize("who", PUBLISHED)
def test_a_published_head_is_described(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = save_target(tmp_path / "target")
    embedding = LlamaForCausalLM.from_pretrained(target).model.embed_tokens.weight.detach()
    folder = PUBLISHED[who][0](tmp_path / "published", embedding)
    settings = [f"draft.path={folder}", f"target.path={target}", "tokens=0", "format=all"]
    monkeypatch.setattr(sys, "argv", ["draftsmith-check", *settings])
    with pytest.raises(SystemExit):
        main()
    shown = capsys.readouterr().err
    assert f"draftsmith reads it as a draft of family {PUBLISHED[who][2]}" in shown
    assert READ.get(who, "") in shown
    assert f"published ({PUBLISHED[who][1]}, for " in shown or "ok: values" in shown
