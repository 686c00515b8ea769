"""DSpark heads as folders: the row of the mask, heads of bias and chances, temperatures, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from decode.common.checked_json import read_json
from decode.common.errors import InputError
from tests.tiers import by_default
from tests.train.export.saved_heads import check_described, export, save_head, save_padded_target

VOCAB = torch.tensor([0, 1, 7, 8, 200, 299])
TAPS = (4, 1, 3)
W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
HEADS: dict[str, dict[str, Any]] = {
    "learned mask": {},
    "mask of the vocabulary": {"mask_token": 17},
    "learned mask, reduced": {"vocab": VOCAB},
    "mask of the vocabulary, reduced": {"vocab": VOCAB, "mask_token": 319},
    "fill-in": {"layout": "fill_in"},
    "no bias": {"markov_rank": 0, "confidence": False},
    "no bias, but chances": {"markov_rank": 0, "mask_token": 17},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_padded_target(tmp_path_factory.mktemp("target") / "model")


def save(folder: Path, target: Path, name: str, **more: Any) -> Any:
    given: dict[str, Any] = {"taps": TAPS} | HEADS[name] | more
    return save_head(folder, target, "dspark", **given)


@pytest.mark.parametrize("dtype", by_default(1, ["float32", "bfloat16"]))
@pytest.mark.parametrize("name", HEADS)
def test_a_folder_holds_what_its_config_calls_for(target: Path, name: str, dtype: str, tmp_path: Path) -> None:
    head = save(tmp_path / "head", target, name)
    fields, tensors = export(tmp_path / "head", tmp_path / "out", dtype=dtype)
    check_described(fields, tensors, "vllm", "dspark")
    assert fields["architectures"] == ["Qwen3DSparkModel"]
    assert ("confidence_head.proj.weight" in tensors) == fields["enable_confidence_head"] == head.config.confidence
    assert not (tmp_path / "out/mask_embedding.pt").exists()


@pytest.mark.parametrize("name", ["learned mask", "learned mask, reduced"])
def test_a_learned_mask_is_a_row_behind_the_targets(target: Path, name: str, tmp_path: Path) -> None:
    head = save(tmp_path / "head", target, name)
    fields, tensors = export(tmp_path / "head", tmp_path / "out")
    rows = AutoModelForCausalLM.from_pretrained(target).model.embed_tokens.weight
    assert (fields["vocab_size"], fields["target_vocab_size"]) == (321, 320)
    assert fields["mask_token_id"] == fields["dflash_config"]["mask_token_id"] == 320
    assert torch.equal(tensors["embed_tokens.weight"], torch.cat([rows, head.mask.weight]))
    assert torch.equal(tensors[W1][:320], head.markov_in.weight)
    assert not tensors[W1][320].any()
    assert torch.equal(tensors[W2], head.markov_out.weight)


def test_a_mask_of_the_vocabulary_needs_no_embedding(target: Path, tmp_path: Path) -> None:
    head = save(tmp_path / "head", target, "mask of the vocabulary")
    fields, tensors = export(tmp_path / "head", tmp_path / "out")
    assert (fields["vocab_size"], fields["mask_token_id"]) == (320, 17)
    assert not {"embed_tokens.weight", "lm_head.weight"} & tensors.keys()
    assert torch.equal(tensors[W1], head.markov_in.weight)


def test_what_slot_0_drafts_is_said_in_every_engines_words(target: Path, tmp_path: Path) -> None:
    for name, is_anchor in (("learned mask", True), ("fill-in", False)):
        save(tmp_path / name, target, name, depth=5)
        fields, _ = export(tmp_path / name, tmp_path / f"{name}-out")
        assert fields["sample_from_anchor"] is fields["shift_label"] is is_anchor
        assert fields["block_size"] == 5  # drafted tokens, as SGLang counts


def test_a_head_without_a_bias_leaves_with_one_of_zeros(target: Path, tmp_path: Path) -> None:
    save(tmp_path / "head", target, "no bias, but chances")
    fields, tensors = export(tmp_path / "head", tmp_path / "out")
    assert (fields["markov_rank"], fields["markov_head_type"]) == (1, "vanilla")
    assert fields["confidence_head_with_markov"] is False
    assert not tensors[W1].any()
    assert not tensors[W2].any()


def test_chances_are_the_fitted_ones_with_sglangs_temperatures_and_near_them_without(
    target: Path, tmp_path: Path
) -> None:
    temperatures = (1.0, 2.0, 4.0, 2.0)
    head = save(tmp_path / "head", target, "mask of the vocabulary", temperatures=temperatures)
    fields, tensors = export(tmp_path / "head", tmp_path / "out", "sglang", dtype="bfloat16")
    assert fields["confidence_head_with_markov"] is True
    weight, bias = tensors["confidence_head.proj.weight"], tensors["confidence_head.proj.bias"]
    assert weight.dtype == bias.dtype == torch.float32
    x = torch.randn(4, weight.shape[1])
    known = head.confidence_head.bfloat16().float()(x)[:, 0]
    written = (x @ weight.T + bias)[:, 0]
    torch.testing.assert_close(written, known / 2)  # the geometric mean
    rest = read_json(tmp_path / "out/confidence_temperatures.json")["temperatures"]
    torch.testing.assert_close(written / torch.tensor(rest), known / torch.tensor(temperatures))
    card = (tmp_path / "out/README.md").read_text()
    assert "--speculative-dspark-confidence-sts-path THIS_FOLDER/confidence_temperatures.json" in card
    assert "(1, 2, 4, 2). Engines have none: confidence_head is divided by 2, their geometric mean" in card


def test_engines_are_told_how_many_tokens_a_block_drafts(target: Path, tmp_path: Path) -> None:
    save(tmp_path / "head", target, "mask of the vocabulary", depth=3)
    said = {
        "vllm": '"method": "dspark"',
        "sglang": "--speculative-algorithm DSPARK --speculative-draft-model-path THIS_FOLDER "
        "--speculative-dspark-block-size 3",
        "trtllm": "decoding_type: DSpark\n  max_draft_len: 3",
        "llamacpp": "--spec-type draft-dspark --spec-draft-n-max 3",
        "speculators": "vllm serve THIS_FOLDER",
    }
    for engine, words in said.items():
        fields, tensors = export(tmp_path / "head", tmp_path / engine, engine)
        check_described(fields, tensors, engine, "dspark")
        assert words in (tmp_path / engine / "README.md").read_text(), engine
    assert fields["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == fields["block_size"] == 3


REFUSED = [
    ("sglang", "learned mask", "mask is a learned vector, and SGLang has .* train with draft.head.mask_token=ID"),
    ("sglang", "mask of the vocabulary, reduced", "SGLang drafts with the target's whole output head, .* knows 6 of"),
    ("trtllm", "learned mask", "mask is a learned vector, and TensorRT-LLM has the target's embedding alone"),
    ("llamacpp", "learned mask", "mask is a learned vector, and llama.cpp has the target's embedding alone"),
    ("speculators", "learned mask", "mask is a learned vector, and the speculators library has"),
]


@pytest.mark.parametrize(("engine", "name", "message"), REFUSED)
def test_what_an_engine_would_draft_otherwise_is_refused(
    target: Path, engine: str, name: str, message: str, tmp_path: Path
) -> None:
    save(tmp_path / "head", target, name)
    with pytest.raises(InputError, match=message):
        export(tmp_path / "head", tmp_path / "out", engine)
    assert not (tmp_path / "out").exists()


def test_blocks_filled_in_are_refused_where_slot_0_drafts(target: Path, tmp_path: Path) -> None:
    save(tmp_path / "head", target, "fill-in", mask_token=17)
    for engine in ("trtllm", "llamacpp", "speculators"):
        with pytest.raises(InputError, match="draft.head.layout=anchor"):
            export(tmp_path / "head", tmp_path / engine, engine)
    for engine in ("vllm", "sglang"):
        fields, _ = export(tmp_path / "head", tmp_path / engine, engine)
        assert "speculators_model_type" not in fields
