"""Responses written with a draft: the text of the target alone, in fewer passes; and drafts that are refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from decode.common.errors import ConfigError, InputError
from decode.common.typed_config import build
from distill import __main__ as cli
from distill.config import DataConfig, DistillConfig, PromptConfig, ResponseDraftConfig, ResponseSampling
from distill.records.record_folder import RecordFolder, RecordWriter
from distill.runtimes import transformers_runtime
from distill.stage import run
from tests.distill.runs import check_alike, tiny_config
from tests.distill.test_responses import CHAT
from tests.tiers import by_default
from tests.tiny import save_tiny_target, tiny_tokenizer
from tests.train.export.saved_heads import save_head

K = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft that has part of its weights and so part of its tokens, a head, and two corpora."""
    folder = tmp_path_factory.mktemp("drafted")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    model = AutoModelForCausalLM.from_pretrained(save_tiny_target(folder / "target"))
    tokenizer.save_pretrained(folder / "target")
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * weight.std() * torch.randn_like(weight)
    model.save_pretrained(folder / "lm")
    tokenizer.save_pretrained(folder / "lm")
    for head in ("medusa", "exit_adapter"):
        save_head(folder / head, folder / "target", head)
    with (folder / "chat.jsonl").open("w") as file:
        for number in range(20):
            said = [("user", f"Hi {number}"), ("assistant", "gone"), ("user", "Go on")]
            turns = [{"role": role, "content": content} for role, content in said]
            file.write(json.dumps({"messages": turns if number % 2 else turns[:1]}) + "\n")
    return folder


def config_of(folder: Path, output: str, draft: str | None = None, chat: bool = False, **fields: Any) -> DistillConfig:
    path = str(folder / draft) if draft is not None and (folder / draft).exists() else draft
    asked = ResponseDraftConfig(path=path, num_draft_tokens=K)
    own: dict[str, Any] = {"sampling": ResponseSampling(max_new_tokens=12, draft=asked)}
    if chat:
        own["data"] = DataConfig("jsonl", str(folder / "chat.jsonl"), validation_share=0.2, heldout_share=0.0)
        own["prompts"] = PromptConfig(count=6, validation_count=1)
    return tiny_config(folder, output, **own | fields)


def drafting(folder: Path) -> list[tuple[str, int, int, float]]:
    found = RecordFolder.open(folder).manifest.drafting
    return [(one.draft.family, one.tokens, one.passes, one.tokens_per_pass) for one in found]


def written(folder: Path) -> int:
    """Tokens of all responses."""
    records = RecordFolder.open(folder)
    return sum(len(one.ids) - one.meta["prompt_end"] for one in map(records.read, range(len(records))))


@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
@pytest.mark.parametrize("batch_size", by_default(1, [3, 1]))
def test_records_are_those_of_the_target_alone(
    folder: Path, chat: bool, batch_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"{chat}_{batch_size}"
    run(config_of(folder, f"alone_{name}", chat=chat, batch_size=batch_size))
    assert drafting(folder / f"alone_{name}") == []
    for draft in ("lm", "medusa", "exit_adapter", "ngram"):
        with caplog.at_level("INFO"):
            run(config_of(folder, f"{draft}_{name}", draft, chat, batch_size=batch_size))
        check_alike(folder / f"{draft}_{name}", folder / f"alone_{name}")
        ((family, tokens, passes, per_pass),) = drafting(folder / f"{draft}_{name}")
        assert family == draft
        assert tokens == written(folder / f"alone_{name}")
        assert per_pass == pytest.approx(tokens / passes, abs=1e-4)
        assert (
            f"responses drafted by {folder / draft if (folder / draft).exists() else draft}: {per_pass:.2f} tokens"
            in caplog.text
        )
        if draft == "lm":  # some of its tokens were accepted, and some were not
            assert 1.2 < per_pass < K


class Stopped(Exception):
    """In place of a kill."""


def stop_at(shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    write = RecordWriter.write

    def stopping(self: RecordWriter, index: int, records: list) -> object:
        if index == shard:
            raise Stopped
        return write(self, index, records)

    monkeypatch.setattr(RecordWriter, "write", stopping)


@pytest.mark.parametrize(("first", "then"), [("lm", None), (None, "lm"), ("lm", "ngram")])
def test_a_run_goes_on_with_another_draft_or_none(
    folder: Path, first: str | None, then: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{first}_then_{then}"
    with monkeypatch.context() as patch:
        stop_at(2, patch)
        with pytest.raises(Stopped):
            run(config_of(folder, name, first, resume="auto"))
    run(config_of(folder, name, then, resume="auto"))
    run(config_of(folder, "whole", resume="auto"))
    check_alike(folder / name, folder / "whole")
    assert [family for family, *_ in drafting(folder / name)] == [one for one in (first, then) if one]
    shards = RecordFolder.open(folder / name).manifest.shards
    used = [None if one.drafting is None else one.drafting.draft.family for one in shards]
    assert used == [first, first, then, then]


def test_a_draft_that_does_not_fit_ends_with_2_before_anything_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_target(tmp_path / "wide", vocab_size=310)
    save_tiny_target(tmp_path / "short", max_position_embeddings=16)
    save_tiny_target(tmp_path / "other", seed=5)
    save_head(tmp_path / "head", tmp_path / "other", "medusa")
    monkeypatch.setattr(transformers_runtime, "load_model", None)
    corpus = config_of(folder, "unused").data.path
    data = ["data=jsonl", f"data.path={corpus}", "data.validation_share=0.2", "prompts.tokens=6"]
    base = [f"target.path={folder / 'target'}", *data, f"output_dir={tmp_path / 'out'}"]
    for given, said in [
        (f"sampling.draft.path={tmp_path / 'wide'}", "has 310 vocabulary entries"),
        (f"sampling.draft.path={tmp_path / 'head'}", "fingerprint"),
        (f"sampling.draft.path={tmp_path / 'short'}", "reads 16: it has no positions for the rest"),
        (f"sampling.draft.path={tmp_path / 'nowhere'}", "nowhere"),
        ("sampling.draft.verifier=rejection", "sampling.draft.verifier"),
        ("sampling.draft.num_draft_tokens=0", "at least 1 token"),
    ]:
        monkeypatch.setattr(sys, "argv", ["distill", *base, "sampling.max_new_tokens=24", given])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        told = capsys.readouterr().err
        assert ended.value.code == 2, told
        assert said in told
        assert not (tmp_path / "out").exists()


def test_a_draft_of_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "other")
    tiny_tokenizer(299).save_pretrained(tmp_path / "other")
    with pytest.raises(InputError, match="the tokenizers differ"):
        run(config_of(folder, "refused", str(tmp_path / "other")))
    assert not (folder / "refused").exists()


def test_settings_that_would_change_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="responses=corpus has it write none"):
        DistillConfig(responses="corpus", sampling=ResponseSampling(draft=ResponseDraftConfig("ngram")))
    for given in ({"adaptive": True}, {"dtype": "float32"}):
        vllm = {"target": {"path": "t", "runtime": "vllm"}, "sampling": {"draft": {"path": "some/draft", **given}}}
        with pytest.raises(ConfigError, match=f"{next(iter(given))}=.*would ignore it"):
            build(DistillConfig, vllm)


def test_settings_of_a_draft_by_name_reach_it(folder: Path) -> None:
    """Prompts of one document share words; a match of 200 tokens is never found, and nothing is drafted."""
    asked = ResponseDraftConfig("ngram", settings={"least_match": 200}, num_draft_tokens=K)
    run(config_of(folder, "unmatched", sampling=ResponseSampling(max_new_tokens=12, draft=asked)))
    ((_, tokens, passes, _),) = drafting(folder / "unmatched")
    assert tokens == passes
