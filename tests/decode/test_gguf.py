"""Models in GGUF files: the same logits as in transformers format, and what is said of files that are none."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFEndian, dequantize, quantize
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel

from decode import generate, load_drafter
from decode.common.errors import ConfigError, InputError
from decode.config import ModelConfig
from decode.models.compatibility import load_tokenizer
from decode.models.describe import describe_model
from decode.models.load import load_model
from distill.records.record_folder import RecordFolder
from distill.stage import run
from tests.distill.runs import tiny_config
from tests.gguf_files import CHATML, crossing_tokenizer, write_gguf
from tests.tiny import tiny_llama, tiny_tokenizer

IDS = torch.tensor([[5, 17, 203, 4, 88, 88, 31, 9, 120, 64, 2]])


def llama(seed: int = 1, **sizes: Any) -> PreTrainedModel:
    return tiny_llama(320, hidden_size=64, num_heads=4, seed=seed, **sizes)


def gemma3() -> PreTrainedModel:
    torch.manual_seed(2)
    config = Gemma3TextConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=7, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=128, sliding_window=6, query_pre_attn_scalar=32,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):  # fresh ones are 0, and would hide what is counted from 1
                weight += 0.2 * torch.randn_like(weight)
    return model


def source(path: Path | str, dtype: Any = "float32") -> ModelConfig:
    return ModelConfig(path=str(path), dtype=dtype)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize(
    "make", [llama, partial(llama, tie_word_embeddings=True), gemma3], ids=["llama", "tied", "gemma3"]
)
def test_a_file_gives_the_logits_of_its_model(tmp_path: Path, make: Callable[[], PreTrainedModel], kind: str) -> None:
    model = make()
    file = write_gguf(tmp_path / "model.gguf", model, kind=kind)
    found = load_model(source(file))
    with torch.no_grad():
        for weight in (one for one in model.parameters() if one.ndim == 2 and kind != "F32"):
            rounded = quantize(weight.numpy(), GGMLQuantizationType[kind])
            weight.copy_(torch.from_numpy(dequantize(rounded, GGMLQuantizationType[kind])))
        torch.testing.assert_close(found(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    assert found.dtype == torch.float32
    assert describe_model(source(file)).num_parameters == model.num_parameters()


def test_text_tokenizer_and_template_come_along_and_a_folder_holds_one(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(300)
    tokenizer.chat_template = CHATML
    file = write_gguf(tmp_path / "folder" / "model.gguf", model := llama(), tokenizer)
    for path in (file, file.parent):
        found = load_tokenizer(source(path))
        assert len(found) == 320  # as many as the embedding has rows
        assert found("def f(x):")["input_ids"] == tokenizer("def f(x):")["input_ids"]
        assert found.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "user: Hi\n"
        assert found.eos_token_id == tokenizer.eos_token_id
    target = load_model(source(file.parent))
    asked = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3, "eos_token_id": ()}
    plain = generate(model, None, IDS, **asked).sequences
    for drafter in (None, load_drafter(file, target=target), load_drafter("ngram", target=target)):
        assert torch.equal(generate(target, drafter, IDS, **asked).sequences, plain)


CUT = {
    "gpt-2": "a Ċ Ċ 12 Ġ Ġ2 Ġc os ts",
    "smollm": "a ĊĊ 1 2 ĠĠ 2 Ġc os ts",
    "llama-bpe": "a ĊĊ 12 Ġ Ġ 2 Ġcosts",
    "qwen2": "a ĊĊ 1 2 Ġ Ġ 2 Ġc os ts",
}


@pytest.mark.parametrize("cut", CUT)
def test_text_is_cut_as_the_file_says(tmp_path: Path, cut: str) -> None:
    file = write_gguf(tmp_path / "a.gguf", tiny_llama(500), crossing_tokenizer(), tokenizer__ggml__pre=cut)
    found = load_tokenizer(source(file))
    assert found.tokenize("a\n\n12  2 costs") == CUT[cut].split()
    assert found.decode(found("a\n\n12  2 costs")["input_ids"]) == "a\n\n12  2 costs"


def test_text_begins_and_ends_as_the_file_says(tmp_path: Path) -> None:
    own = {"tokenizer__ggml__bos_token_id": 7, "tokenizer__ggml__add_bos_token": True}
    file = write_gguf(tmp_path / "a.gguf", llama(), tiny_tokenizer(300), **own, tokenizer__ggml__add_eos_token=True)
    found = load_tokenizer(source(file))
    assert [*found("x")["input_ids"][::2]] == [7, found.eos_token_id]
    assert found("x", add_special_tokens=False)["input_ids"] == tiny_tokenizer(300)("x")["input_ids"]


def test_a_way_of_cutting_that_is_not_known_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "a.gguf", llama(), tiny_tokenizer(300), tokenizer__ggml__pre="of-tomorrow")
    with pytest.raises(InputError, match=r"kind gpt2 that cuts text by of-tomorrow .*Give the folder"):
        load_tokenizer(source(file))


def test_a_padding_token_that_is_none_is_left_out(tmp_path: Path) -> None:
    """-1 in 32 bits, as converters write it, ended in PyTorch's assertion about the embedding."""
    for token, known in ((1, 1), (2**32 - 1, None), (320, None)):
        file = rewritten(tokenizer__ggml__padding_token_id=token)(tmp_path / "model.gguf")
        assert describe_model(source(file)).config.pad_token_id == known
        assert load_tokenizer(source(file)).pad_token_id == known


def test_records_are_bound_to_what_a_file_holds(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "target" / "model.gguf", llama(max_position_embeddings=64), tiny_tokenizer(300))
    run(tiny_config(tmp_path))
    assert len(RecordFolder.open(tmp_path / "records", describe_model(source(file)))) == 13
    write_gguf(file, llama(seed=9, max_position_embeddings=64), tiny_tokenizer(300))
    with pytest.raises(InputError, match=r"(?s)was recorded from .* with .*, and"):
        RecordFolder.open(tmp_path / "records", describe_model(source(file)))


def cut(file: Path, size: int) -> Path:
    file.write_bytes(file.read_bytes()[:size])
    return file


def patched(file: Path, place: int, content: bytes) -> Path:
    data = bytearray(file.read_bytes())
    data[place : place + len(content)] = content
    file.write_bytes(data)
    return file


def tensor_patched(file: Path, place: int, content: bytes) -> Path:
    """What stands `place` bytes behind the name of the embedding: axes (4 bytes), width, rows, type (4), offset (8
    each)."""
    name = b"token_embd.weight"
    return patched(file, file.read_bytes().index(name) + len(name) + place, content)


def long(value: int) -> bytes:
    return struct.pack("<Q", value)


def rewritten(**changed: Any) -> Callable[[Path], Path]:
    """The file with other values in its metadata."""
    return lambda file: write_gguf(file, llama(), tiny_tokenizer(300), **changed)


FAULTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "cut in its header": (lambda file: cut(file, 300), "cut off within its header, at 300 bytes"),
    "cut in its weights": (lambda file: cut(file, file.stat().st_size - 900), "it was cut off, and"),
    "cut in its first bytes": (lambda file: cut(file, 6), "ends after 6 bytes"),
    "another kind of file": (lambda file: patched(file, 0, b"PK\3\4"), "is no GGUF file: it begins with"),
    "of the future": (
        lambda file: patched(file, 4, struct.pack("<I", 9)),
        "is of GGUF version 9, and versions 2",
    ),
    "a part": (lambda file: file.rename(file.parent / "m-00001-of-00002.gguf"), "llama-gguf-split --merge"),
    "two in a folder": (
        lambda file: write_gguf(file.parent / "b.gguf", llama()).parent,
        "holds 2 GGUF files",
    ),
    "big-endian": (lambda file: write_gguf(file, llama(), endian=GGUFEndian.BIG), "big-endian machines"),
    "of an architecture that is not read": (
        lambda file: write_gguf(file, llama(), architecture="mamba"),
        "is of the architecture mamba, and of GGUF files are read here",
    ),
    "of a type that gguf does not turn into numbers": (
        lambda file: tensor_patched(file, 20, struct.pack("<I", GGMLQuantizationType.Q8_K)),
        "weights of the types Q8_K, which",
    ),
    "of a type of the future": (lambda file: tensor_patched(file, 20, struct.pack("<I", 999)), "the types number 999,"),
    "rows that fill no blocks": (
        lambda file: tensor_patched(file, 20, struct.pack("<I", GGMLQuantizationType.Q4_K)),
        r"token_embd.weight .*rows of 64 values as Q4_K, whose blocks have 256",
    ),
    "a tensor between two steps": (lambda file: tensor_patched(file, 24, long(3)), "no multiple of the alignment, 32"),
    "a tensor far behind the end": (lambda file: tensor_patched(file, 24, long(1 << 62)), "it was cut off, and"),
    "a width of 0": (lambda file: tensor_patched(file, 4, long(0)), "of another shape: model.embed_tokens.weight"),
    "no rows": (lambda file: tensor_patched(file, 12, long(0)), "has 0 rows"),
    "0 layers": (rewritten(llama__block_count=0), "block_count is 0, and it should be one positive number"),
    "0 heads": (rewritten(llama__attention__head_count=0), "head_count is 0, and it should be one positive number"),
    "an epsilon of NaN": (
        rewritten(llama__attention__layer_norm_rms_epsilon=float("nan")),
        "layer_norm_rms_epsilon is nan, and it should be a finite number",
    ),
    "a base of NaN": (rewritten(llama__rope__freq_base=float("nan")), "freq_base is nan, and it should be a finite"),
    "a base of 0": (rewritten(llama__rope__freq_base=0.0), "freq_base is 0.0, and it should be one positive number"),
    "a factor of NaN": (
        rewritten(llama__rope__scaling__type="linear", llama__rope__scaling__factor=float("nan")),
        "rope.scaling.factor is nan, and it should be a finite",
    ),
    "a negative factor": (
        rewritten(llama__rope__scaling__type="linear", llama__rope__scaling__factor=-2.0),
        "rope.scaling.factor is -2.0, and it should be one positive number",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_no_model_is_said_before_weights_are_read(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode.models.weights.gguf_weights", lambda *_: pytest.fail("weights were read"))
    make, told = FAULTS[fault]
    path = make(write_gguf(tmp_path / "folder" / "a.gguf", llama(), tiny_tokenizer(300)))
    with pytest.raises(InputError, match=told):
        describe_model(source(path))


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "model.gguf", llama())
    monkeypatch.setattr("decode.common.extras.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package gguf.*pip install 'draftsmith\[gguf\]'"):
        describe_model(source(file))
