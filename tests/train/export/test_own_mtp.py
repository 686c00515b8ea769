"""A target's own MTP layer, trained on and written back into a copy of the target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from decode.common.errors import InputError
from decode.config import ModelConfig
from decode.drafters.mtp import own_mtp
from decode.formats import mtp as layout
from decode.formats.mtp import OWN_MTP
from decode.models.describe import describe_model
from tests.tiny import exaone_moe_config, tiny_tokenizer
from tests.train.own_layer import INDEX, add_own_layer
from tests.train.toy import head_config
from train.export.config import ExportConfig, SavedDraftConfig
from train.export.stage import run
from train.stage import run as train


def published(folder: Path, **overrides: object) -> Path:
    """A target of several files of weights, the last of which holds its MTP layer beside another layer's tensors."""
    tokenizer = tiny_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(exaone_moe_config(vocab_size=300, **ends | overrides))
    model.save_pretrained(folder, max_shard_size="60KB")
    tokenizer.save_pretrained(folder)
    add_own_layer(folder)
    (folder / "README.md").write_text("the target's own card")
    return folder


def trained(folder: Path, target: Path, corpus: Path, **changes: Any) -> Path:
    """A run of two steps, from the target's own layer where nothing else is said."""
    steps = {"steps": 2, "validate_every": 2, "checkpoint_every": 2, "data": {"name": "text", "path": str(corpus)}}
    train(head_config(folder, target, "mtp", **steps, **{"head": {"init_own": True}} | changes))
    return folder


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("target") / "published")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, own: Path, corpus: Path) -> Path:
    return trained(tmp_path_factory.mktemp("draft") / "run", own, corpus)


def export(draft: Path, output: Path, **given: Any) -> Path:
    run(ExportConfig(format="vllm", output_dir=str(output), draft=SavedDraftConfig(path=str(draft)), **given))
    return output


def weights(folder: Path) -> dict[str, Tensor]:
    """Those of all files."""
    return {name: one for file in sorted(folder.glob("*.safetensors")) for name, one in load_file(file).items()}


def test_the_tuned_layer_stands_in_a_copy_of_the_target(own: Path, tuned: Path, tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in own.iterdir()}
    folder = export(tuned, tmp_path / "out")
    old, new = weights(own), weights(folder)
    assert {name: (one.shape, one.dtype) for name, one in new.items()} == {
        name: (one.shape, one.dtype) for name, one in old.items()
    }
    moved = {name for name in old if not torch.equal(old[name], new[name])}
    assert moved
    assert moved <= {name for name in old if name.startswith("mtp.")}
    _, back = own_mtp(describe_model(ModelConfig(path=str(folder))), 1)
    ours = load_file(tuned / "model/model.safetensors")
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[name], ours[name]) for name in ours)
    assert {file.name: file.read_bytes() for file in own.iterdir()} == before
    for name in ("config.json", "generation_config.json", "tokenizer.json", INDEX):
        assert (folder / name).read_bytes() == before[name]
    assert "the target's own card" not in (folder / "README.md").read_text()


def test_files_without_the_layer_take_no_room(own: Path, tuned: Path, tmp_path: Path) -> None:
    folder = export(tuned, tmp_path / "out")
    holds = json.loads((own / INDEX).read_text())["weight_map"]["mtp.fc.weight"]
    files = [file.name for file in own.glob("*.safetensors")]
    assert len(files) > 2
    assert [name for name in files if not (folder / name).samefile(own / name)] == [holds]


def test_where_links_cannot_be_made_files_are_copied(
    own: Path, tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("another file system")

    monkeypatch.setattr(layout.os, "link", fail)
    folder = export(tuned, tmp_path / "out")
    assert weights(folder).keys() == weights(own).keys()
    assert not any((folder / file.name).samefile(file) for file in own.glob("*.safetensors"))


def test_the_layer_is_written_in_the_precision_of_the_target(corpus: Path, tmp_path: Path) -> None:
    target = published(tmp_path / "half")
    last = max(target.glob("*.safetensors"))
    save_file({name: one.bfloat16() for name, one in load_file(last).items()}, last, metadata={"format": "pt"})
    draft = trained(tmp_path / "run", target, corpus)
    with pytest.raises(InputError, match=r"float32 beside a target in torch\.bfloat16; give dtype=bfloat16"):
        export(draft, tmp_path / "out")
    found = weights(export(draft, tmp_path / "out", dtype="bfloat16"))
    assert {one.dtype for name, one in found.items() if name.startswith("mtp.")} == {torch.bfloat16}


def test_a_layer_of_fewer_bits_is_widened_to_those_of_the_target(own: Path, tuned: Path, tmp_path: Path) -> None:
    found = weights(export(tuned, tmp_path / "out", dtype="bfloat16"))
    ours = load_file(tuned / "model/model.safetensors")
    assert found["mtp.fc.weight"].dtype == weights(own)["mtp.fc.weight"].dtype == torch.float32
    assert torch.equal(found["mtp.fc.weight"], ours["eh_proj.weight"].bfloat16().float())


def test_the_launch_command_names_the_copy_alone(tuned: Path, tmp_path: Path) -> None:
    card = (export(tuned, tmp_path / "out") / "README.md").read_text()
    assert 'vllm serve THIS_FOLDER --speculative-config \'{"method": "mtp", "num_speculative_tokens": 3}\'' in card


def test_the_manifest_is_the_layer_of_a_published_config() -> None:
    wanted = OWN_MTP.manifest(exaone_moe_config().to_dict())
    assert len(wanted) == 15
    assert wanted["mtp.fc.weight"].shape == (32, 64)
    assert wanted["mtp.layers.0.self_attn.k_proj.weight"].shape == (16, 32)
    assert wanted["mtp.layers.0.self_attn.q_norm.weight"].shape == (8,)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"head": {"vocab": 60, "init_own": True}}, r"whole vocabulary, and this layer knows \d+ of 300"),
        ({"draft": {"mlp_width": 24}, "head": {}}, r"differs from the target's own in mtp\.layers\.0\.mlp"),
    ],
)
def test_a_layer_that_cannot_stand_there_is_refused(
    own: Path, corpus: Path, tmp_path: Path, changes: dict[str, Any], match: str
) -> None:
    draft = trained(tmp_path / "run", own, corpus, **changes)
    with pytest.raises(InputError, match=match):
        export(draft, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_targets_without_a_class_of_their_own_are_refused(target: Path, corpus: Path, tmp_path: Path) -> None:
    draft = trained(tmp_path / "run", target, corpus, head={})
    with pytest.raises(InputError, match=r"by that target's own class.*exaone_moe alone; train draft=eagle3"):
        export(draft, tmp_path / "out")


def test_a_layer_that_looks_back_a_window_is_not_taken_for_one_that_sees_all(corpus: Path, tmp_path: Path) -> None:
    target = published(tmp_path / "window", mtp_layer_types=["sliding_attention"])
    with pytest.raises(InputError, match=r"has sliding_attention.*Train draft=eagle3"):
        trained(tmp_path / "own", target, corpus)
    fresh = trained(tmp_path / "fresh", target, corpus, head={})
    with pytest.raises(InputError, match="has sliding_attention"):
        export(fresh, tmp_path / "out")
