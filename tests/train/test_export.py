"""An exported draft is an ordinary transformers folder over the target's tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from decode import load_drafter
from decode.house.run_folder import sha256_file
from tests.train.toy import tiny_config
from train.export import TOKENIZER_FILES
from train.stage import run


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, target: Path, records: Path) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    run(tiny_config(folder, target, records=str(records), steps=150, validate_every=150, checkpoint_every=150))
    return folder / "model"


@pytest.fixture(scope="module")
def models(target: Path, exported: Path) -> tuple[PreTrainedModel, PreTrainedModel]:
    return AutoModelForCausalLM.from_pretrained(target), AutoModelForCausalLM.from_pretrained(exported)


def test_the_config_says_what_every_engine_looks_for(exported: Path, target: Path) -> None:
    config, theirs = (json.loads((folder / "config.json").read_text()) for folder in (exported, target))
    names = "architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    names += "num_key_value_heads head_dim hidden_act max_position_embeddings rms_norm_eps rope_theta rope_parameters "
    names += "attention_bias mlp_bias tie_word_embeddings bos_token_id eos_token_id pad_token_id dtype torch_dtype"
    assert set(names.split()) <= config.keys()
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["vocab_size"] == theirs["vocab_size"]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == theirs["rope_parameters"]["rope_theta"]
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert config["eos_token_id"] == theirs["eos_token_id"]


def test_weights_are_plain_safetensors_without_the_tied_head(exported: Path) -> None:
    with safe_open(exported / "model.safetensors", "pt") as weights:
        assert weights.metadata() == {"format": "pt"}
        assert "model.embed_tokens.weight" in weights.keys()  # noqa: SIM118
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118


def test_tokenizer_files_are_the_targets_byte_for_byte(exported: Path, target: Path) -> None:
    names = [name for name in TOKENIZER_FILES if (target / name).exists()]
    assert "tokenizer.json" in names
    assert all((exported / name).read_bytes() == (target / name).read_bytes() for name in names)
    assert not any((exported / name).exists() for name in TOKENIZER_FILES if name not in names)


def test_provenance_names_the_target_and_every_file(exported: Path) -> None:
    provenance = json.loads((exported / "draftsmith.json").read_text())
    assert provenance["family"] == "lm"
    assert provenance["target"]["fingerprint"]
    files = {path.name for path in exported.iterdir()} - {"draftsmith.json"}
    assert provenance["sha256"].keys() == files
    assert all(sha256_file(exported / name) == known for name, known in provenance["sha256"].items())


def test_the_card_says_what_was_measured_and_how_to_serve_it(exported: Path) -> None:
    card = (exported / "README.md").read_text()
    measured = json.loads((exported.parent / "result.json").read_text())
    assert f"{measured['alpha']:.4f}" in card
    assert f"{measured['tau']:.4f}" in card
    for words in ("assistant_model=", "vllm serve", '"method":"draft_model"', "sglang", "STANDALONE"):
        assert words in card


def test_it_assists_transformers_without_changing_greedy_output(
    models: tuple[PreTrainedModel, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = models
    ids = torch.arange(10, 18)[None]
    settings: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    passes = 0
    forward = target.forward

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal passes
        passes += 1
        return forward(*arguments, **named)

    monkeypatch.setattr(target, "forward", counted)
    plain = target.generate(ids, **settings)  # type: ignore[operator]
    assert passes == 40
    passes = 0
    assisted = target.generate(ids, assistant_model=draft, **settings)  # type: ignore[operator]
    assert torch.equal(plain, assisted)
    assert passes < 40
    assert draft.generation_config is not None
    assert draft.generation_config.num_assistant_tokens_schedule == "constant"


def test_our_own_decoder_loads_it(models: tuple[PreTrainedModel, PreTrainedModel], exported: Path) -> None:
    load_drafter(exported, target=models[0])


def test_a_chat_template_and_every_other_tokenizer_file_travel(tmp_path: Path, target: Path, records: Path) -> None:
    from train.export import copy_tokenizer

    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    copy.mkdir()
    for number, name in enumerate(TOKENIZER_FILES):
        (source / name).write_bytes(bytes([number]))
    (source / "model.safetensors").write_bytes(b"no tokenizer")
    copy_tokenizer(str(source), None, copy)
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == {
        name: bytes([number]) for number, name in enumerate(TOKENIZER_FILES)
    }


def test_half_precision_export_keeps_the_argmax(tmp_path: Path, target: Path, records: Path) -> None:
    run(tiny_config(tmp_path / "out", target, records=str(records), export_dtype="bfloat16"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model", dtype="auto")
    assert model.dtype == torch.bfloat16
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out" / "model")) == model.config.vocab_size
