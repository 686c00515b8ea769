"""Draft models for engines: one transformers folder for all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

from decode.common.errors import InputError
from decode.config import ModelConfig
from decode.formats.lm import LM
from tests.train.toy import tiny_config
from train.export.config import ExportConfig, SavedDraftConfig
from train.export.engines import ENGINES
from train.export.stage import run
from train.stage import run as train

STEPS = {"steps": 1, "validate_every": 1, "checkpoint_every": 1}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory, target: Path, records: Path) -> Path:
    folder = tmp_path_factory.mktemp("draft") / "run"
    train(tiny_config(folder, target, records=str(records), **STEPS))
    return folder


def export(draft: Path, output: Path, form: str = "vllm", **given: Any) -> Path:
    run(ExportConfig(format=form, output_dir=str(output), draft=SavedDraftConfig(path=str(draft)), **given))  # type: ignore[arg-type]
    return output


def test_transformers_loads_what_was_trained(draft: Path, target: Path, tmp_path: Path) -> None:
    folder = export(draft, tmp_path / "out")
    ours, theirs = (AutoModelForCausalLM.from_pretrained(one).eval() for one in (draft / "model", folder))
    ids = torch.tensor([[5, 9, 2, 7]])
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == AutoTokenizer.from_pretrained(target).get_vocab()
    assert all((folder / name).read_bytes() == (target / name).read_bytes() for name in TOKENIZER)
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings["num_assistant_tokens_schedule"] == "constant"
    assert settings["assistant_confidence_threshold"] == 0.0


def test_transformers_drafts_as_many_tokens_as_the_export_was_asked_for(draft: Path, tmp_path: Path) -> None:
    folder = export(draft, tmp_path / "out", "transformers", num_draft_tokens=7)
    assert json.loads((folder / "generation_config.json").read_text())["num_assistant_tokens"] == 7


def test_the_manifest_names_what_is_written(draft: Path, tmp_path: Path) -> None:
    folder = export(draft, tmp_path / "out")
    wanted = LM.manifest(json.loads((folder / "config.json").read_text()))
    found = {name: tuple(one.shape) for name, one in load_file(folder / "model.safetensors").items()}
    assert {name: one.shape for name, one in wanted.items() if name in found} == found
    assert all(one.optional for name, one in wanted.items() if name not in found)


def test_weights_and_config_name_one_precision(draft: Path, tmp_path: Path) -> None:
    folder = export(draft, tmp_path / "out", dtype="bfloat16")
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert {one.dtype for one in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}


def test_each_engine_is_told_its_own_words(draft: Path, tmp_path: Path) -> None:
    card = (export(draft, tmp_path / "out", "all", num_draft_tokens=4) / "lm/README.md").read_text()
    for words in (
        '"method": "draft_model", "model": "THIS_FOLDER", "num_speculative_tokens": 4',
        "--speculative-algorithm STANDALONE --speculative-draft-model-path THIS_FOLDER --speculative-num-steps 4",
        "decoding_type: DraftTarget",
        "--spec-type draft-simple --spec-draft-n-max 4",
        "assistant_model=draft",
    ):
        assert words in card


def test_a_type_that_one_engine_lacks_is_served_by_the_others(target: Path, corpus: Path, tmp_path: Path) -> None:
    small = GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=2, n_positions=256, bos_token_id=0, eos_token_id=0)
    AutoModelForCausalLM.from_config(small).save_pretrained(tmp_path / "gpt2")
    AutoTokenizer.from_pretrained(target).save_pretrained(tmp_path / "gpt2")
    own = {"init_from": str(tmp_path / "gpt2"), "width": None, "heads": None}
    text = {"name": "text", "path": str(corpus)}
    train(tiny_config(tmp_path / "run", target, target_source="live", data=text, draft=own, **STEPS))
    with pytest.raises(InputError, match="TensorRT-LLM's PyTorch backend has no class for gpt2 models"):
        export(tmp_path / "run", tmp_path / "out", "trtllm")
    card = (export(tmp_path / "run", tmp_path / "out", "all") / "lm/README.md").read_text()
    assert ENGINES["vllm"].title in card
    assert ENGINES["trtllm"].title not in card


def test_a_model_of_no_target_wants_one(target: Path, corpus: Path, tmp_path: Path) -> None:
    text = {"name": "text", "path": str(corpus)}
    given = {"data": text, "tokenizer": {"path": str(target)}, "objective": {"name": "cross_entropy"}}
    train(tiny_config(tmp_path / "run", None, **given, **STEPS))
    with pytest.raises(InputError, match=r"trained without a target.*give target\.path"):
        export(tmp_path / "run", tmp_path / "out")
    export(tmp_path / "run", tmp_path / "out", target=ModelConfig(path=str(target)))
