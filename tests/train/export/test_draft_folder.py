"""An exported draft is an ordinary transformers folder over the target's tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from decode import generate, load_drafter
from decode.common.run_folder import sha256_file
from decode.common.typed_config import build
from decode.drafters.saved_head import HEADS
from decode.formats.lm import TOKENIZER_FILES, copy_tokenizer, engine_config
from tests.tiny import tiny_llama
from tests.train.overfit import built_head
from tests.train.toy import tiny_config, tiny_settings
from train.config import TrainConfig
from train.export.draft_folder import Export, export_head, export_lm
from train.export.model_card import model_card
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


def test_who_may_read_the_config_may_read_the_weights(exported: Path) -> None:
    """safetensors makes files for their owner alone."""
    modes = {(exported / name).stat().st_mode for name in ("config.json", "model.safetensors", "README.md")}
    assert len(modes) == 1


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
    for words in ("assistant_model=", "vllm serve", '"method": "draft_model"', "sglang", "STANDALONE"):
        assert words in card


def test_the_card_of_a_draft_of_one_pass_has_vllm_draft_so() -> None:
    settings = tiny_settings(Path("out"), Path("a/target"), records="some/records", draft={"parallel": {"tokens": 3}})
    facts = {"loss": 1.0, "alpha": 0.5, "tau": 2.0, "step": 1, "rule": "the best", "validation_tokens": 1}
    facts |= {"tokens": 31, "train_tokens": 20, "num_parameters": 10}
    settings |= {"optimizer": "muon", "lr": 0.012345}
    card = model_card(build(TrainConfig, settings), facts, 3)
    assert "the 20 tokens of the training split of records `some/records`, read 1.6 times" in card
    assert "Muon at 0.004, tables and norms by AdamW at 0.0123 at the peak" in card
    assert '"num_speculative_tokens": 3, "parallel_drafting": true' in card


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


def test_our_own_decoder_drafts_what_the_exported_model_writes(
    models: tuple[PreTrainedModel, PreTrainedModel], exported: Path
) -> None:
    """Each round accepts as many tokens as the export's own greedy text agrees with the target's."""
    (target, draft), k = models, 3
    drafter, ids = load_drafter(exported, target=target), torch.arange(10, 18)[None]
    out = generate(
        target, drafter, ids, max_new_tokens=12, temperature=0.0, eos_token_id=(), num_draft_tokens=k, seed=0
    )
    written = generate(target, None, ids, max_new_tokens=12 + k, temperature=0.0, eos_token_id=(), seed=0).sequences
    assert torch.equal(out.sequences, written[:, : ids.shape[1] + 12])
    length, accepted = ids.shape[1], []
    for _ in out.stats.rounds:
        own = generate(
            draft, None, written[:, :length], max_new_tokens=k, temperature=0.0, eos_token_id=(), seed=0
        ).sequences
        accepted.append(int((own == written[:, : length + k])[0, length:].cumprod(0).sum()))
        length += accepted[-1] + 1
    assert [one.accepted for one in out.stats.rounds][:-1] == accepted[:-1]  # the last round may be cut
    assert 0 < sum(accepted) < k * len(accepted)


def test_a_chat_template_and_every_other_tokenizer_file_travel(tmp_path: Path, target: Path, records: Path) -> None:
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


def exports(folder: Path, dtype: torch.dtype) -> Export:
    """Seven draft tokens, of a target without a tokenizer."""
    (folder / "source").mkdir()
    target = {"path": str(folder / "source"), "fingerprint": "f"}
    return Export(str(folder / "source"), None, dtype, 7, "a card", {"measured": 1, "target": target})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_config_are_in_the_precision_asked_for(tmp_path: Path, dtype: torch.dtype) -> None:
    """Whatever they were trained in; the tied table once; to the last bit but for the rounding."""
    rope = {"rope_type": "default", "rope_theta": 5e5}
    model = tiny_llama(tie_word_embeddings=True, rope_parameters=rope, eos_token_id=[3, 5], pad_token_id=2)
    export_lm(model, tmp_path / "out", exports(tmp_path, dtype))
    weights = load_file(tmp_path / "out" / "model.safetensors")
    wanted = {name: weight.to(dtype) for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    assert weights.keys() == wanted.keys()
    for name, weight in weights.items():
        assert weight.dtype == dtype
        assert torch.equal(weight, wanted[name]), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == str(dtype).removeprefix("torch.")
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5e5
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert again.dtype == dtype
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_transformers_is_told_how_many_tokens_to_draft_and_to_draft_them_all(tmp_path: Path) -> None:
    model = tiny_llama(eos_token_id=[3, 5], pad_token_id=2, bos_token_id=1)
    export_lm(model, tmp_path / "out", exports(tmp_path, torch.float32))
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) | {"transformers_version": ""} == {
        "num_assistant_tokens": 7,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
        "bos_token_id": 1,
        "eos_token_id": [3, 5],
        "pad_token_id": 2,
        "transformers_version": "",
    }


def test_whole_numbers_stay_whole_and_every_file_is_summed(tmp_path: Path, target: Path) -> None:
    """A draft vocabulary's ids in half precision would be other tokens."""
    known = built_head(target, "eagle3")
    vocab = torch.tensor([0, 1, 257, 299])
    config = replace(known.head.config, draft_vocab_size=4)
    head = HEADS["eagle3"][1](config, known.head.ends, vocab)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "left from before").touch()
    export_head(head, tmp_path / "out", exports(tmp_path, torch.bfloat16))
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights["vocab"].tolist() == vocab.tolist()
    assert {weight.dtype for name, weight in weights.items() if name != "vocab"} == {torch.bfloat16}
    about = json.loads((tmp_path / "out" / "draftsmith.json").read_text())
    files = {"README.md", "config.json", "model.safetensors"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == files | {"draftsmith.json"}
    assert about["family"] == "eagle3"
    assert about["sha256"] == {name: sha256_file(tmp_path / "out" / name) for name in files}
    assert len(set(about["sha256"].values())) == 3


def test_readers_that_do_not_know_rope_parameters_find_the_scaling(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 32}
    model = tiny_llama(max_position_embeddings=256, rope_parameters={**scaling, "rope_theta": 5e5})
    config = engine_config(model, torch.float32)
    assert (config["rope_scaling"], config["rope_theta"]) == (scaling, 5e5)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == model.config.rope_parameters
