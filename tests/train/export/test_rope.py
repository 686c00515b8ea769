"""Rotary positions leave with every draft: config.json says them by the new names and by the older ones, alike, and
either alone gives the angles of training, beyond the length that the target was first trained for."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from decode.common.errors import ConfigError
from decode.config import ModelConfig
from decode.formats.head import read_published
from decode.formats.rope import older_rope_of, plain_rope
from decode.models.describe import describe_model
from tests.tiers import by_default
from tests.tiny import tiny_llama, tiny_tokenizer
from tests.train.export.saved_heads import export, save_head
from tests.train.export.test_own_mtp import published, trained
from tests.train.toy import head_config, tiny_config
from train.drafts.head_blueprint import head_blueprint
from train.drafts.lm_blueprint import lm_blueprint
from train.drafts.rope import rope_of
from train.export.config import ExportConfig, SavedDraftConfig
from train.export.draft_folder import Export
from train.export.engines import ENGINES
from train.export.engines.base import Loads
from train.export.stage import run

ORIGINAL = 8
TAPS = (1, 3, 4)
BASE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3, "pad_token_id": 0,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
ROPES: dict[str, dict[str, Any]] = {
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": ORIGINAL,
        "attention_factor": 1.25, "beta_fast": 16.0, "truncate": False,
    },
    "linear": {"type": "linear", "rope_theta": 1e6, "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "longrope": {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0],
    },
    "proportional": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}  # fmt: skip
OLDER = ("rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq", "rotary_emb_base", "rotary_pct")
OF_LM = [name for name, engine in ENGINES.items() if isinstance(engine.forms["lm"], Loads)]
NESTED = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
}
OTHERS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"rope_parameters": NESTED, "head_dim": 8, "layer_types": ["full_attention", "sliding_attention"]},
    "gpt_neox": {"rope_parameters": {"rope_theta": 2e4, "partial_rotary_factor": 0.5}},
    "falcon": {"rope_parameters": ROPES["llama3"], "alibi": False},
    "glm4": {"rope_parameters": {"rope_theta": 2e4, "partial_rotary_factor": 0.25}, "head_dim": 16},
    "phi3": {
        "rope_parameters": {key: ROPES["longrope"][key] for key in ("rope_type", "short_factor", "long_factor")},
        "original_max_position_embeddings": ORIGINAL,
    },
}  # fmt: skip
"""Whose layers differ, that turn a part of each head, that name it in a way of their own, or take no head_dim."""


def save_target(folder: Path, rope: dict[str, Any]) -> Path:
    """A Llama of six layers, heads of eight, with this rope as its config.json spells it."""
    tokenizer = tiny_tokenizer(300)
    ends: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    tiny_llama(320, num_layers=6, num_heads=4, rope_parameters=deepcopy(rope), **ends).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_lm(folder: Path, target: Path, init_from: Path | None, corpus: Path) -> Path:
    """A draft LM as training saves it, before its first step."""
    sizes: dict[str, Any] = {} if init_from is None else {"init_from": str(init_from), "width": None, "heads": None}
    text = {"name": "text", "path": str(corpus)}
    described = describe_model(ModelConfig(path=str(target)))
    cfg = tiny_config(folder / "run", target, target_source="live", data=text, draft=sizes)
    trained_on = {"path": str(target), "fingerprint": described.fingerprint, "vocab_size": described.vocab_size}
    as_saved = Export(str(target), None, torch.float32, 3, "# Card\n", {"target": trained_on})
    torch.manual_seed(0)
    lm_blueprint(cfg, described, None).build().export(folder, as_saved)
    return folder


def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(ids).logits


def respelled(folder: Path, copy: Path, *without: str) -> Path:
    """The same folder, whose config.json does not say these fields."""
    copy.mkdir()
    fields = json.loads((folder / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({key: one for key, one in fields.items() if key not in without}))
    (copy / "model.safetensors").symlink_to(folder / "model.safetensors")
    return copy


def check_alike(draft: Path, out: Path, copies: Path) -> None:
    """Both spellings, and each alone, give the logits of what was trained, beyond the original context."""
    fields = json.loads((out / "config.json").read_text())
    rope = fields["rope_parameters"]
    assert plain_rope(rope.get("full_attention", rope)) == older_rope_of(fields)
    ids = torch.randint(300, (1, 6 * ORIGINAL), generator=torch.Generator().manual_seed(0))
    trained = logits(draft, ids)
    for place in (out, respelled(out, copies / "old", "rope_parameters"), respelled(out, copies / "new", *OLDER)):
        assert torch.equal(logits(place, ids), trained), place


@pytest.mark.parametrize("start", by_default(1, ["random", "init_from"]))
@pytest.mark.parametrize("kind", ROPES)
def test_a_draft_model_has_its_rope_in_both_spellings(kind: str, start: str, corpus: Path, tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", ROPES[kind])
    draft = save_lm(tmp_path / "draft", target, None if start == "random" else target, corpus)
    own = json.loads((draft / "config.json").read_text())["rope_parameters"]
    if start == "init_from" or kind not in ("longrope", "proportional"):
        assert plain_rope(own) == plain_rope(ROPES[kind])
    export(draft, tmp_path / "out", "vllm")
    check_alike(draft, tmp_path / "out", tmp_path)


@pytest.mark.parametrize("engine", OF_LM)
def test_every_format_of_a_draft_model_has_it(engine: str, corpus: Path, tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", ROPES["llama3"])
    fields, _ = export(save_lm(tmp_path / "draft", target, None, corpus), tmp_path / "out", engine)
    assert {**fields["rope_scaling"], "rope_theta": fields["rope_theta"]} == fields["rope_parameters"]
    assert fields["rope_parameters"] == ROPES["llama3"]


@pytest.mark.parametrize("kind", OTHERS)
def test_a_draft_model_of_another_type_names_it_as_older_readers_of_that_type_do(
    kind: str, corpus: Path, tmp_path: Path
) -> None:
    target = save_target(tmp_path / "target", ROPES["llama3"])
    config = AutoConfig.for_model(kind, **BASE | deepcopy(OTHERS[kind]))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "small")
    AutoTokenizer.from_pretrained(target).save_pretrained(tmp_path / "small")
    draft = save_lm(tmp_path / "draft", target, tmp_path / "small", corpus)
    export(draft, tmp_path / "out", "vllm")
    check_alike(draft, tmp_path / "out", tmp_path)


@pytest.mark.parametrize("name", by_default(1, ["eagle3", "eagle3.1", "dspark", "dflash"]))
@pytest.mark.parametrize("kind", ROPES)
def test_a_head_has_the_targets_in_both_spellings(kind: str, name: str, tmp_path: Path) -> None:
    """The export itself compares its logits at 24 positions, of which the target's first training saw eight."""
    target = save_target(tmp_path / "target", ROPES[kind])
    described = describe_model(ModelConfig(path=str(target)))
    head = save_head(tmp_path / "head", target, name, taps=TAPS, rope=rope_of(described, True), max_positions=64)
    written = ExportConfig(
        format="all", output_dir=str(tmp_path / "out"), draft=SavedDraftConfig(path=f"{tmp_path}/head")
    )
    run(written)
    for folder in (tmp_path / "out").iterdir():
        fields = json.loads((folder / "config.json").read_text())
        for each in (fields, fields.get("transformer_layer_config") or fields):
            assert plain_rope(each["rope_parameters"]) == older_rope_of(each) == plain_rope(head.config.rope)
        (folder / "config.json").write_text(json.dumps({**fields, "rope_parameters": None}))
        again = read_published(folder, described)
        assert plain_rope(again.rope) == plain_rope(head.config.rope)


@pytest.mark.parametrize("name", ["eagle3", "dspark", "dflash"])
def test_a_short_targets_dynamic_rope_is_compared_within_its_context(name: str, tmp_path: Path) -> None:
    """Beyond it the angles are those of a pass's own length, and a folder without fault was refused."""
    target = save_target(tmp_path / "target", ROPES["dynamic"])
    fields = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(fields | {"max_position_embeddings": 16}))
    rope = rope_of(describe_model(ModelConfig(path=str(target))), True)
    save_head(tmp_path / "head", target, name, taps=TAPS, rope=rope, max_positions=16)
    export(tmp_path / "head", tmp_path / "out")


@pytest.mark.parametrize("family", ["eagle3", "dspark", "mtp"])
def test_a_head_of_a_dynamic_rope_has_the_targets_length(family: str, corpus: Path, tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", ROPES["dynamic"])
    text = {"name": "text", "path": str(corpus)}
    cfg = head_config(tmp_path / "run", target, family, data=text, draft={"max_positions": 64, "heads": None})
    with pytest.raises(ConfigError, match="draft.max_positions=64.*dynamic.*context of 256 tokens.*Leave"):
        head_blueprint(cfg, describe_model(cfg.target), None)


def test_a_targets_own_layer_keeps_the_targets(corpus: Path, tmp_path: Path) -> None:
    target = published(tmp_path / "target", rope_parameters=deepcopy(ROPES["llama3"]))
    draft = trained(tmp_path / "run", target, corpus)
    run(ExportConfig(format="vllm", output_dir=str(tmp_path / "out"), draft=SavedDraftConfig(path=str(draft))))
    assert json.loads((tmp_path / "out/config.json").read_text())["rope_parameters"] == ROPES["llama3"]
    assert json.loads((draft / "model/config.json").read_text())["rope"] == ROPES["llama3"]
