"""Drafts for a target in a GGUF file, from its records to what engines are told of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from decode import generate, load_drafter
from decode.common.errors import InputError
from decode.config import DecodeConfig, DrafterConfig, ModelConfig, SamplingConfig
from decode.models.compatibility import load_tokenizer, token_map_hash
from decode.models.load import load_model
from decode.stage import run as decode
from eval.__main__ import main as evaluate
from tests.gguf_files import CHATML, write_gguf
from tests.tiny import tiny_llama, tiny_tokenizer
from tests.train.toy import head_config, tiny_config, write_corpus, write_records
from train.config import TrainConfig
from train.export.config import ExportConfig, Format, SavedDraftConfig
from train.export.stage import run as export
from train.stage import run as train

IDS = torch.tensor([[5, 17, 203, 4, 88, 31, 9, 120]])
BRIEF: dict[str, Any] = {"steps": 2, "validate_every": 2, "checkpoint_every": 2}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf(tmp_path_factory.mktemp("target") / "model.gguf")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    folder = tmp_path_factory.mktemp("records")
    corpus = write_corpus(folder / "corpus")
    return write_records(folder / "records", target, corpus, ["head_tail"], {"layers": [-1]})


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory, target: Path, records: Path) -> Path:
    return trained(tiny_config(tmp_path_factory.mktemp("lm") / "run", target, records=str(records), **BRIEF))


def gguf(file: Path, seed: int = 1) -> Path:
    """A target of 320 tokens, of which its tokenizer has 300."""
    tokenizer = tiny_tokenizer(300)
    tokenizer.chat_template = CHATML
    return write_gguf(file, tiny_llama(320, hidden_size=64, num_layers=3, num_heads=4, seed=seed), tokenizer)


def trained(config: TrainConfig) -> Path:
    train(config)
    return Path(config.output_dir) / "model"


def exported(draft: Path, output: Path, form: Format, target: Path | None = None) -> Path:
    asked = ModelConfig(path=None if target is None else str(target))
    export(ExportConfig(format=form, output_dir=str(output), draft=SavedDraftConfig(path=str(draft)), target=asked))
    return output


def test_a_head_learns_from_records_of_a_file_and_drafts_for_that_file_alone(
    tmp_path: Path, target: Path, records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = trained(head_config(tmp_path / "run", target, "mtp", records=str(records), **BRIEF))
    asked = {"target": ModelConfig(path=str(target)), "prompt": "def f(x):", "color": "never"}
    texts = []
    for path in (str(draft), None):
        sampling = SamplingConfig(max_new_tokens=8, temperature=0.0)
        decode(DecodeConfig(**asked, draft=DrafterConfig(path=path), decode=sampling))  # type: ignore[arg-type]
        texts.append(capsys.readouterr().out.splitlines()[0])
    assert texts[0] == texts[1]
    other = load_model(ModelConfig(path=str(gguf(tmp_path / "other" / "model.gguf", seed=8))))
    with pytest.raises(InputError, match="that mean something else"):
        load_drafter(draft, target=other)


@pytest.mark.parametrize("init_from", [False, True])
def test_a_draft_model_has_the_tokenizer_of_a_file(
    tmp_path: Path, target: Path, records: Path, lm: Path, init_from: bool
) -> None:
    if init_from:
        start = {"init_from": str(target), "pruning": {"layers": 2}}
        lm = trained(tiny_config(tmp_path / "run", target, records=str(records), draft=start, **BRIEF))
        assert json.loads((lm / "config.json").read_text())["num_hidden_layers"] == 2
    ours, theirs = load_tokenizer(ModelConfig(path=str(lm))), load_tokenizer(ModelConfig(path=str(target)))
    assert token_map_hash(ours) == token_map_hash(theirs)
    assert ours("def f(x): <eos>")["input_ids"] == theirs("def f(x): <eos>")["input_ids"]
    assert (ours.chat_template, ours.eos_token_id) == (CHATML, theirs.eos_token_id)
    model = load_model(ModelConfig(path=str(target)))
    asked = {"max_new_tokens": 8, "temperature": 1.0, "seed": 3}
    plain = generate(model, None, IDS, **asked).sequences
    assert torch.equal(generate(model, load_drafter(lm, target=model), IDS, **asked).sequences, plain)


def test_llamacpp_takes_the_file_as_it_is_and_other_engines_want_a_folder(
    tmp_path: Path, target: Path, lm: Path
) -> None:
    card = (exported(lm, tmp_path / "all", "all") / "lm" / "README.md").read_text()
    assert f"llama-server -m {target} -md draft.gguf" in card
    assert f"convert_hf_to_gguf.py {target}" not in card
    for other in ("vllm serve", "sglang", "trtllm", "from_pretrained"):
        assert other not in card
    for form in ("vllm", "sglang", "trtllm", "transformers"):
        with pytest.raises(InputError, match=r"is a GGUF file, .*give target\.path the folder"):
            exported(lm, tmp_path / form, form)  # type: ignore[arg-type]
        assert not (tmp_path / form).exists()
    load_model(ModelConfig(path=str(target))).save_pretrained(tmp_path / "folder")
    load_tokenizer(ModelConfig(path=str(target))).save_pretrained(tmp_path / "folder")
    card = (exported(lm, tmp_path / "vllm", "vllm", tmp_path / "folder") / "README.md").read_text()
    assert f"vllm serve {tmp_path / 'folder'}" in card


def test_a_head_for_a_file_is_exported_for_no_engine(tmp_path: Path, target: Path, records: Path) -> None:
    draft = trained(head_config(tmp_path / "run", target, "medusa", records=str(records), **BRIEF))
    for form in ("vllm", "all"):
        with pytest.raises(InputError, match=r"is a GGUF file, .*train it on that folder"):
            exported(draft, tmp_path / "out", form)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_the_card_of_a_training_loads_the_file_as_a_file(target: Path, lm: Path) -> None:
    card = (lm / "README.md").read_text()
    assert f"target = load_model(ModelConfig({json.dumps(str(target))}))" in card
    assert f"AutoModelForCausalLM.from_pretrained({json.dumps(str(target))}" not in card
    assert "vllm serve" not in card
    lines = card.split("```python\n")[1].split("```")[0].splitlines()
    code = "\n".join(lines[: lines.index("# transformers")]).replace("THIS_FOLDER", str(lm))
    exec(code, {"input_ids": IDS})  # noqa: S102 - the commands are run as they are shown


def test_a_report_is_planned(
    tmp_path: Path, target: Path, lm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"target.path={target}", f"drafts.one={lm}", "plan=true", f"output_dir={tmp_path / 'report'}"]
    words += ["lossless.prompts=3", "timing.prompts=3"]  # its corpus is small
    monkeypatch.setattr("sys.argv", ["eval", *words])
    evaluate()
    told = capsys.readouterr().out
    assert "prompts" in told
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(target.read_bytes()[:-900])
    monkeypatch.setattr("sys.argv", ["eval", f"target.path={cut}", *words[1:]])
    with pytest.raises(SystemExit) as ended:
        evaluate()
    assert ended.value.code == 2
    assert "it was cut off, and" in capsys.readouterr().err
