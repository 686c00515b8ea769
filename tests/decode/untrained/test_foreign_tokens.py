"""Text between two tokenizers: what both share, how it is spelled, and drafts that are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from decode import load_drafter
from decode.common.errors import ConfigError, InputError
from decode.config import DecodeConfig, DrafterConfig, ModelConfig, SamplingConfig
from decode.drafters.untrained.foreign.drafter import ForeignDrafter
from decode.drafters.untrained.foreign.rows import SpelledRow
from decode.models.load import load_model
from decode.stage import run
from tests.decode.untrained.foreign_models import TEXT, byte_level, llama, metaspace, permuted, shared, spelled
from tests.tiny import EOS, save_tiny_target
from tests.train.export.saved_heads import save_head


def test_what_stands_for_the_same_bytes_is_shared() -> None:
    check_shared()


def check_shared() -> None:
    """A space is Ġ here and ▁ there, and a byte a letter here and <0x..> there."""
    between = shared(byte_level(300), metaspace())
    ours, theirs = between.own.tokenizer.get_vocab(), between.target.tokenizer.get_vocab()
    assert between.own_of[theirs["Ġ"]] == ours["▁"]
    assert between.own_of[theirs["re"]] == ours["re"]
    assert between.own_of[theirs["Ã"]] == ours["<0xC3>"]
    assert between.own_of[theirs["e"]] == ours["e"], "not the fallback for its byte"
    assert between.own_of[theirs[EOS]] == ours[EOS]
    assert not between.are_all
    other, _ = permuted(byte_level(300), llama(300))
    assert shared(byte_level(300), other).are_all


@pytest.mark.parametrize("kinds", ["byte-level, metaspace", "metaspace, byte-level", "byte-level, bytes"])
def test_text_is_spelled_bit_by_bit_as_at_once(kinds: str) -> None:
    check_spelled(kinds)


def check_spelled(kinds: str = "byte-level, bytes") -> None:
    """Wherever the target's text ends, within a character too, the draft reads what its tokenizer makes of the whole
    text, but where the text ends within what is one token of the draft; no half of a character is among it."""
    known = {"byte-level": byte_level(300), "metaspace": metaspace(), "bytes": byte_level(258)}
    target, own = (known[kind] for kind in kinds.split(", "))
    between, script = shared(target, own), spelled(target)
    whole, exact = between.own.ids(TEXT), 0
    for length in range(4, len(script)):
        row = SpelledRow(between)
        for token in script[:length]:
            row.extend([token])
        text = between.own.text(row.whole)
        assert TEXT.startswith(text)
        exact += whole[: len(row.whole)] == row.whole
    assert exact > 9


def test_special_tokens_keep_their_meaning() -> None:
    """The draft reads none of the letters of their names."""
    target, own = byte_level(300), metaspace()
    row = SpelledRow(shared(target, own))
    row.extend([0, *spelled(target, "in x"), 0, 1, *spelled(target, "for")])
    assert row.whole == [0, *spelled(own, "in x"), 0, 1, *spelled(own, "for")]


def other_words(folder: Path) -> None:
    """A tokenizer that has no word in common with any other."""
    vocab = {f"{number}th-word": number for number in range(299)} | {"<unk>": 299}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)


def without_a_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def a_head(folder: Path) -> None:
    shutil.rmtree(folder)
    save_head(folder, folder.parent / "target", "medusa")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (other_words, "share 0, under 5% of the smaller vocabulary.*another draft"),
        (without_a_tokenizer, "draft holds no tokenizer files"),
        (a_head, r"head \(medusa\), which drafts from the hidden states"),
        (shutil.rmtree, "does not exist"),
    ],
)
def test_drafts_that_cannot_be_translated_are_refused_before_the_target_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Any, message: str
) -> None:
    target, draft = (str(save_tiny_target(tmp_path / name)) for name in ("target", "draft"))
    damage(Path(draft))
    monkeypatch.setattr("decode.stage.load_model", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(InputError, match=message):
        run(DecodeConfig(ModelConfig(target), DrafterConfig(path="foreign", settings={"draft": draft}), prompt="a"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "draft=null"),
        ({"draft": "ngram"}, "draft=ngram is the name of a drafter"),
        ({"draft": "x", "by": "text"}, "draft.settings.by was understood .* tokens that both"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DrafterConfig(path="foreign", settings=settings)


def test_it_is_loaded_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From Python, from the command line, and as a member; a draft of other tokens, given as it is, is told of it."""
    target = str(save_tiny_target(tmp_path / "target"))
    draft = str(save_tiny_target(tmp_path / "draft", vocab_size=420, num_layers=1, seed=2))
    model = load_model(ModelConfig(target))
    drafter = load_drafter("foreign", target=model, draft=draft)
    assert type(drafter) is ForeignDrafter
    settings: dict[str, Any] = {"draft": draft}
    mixed = DrafterConfig(path="mixture", settings={"members": ["ngram", "foreign"], "settings": {"foreign": settings}})
    sampling = SamplingConfig(max_new_tokens=8)
    for config in (DrafterConfig(path="foreign", settings=settings), mixed):
        run(DecodeConfig(ModelConfig(target), config, sampling, prompt="return x", color="never"))
        assert "tokens per pass" in capsys.readouterr().out
    with pytest.raises(
        InputError, match=f"decode with it: python -m decode .*draft=foreign draft.settings.draft={draft}"
    ):
        load_drafter(draft, target=model)


def test_other_tokens_are_told_of_the_way_round_it(tmp_path: Path) -> None:
    """Vocabularies of one size too."""
    target, draft = (save_tiny_target(tmp_path / name) for name in ("target", "draft"))
    written = json.loads((draft / "tokenizer.json").read_text())
    vocab = written["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (draft / "tokenizer.json").write_text(json.dumps(written))
    with pytest.raises(InputError, match="tokenizers differ.*decode with it: python -m decode .*draft=foreign"):
        load_drafter(draft, target=load_model(ModelConfig(str(target))))
