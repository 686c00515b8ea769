"""Medusa heads for vLLM and TGI: one folder, whose tensors give back our logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from decode.common.errors import InputError
from decode.drafters.head_draft import HeadDraft
from decode.formats.medusa import MEDUSA
from tests.train.toy import head_config
from train.export.config import ExportConfig, SavedDraftConfig
from train.export.source import open_source
from train.export.stage import run
from train.stage import run as train

HEADS = {"one layer": {}, "two layers": {"mlp_layers": 2}, "reduced": {"vocab": 60}, "raw": {"taps": [1]}}


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory, target: Path, corpus: Path) -> dict[str, Path]:
    text = {"name": "text", "path": str(corpus)}
    runs = {}
    for name, head in HEADS.items():
        runs[name] = tmp_path_factory.mktemp("medusa") / "run"
        steps = {"steps": 2, "validate_every": 2, "checkpoint_every": 2}
        train(head_config(runs[name], target, "medusa", data=text, head=head, **steps))
    return runs


def export(draft: Path, output: Path, form: str, **given: Any) -> Path:
    run(ExportConfig(format=form, output_dir=str(output), draft=SavedDraftConfig(path=str(draft)), **given))  # type: ignore[arg-type]
    return output


def ours(draft: Path) -> HeadDraft:
    """The head as the export reads it."""
    return open_source(ExportConfig(format="vllm", output_dir="", draft=SavedDraftConfig(path=str(draft)))).head


def served_logits(config: dict[str, Any], found: dict[str, Tensor], state: Tensor) -> Tensor:
    """(K, n, V) logits as vLLM makes them of final states (n, d)."""
    heads = []
    for head in range(config["medusa_num_heads"]):
        x = state
        for layer in range(config["medusa_num_layers"]):
            linear = f"{head}.{layer}.linear"
            x = x + nn.functional.silu(nn.functional.linear(x, found[f"{linear}.weight"], found[f"{linear}.bias"]))
        heads.append(x @ found["lm_heads.0.weight"].T)
    logits = torch.stack(heads)
    if config["truncated_vocab_size"] == config["vocab_size"]:
        return logits
    every = torch.full((*logits.shape[:-1], config["vocab_size"]), -torch.inf)
    every[..., found["token_map"]] = logits
    return every


@pytest.mark.parametrize("name", ["one layer", "two layers", "reduced"])
def test_the_folder_gives_our_logits(drafts: dict[str, Path], tmp_path: Path, name: str) -> None:
    folder = export(drafts[name], tmp_path / "out", "vllm")
    config, found = json.loads((folder / "config.json").read_text()), load_file(folder / MEDUSA.weights)
    wanted = MEDUSA.manifest(config)
    assert {key: tuple(one.shape) for key, one in found.items()} == {key: one.shape for key, one in wanted.items()}
    assert ("token_map" in found) == (name == "reduced")
    head = ours(drafts[name])
    state = torch.randn(5, head.config.hidden_size, generator=torch.Generator().manual_seed(0))
    assert isinstance(head.heads, nn.ModuleList)
    ours_of_heads = head.logits(torch.stack([one(state) for one in head.heads]))
    torch.testing.assert_close(served_logits(config, found, state), ours_of_heads, rtol=0, atol=1e-5)


def test_the_configuration_is_read_by_both_engines(drafts: dict[str, Path], target: Path, tmp_path: Path) -> None:
    export(drafts["one layer"], tmp_path / "out", "all")
    config = json.loads((tmp_path / "out/medusa/config.json").read_text())
    folded = {key: value for key, value in config.items() if "num" in key and ("heads" in key or "layers" in key)}
    assert folded == {"medusa_num_heads": 3, "medusa_num_layers": 1}, "vLLM takes any such key for one of these"
    assert "architectures" not in config, "TGI would load no heads"
    assert Path(config["base_model_name_or_path"]) == target.absolute()
    assert config["original_lm_head"] is config["medusa_fc_bias"] is True
    theirs = load_file(target / "model.safetensors")
    assert not set(load_file(tmp_path / "out/medusa" / MEDUSA.weights)) & set(theirs), "TGI reads both as one"
    card = (tmp_path / "out/medusa/README.md").read_text()
    assert '"method": "medusa"' in card
    assert "text-generation-launcher --model-id THIS_FOLDER --speculate 3" in card


def test_weights_are_written_in_the_precision_that_is_asked_for(drafts: dict[str, Path], tmp_path: Path) -> None:
    folder = export(drafts["reduced"], tmp_path / "out", "vllm", dtype="bfloat16")
    found = load_file(folder / MEDUSA.weights)
    assert {one.dtype for name, one in found.items() if name != "token_map"} == {torch.bfloat16}
    assert found["token_map"].dtype == torch.int64
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_heads_of_published_folders_have_an_output_head_each() -> None:
    published = {"hidden_size": 8, "vocab_size": 20, "medusa_num_heads": 2, "medusa_num_layers": 1}
    wanted = MEDUSA.manifest(published | {"medusa_fc_bias": True})
    assert {name: one.shape for name, one in wanted.items() if name.startswith("1.")} == {
        "1.0.linear.weight": (8, 8),
        "1.0.linear.bias": (8,),
        "1.1.weight": (20, 8),
    }
    assert MEDUSA.manifest({"hidden_size": 8, "vocab_size": 20, "num_heads": 2, "num_hidden_layers": 1}).keys() == {
        name for name in wanted if "bias" not in name
    }


@pytest.mark.parametrize(
    ("name", "form", "given", "match"),
    [
        ("raw", "vllm", {}, r"final hidden state, and these were trained on state 1"),
        ("raw", "tgi", {}, r"final hidden state, and these were trained on state 1"),
        ("one layer", "vllm", {"num_draft_tokens": 4}, r"num_draft_tokens=4 is more than the 3 heads"),
        ("reduced", "tgi", {}, r"these heads know \d+ of 300 tokens.*format=vllm"),
        ("two layers", "tgi", {}, r"one residual layer each, and these have 2"),
        ("one layer", "sglang", {}, r"SGLang has no Medusa heads"),
        ("one layer", "trtllm", {}, r"PyTorch backend has no Medusa heads"),
    ],
)
def test_what_an_engine_cannot_draft_with_is_refused(
    drafts: dict[str, Path], tmp_path: Path, name: str, form: str, given: dict[str, Any], match: str
) -> None:
    with pytest.raises(InputError, match=match):
        export(drafts[name], tmp_path / "out", form, **given)
    assert not list(tmp_path.iterdir())


def test_fewer_draft_tokens_than_heads_are_served(drafts: dict[str, Path], tmp_path: Path) -> None:
    folder = export(drafts["one layer"], tmp_path / "out", "vllm", num_draft_tokens=2)
    assert '"num_speculative_tokens": 2' in (folder / "README.md").read_text()


def test_vllm_is_told_not_to_miss_the_token_map(drafts: dict[str, Path], tmp_path: Path) -> None:
    for name, is_told in (("one layer", False), ("reduced", True)):
        card = (export(drafts[name], tmp_path / name, "vllm") / "README.md").read_text()
        assert ("enable_weights_track" in card) == is_told
