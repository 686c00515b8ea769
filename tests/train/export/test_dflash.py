"""DFlash heads as folders: what engines make room for, states in both conventions, masks, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.common.errors import InputError
from tests.tiny import MODELS, save_tiny_target
from tests.train.export.saved_heads import check_described, export, save_head, save_padded_target

VOCAB = torch.tensor([0, 1, 7, 8, 200, 299])
TAPS = (4, 1, 3)
"""Not in the order in which engines hand states over."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_padded_target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a token for each row."""
    return save_tiny_target(tmp_path_factory.mktemp("full") / "model", num_layers=6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("vocab", [None, VOCAB])
def test_a_folder_holds_what_its_config_calls_for(
    target: Path, vocab: torch.Tensor | None, dtype: str, tmp_path: Path
) -> None:
    save_head(tmp_path / "head", target, "dflash", vocab, taps=TAPS)
    fields, tensors = export(tmp_path / "head", tmp_path / "out", dtype=dtype)
    check_described(fields, tensors, "vllm", "dflash")
    assert fields["architectures"] == ["DFlashDraftModel"]
    assert fields["dtype"] == dtype
    assert ("d2t" in tensors) == (vocab is not None)
    assert not {"embed_tokens.weight", "mask.weight", "vocab"} & tensors.keys()


def test_states_are_listed_both_ways_and_read_from_the_earliest_layer_on(target: Path, tmp_path: Path) -> None:
    head = save_head(tmp_path / "head", target, "dflash", taps=TAPS)
    fields, tensors = export(tmp_path / "head", tmp_path / "out")
    assert fields["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert fields["dflash_config"]["target_layer_ids"] == fields["target_layer_ids"] == [0, 2, 3]
    assert fields["num_aux_hidden_states"] == 3
    states = torch.randn(5, 3, head.config.hidden_size)  # of the taps 1, 3 and 4
    ours = head.fc(states[:, [2, 0, 1]].flatten(1))  # type: ignore[operator]
    torch.testing.assert_close(states.flatten(1) @ tensors["fc.weight"].T, ours)
    others = {name: one for name, one in head.state_dict().items() if name.startswith(("layers.", "norm.", "hidden_"))}
    assert all(torch.equal(tensors[name], one) for name, one in others.items())


def test_a_learned_mask_has_a_file_and_the_id_of_a_row_that_no_token_has(
    target: Path, full: Path, tmp_path: Path
) -> None:
    for name, path, token in (("padded", target, 300), ("full", full, 1)):  # 1 fills up texts there
        head = save_head(tmp_path / name, path, "dflash", taps=TAPS)
        fields, _ = export(tmp_path / name, tmp_path / f"{name}-out")
        mask = torch.load(tmp_path / f"{name}-out/mask_embedding.pt", weights_only=True)
        assert mask.keys() == {"embedding", "mask_token_id"}
        assert torch.equal(mask["embedding"], head.mask.weight[0])  # type: ignore[union-attr, index]
        assert mask["mask_token_id"] == fields["mask_token_id"] == fields["dflash_config"]["mask_token_id"] == token


def test_a_learned_mask_is_no_token_of_a_tokenizer_with_gaps(tmp_path: Path) -> None:
    """SGLang writes the mask over that row of the target's own embedding."""
    target = save_padded_target(tmp_path / "target")
    file = target / "tokenizer.json"
    content = json.loads(file.read_text())
    last = max(content["model"]["vocab"], key=content["model"]["vocab"].get)
    content["model"]["vocab"][last] = 310
    file.write_text(json.dumps(content))
    save_head(tmp_path / "head", target, "dflash", taps=TAPS)
    assert export(tmp_path / "head", tmp_path / "out")[0]["mask_token_id"] == 311


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_mask_of_the_vocabulary_has_no_file(target: Path, tmp_path: Path, dtype: str) -> None:
    save_head(tmp_path / "head", target, "dflash", taps=TAPS, mask_token=17)
    fields, _ = export(tmp_path / "head", tmp_path / "out", dtype=dtype)
    assert fields["dflash_config"]["mask_token_id"] == 17
    assert not (tmp_path / "out/mask_embedding.pt").exists()


def test_the_file_of_a_mask_is_in_the_precision_that_is_asked_for(target: Path, tmp_path: Path) -> None:
    head = save_head(tmp_path / "head", target, "dflash", taps=TAPS)
    export(tmp_path / "head", tmp_path / "out", dtype="bfloat16")
    mask = torch.load(tmp_path / "out/mask_embedding.pt", weights_only=True)["embedding"]
    assert torch.equal(mask, head.mask.weight[0].bfloat16())  # type: ignore[union-attr, index]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("sglang", {"vocab": VOCAB}, "this head knows 6 of its 320 tokens; train with draft.head.vocab=null"),
    ("trtllm", {"vocab": VOCAB, "mask_token": 17}, "this head knows 6 of its 320 tokens"),
    ("trtllm", {}, r"mask is a learned vector, and TensorRT-LLM has .* alone; train with draft.head.mask_token=ID"),
    ("llamacpp", {"vocab": VOCAB}, "llama.cpp drafts with the target's whole output head, and this head knows 6 of"),
    ("llamacpp", {"family": "dflash2", "mask_token": 17, "candidates": 8}, "72 channels .* draft.head.candidates=5,"),
    ("speculators", {}, "mask is a learned vector, and the speculators library has"),
    ("vllm", {"taps": (0, 3)}, r"reads the hidden states \[0, 3\] of a target of 6 layers.* draft.head.taps"),
    ("vllm", {"taps": (3, 6)}, "engines hand over those between its layers, 1 to 5"),
    ("vllm", {"taps": (3, -1)}, "engines hand over those between its layers"),
]


@pytest.mark.parametrize(("engine", "fields", "message"), REFUSED)
def test_what_an_engine_would_draft_otherwise_is_refused(
    target: Path, engine: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"taps": TAPS} | fields
    save_head(tmp_path / "head", target, given.pop("family", "dflash"), **given)
    with pytest.raises(InputError, match=message):
        export(tmp_path / "head", tmp_path / "out", engine)
    assert not (tmp_path / "out").exists()


def test_more_tokens_than_a_block_drafts_are_refused(target: Path, tmp_path: Path) -> None:
    save_head(tmp_path / "head", target, "dflash", taps=TAPS, depth=3)
    with pytest.raises(InputError, match=r"num_draft_tokens=4, and its blocks draft depth=3 tokens; ask for 3 at most"):
        export(tmp_path / "head", tmp_path / "out", num_draft_tokens=4)


def test_sglang_writes_a_learned_mask_into_no_row_that_the_target_uses(full: Path, tmp_path: Path) -> None:
    """It shares the target's embedding, and merges the mask into it."""
    save_head(tmp_path / "full", full, "dflash", taps=TAPS)
    with pytest.raises(InputError, match="writes into the target's own embedding, and .* has a token for every row"):
        export(tmp_path / "full", tmp_path / "out", "sglang")
    tied = save_padded_target(tmp_path / "tied", tie_word_embeddings=True)
    save_head(tmp_path / "head", tied, "dflash", taps=TAPS)
    with pytest.raises(InputError, match="that is also its output head, so that the target would write otherwise"):
        export(tmp_path / "head", tmp_path / "out", "sglang")
    export(tmp_path / "head", tmp_path / "out", "vllm")


def test_a_target_with_a_scaled_embedding_is_refused(tmp_path: Path) -> None:
    MODELS["gemma3"]().float().save_pretrained(tmp_path / "target")
    save_head(tmp_path / "head", tmp_path / "target", "dflash", taps=(1, 2))
    with pytest.raises(InputError, match="llama, mistral, qwen3, and this one is gemma3_text; train draft=lm"):
        export(tmp_path / "head", tmp_path / "out")


def test_engines_are_told_how_many_tokens_a_block_drafts(target: Path, tmp_path: Path) -> None:
    save_head(tmp_path / "head", target, "dflash", taps=TAPS, depth=3, mask_token=17)
    said = {
        "vllm": '"method": "dflash"',
        "sglang": "--speculative-algorithm DFLASH --speculative-draft-model-path THIS_FOLDER "
        "--speculative-num-draft-tokens 4",
        "trtllm": "decoding_type: DFlash\n  max_draft_len: 3",
        "llamacpp": "--spec-type draft-dflash --spec-draft-n-max 3",
        "speculators": "vllm serve THIS_FOLDER",
    }
    for engine, words in said.items():
        export(tmp_path / "head", tmp_path / engine, engine)
        assert words in (tmp_path / engine / "README.md").read_text(), engine


def test_folders_of_others_are_described_by_the_keys_that_they_have(target: Path, tmp_path: Path) -> None:
    """Of DFlash's authors, and of the speculators library as it is read: what it nests beside the rest."""
    save_head(tmp_path / "head", target, "dflash", taps=TAPS, mask_token=17)
    fields, tensors = export(tmp_path / "head", tmp_path / "out", "speculators")
    authors = fields["transformer_layer_config"] | {
        "dflash_config": {"mask_token_id": 17, "target_layer_ids": [0, 2, 3]}, "block_size": 5, "num_target_layers": 6,
    }  # fmt: skip
    library = fields["transformer_layer_config"] | {
        name: fields[name] for name in ("aux_hidden_state_layer_ids", "mask_token_id", "block_size", "draft_vocab_size")
    }
    for one in (authors, library):
        check_described(one, tensors, "vllm", "dflash")
