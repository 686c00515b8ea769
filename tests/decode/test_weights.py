"""Weights that are not those that config.json calls for, files that hold more than weights, and fingerprints."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaForCausalLM, MixtralConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from decode.common.errors import InputError
from decode.config import ModelConfig
from decode.drafters.lm import LMDraft
from decode.models import checkpoint_check
from decode.models.checkpoint_files import CONFIG
from decode.models.describe import describe_model
from decode.models.fingerprint import comparable, weights_fingerprint
from decode.models.load import load_model
from decode.models.small import load_ends
from tests.decode import test_own_mtp as own
from tests.tiny import MODELS, save_tiny_target, tiny_llama

Damage = Callable[[Path], object]
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("whole") / "target")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "target")


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers are not looked at, as those of a hub repository are not."""
    monkeypatch.setattr("decode.models.describe.check_headers", lambda *_: None)


def with_tensors(**tensors: torch.Tensor | None) -> Damage:
    """Tensors replaced, added, or (None) left out; __ stands for a dot."""

    def change(folder: Path) -> None:
        held = load_file(folder / FILE) | {name.replace("__", "."): one for name, one in tensors.items()}
        save_file({name: one for name, one in held.items() if one is not None}, folder / FILE, {"format": "pt"})

    return change


def with_config(**fields: object) -> Damage:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def sharded(folder: Path) -> None:
    """In two files, of which the second is not there."""
    names = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(load_file(folder / FILE))}
    (folder / FILE).rename(folder / "part-0.safetensors")
    (folder / f"{FILE}.index.json").write_text(json.dumps({"weight_map": names}))


DAMAGES: dict[str, tuple[Damage, str]] = {
    "a tensor less": (with_tensors(**{Q_PROJ.replace(".", "__"): None}), f"missing: {Q_PROJ}"),
    "a tensor more": (with_tensors(model__more=torch.ones(3)), r"not known: model\.more"),
    "another shape": (with_tensors(model__norm__weight=torch.ones(3)), r"model\.norm\.weight \(3,\) for \(32,\)"),
    "no head": (with_tensors(lm_head__weight=None), r"missing: lm_head\.weight"),
    "too wide": (with_config(hidden_size=48), "hidden_size=48, and the weights have 32"),
    "no width": (with_config(hidden_size=0), "hidden_size is 0,"),
    "a width below zero": (with_config(hidden_size=-32), "hidden_size is -32,"),
    "more tokens": (with_config(vocab_size=310), "vocab_size=310, and the weights have 300"),
    "fewer tokens": (with_config(vocab_size=64), "vocab_size=64, and the weights have 300"),
    "no tokens": (with_config(vocab_size=0), "vocab_size is 0,"),
    "a layer more": (with_config(num_hidden_layers=3), "num_hidden_layers=3, and the weights have 2"),
    "a layer less": (with_config(num_hidden_layers=1), "num_hidden_layers=1, and the weights have 2"),
    "no layers": (with_config(num_hidden_layers=0), "num_hidden_layers is 0,"),
    "layers below zero": (with_config(num_hidden_layers=-1), "num_hidden_layers is -1,"),
    "no attention heads": (with_config(num_attention_heads=0), "num_attention_heads is 0,"),
    "a wider MLP": (with_config(intermediate_size=65), r"up_proj\.weight \(64, 32\) for \(65, 32\)"),
    "a file less": (sharded, "part-1.safetensors"),
    "an adapter beside it": (
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        "adapter_config.json",
    ),
}


@pytest.mark.slow
def test_the_config_of_every_architecture_is_read() -> None:
    """As each is made by default: Gemma 3n's has an intermediate size for every layer."""
    read = []
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = CONFIG_MAPPING[name]()
        except StrictDataclassError:  # one that has no defaults
            continue
        read.append(CONFIG.parse(config.to_json_string(use_diff=False).encode(), name))
    assert len(read) > 100


@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_that_do_not_fit_are_refused_before_they_are_read(folder: Path, damage: str) -> None:
    change, message = DAMAGES[damage]
    change(folder)
    with pytest.raises(InputError, match=message):
        describe_model(ModelConfig(path=str(folder)))


@pytest.mark.parametrize("damage", ["a tensor less", "a tensor more", "another shape", "no head"])
@pytest.mark.usefixtures("blind")
def test_what_no_header_showed_is_refused_once_it_is_loaded(folder: Path, damage: str) -> None:
    change, message = DAMAGES[damage]
    change(folder)
    for load in (load_model, lambda source: LMDraft.from_pretrained(source.path)):
        with pytest.raises(InputError, match=message):
            load(ModelConfig(path=str(folder)))


@pytest.mark.usefixtures("blind")
def test_the_ends_of_a_target_are_not_random_either(folder: Path) -> None:
    with_tensors(lm_head__weight=None)(folder)
    with pytest.raises(InputError, match=r"lm_head\.weight"):
        load_ends(ModelConfig(path=str(folder)))


def test_who_insists_is_told_what_is_missing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    DAMAGES["a tensor less"][0](folder)
    with pytest.raises(InputError, match="target.allow_missing=true"):
        load_model(ModelConfig(path=str(folder)))
    model = load_model(ModelConfig(path=str(folder), allow_missing=True))
    assert Q_PROJ in caplog.text
    assert torch.equal(model.lm_head.weight, load_file(folder / FILE)["lm_head.weight"])  # type: ignore[union-attr]


@pytest.mark.parametrize("architecture", MODELS)
def test_every_architecture_loads_whole(tmp_path: Path, architecture: str) -> None:
    MODELS[architecture]().save_pretrained(tmp_path)
    load_model(ModelConfig(path=str(tmp_path)))


def test_experts_that_transformers_merges_are_whole(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = MixtralConfig(vocab_size=64, num_hidden_layers=1, num_local_experts=3, **sizes)  # type: ignore[arg-type]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    held = load_file(tmp_path / FILE)
    expert = next(name for name in held if ".experts.1." in name)
    load_model(ModelConfig(path=str(tmp_path)))
    save_file({name: one for name, one in held.items() if name != expert}, tmp_path / FILE, {"format": "pt"})
    with pytest.raises(InputError, match="experts"):
        load_model(ModelConfig(path=str(tmp_path)))


def test_what_is_rightly_absent_or_left_over_is_no_fault(tmp_path: Path) -> None:
    """A tied head, and buffers that older versions wrote: rotary frequencies and causal masks."""
    save_tiny_target(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / FILE)
    with_tensors(
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8), model__layers__0__attn__bias=torch.ones(1)
    )(tmp_path)
    model = load_model(ModelConfig(path=str(tmp_path)))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight  # type: ignore[union-attr]


@pytest.mark.parametrize("layout", own.LAYOUTS)
def test_a_targets_own_draft_layer_is_no_fault(tmp_path: Path, layout: str) -> None:
    model = tiny_llama()
    own.saved(tmp_path, model, own.weights_of(model), own.LAYOUTS[layout])
    assert load_model(ModelConfig(path=str(tmp_path))).config.num_hidden_layers == 2


def test_a_folder_that_was_described_before_is_looked_at_again(folder: Path) -> None:
    describe_model(ModelConfig(path=str(folder)))
    DAMAGES["a tensor less"][0](folder)
    with pytest.raises(InputError, match="missing"):
        describe_model(ModelConfig(path=str(folder)))


class Program:
    """Writes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


def pickled(folder: Path) -> None:
    with (folder / "pytorch_model.bin").open("wb") as file:
        pickle.dump(Program(folder / "written"), file, protocol=2)


def zipped(folder: Path) -> None:
    torch.save({"model.norm.weight": Program(folder / "written")}, folder / "pytorch_model.bin")


def cut_short(folder: Path) -> None:
    torch.save(tiny_llama().state_dict(), folder / "pytorch_model.bin")
    content = (folder / "pytorch_model.bin").read_bytes()
    (folder / "pytorch_model.bin").write_bytes(content[: len(content) // 2])


BAD_BINS: dict[str, tuple[Damage, str]] = {
    "a pickled program": (pickled, "nothing of it was run"),
    "a program among tensors": (zipped, "nothing of it was run"),
    "half a file": (cut_short, "cannot be read"),
    "an empty file": (lambda folder: (folder / "pytorch_model.bin").touch(), "cannot be read"),
    "a list": (lambda folder: torch.save([torch.ones(3)], folder / "pytorch_model.bin"), "holds no tensors by name"),
    "no weights": (lambda folder: torch.save({"epoch": 3}, folder / "pytorch_model.bin"), "holds no tensors by name"),
}


@pytest.mark.parametrize("bad", BAD_BINS)
def test_a_pickled_file_is_read_as_weights_or_not_at_all(folder: Path, bad: str) -> None:
    make, message = BAD_BINS[bad]
    (folder / FILE).unlink()
    make(folder)
    for load in (describe_model, load_model):
        with pytest.raises(InputError, match=message):
            load(ModelConfig(path=str(folder)))
    assert not (folder / "written").exists()


@pytest.mark.parametrize("make", [pickled, zipped])
@pytest.mark.usefixtures("blind")
def test_a_pickled_file_that_was_not_looked_at_runs_nothing_either(folder: Path, make: Damage) -> None:
    (folder / FILE).unlink()
    make(folder)
    with pytest.raises(InputError, match="weights"):
        load_model(ModelConfig(path=str(folder)))
    assert not (folder / "written").exists()


def test_a_good_pickled_file_is_checked_and_loaded(folder: Path) -> None:
    held = load_file(folder / FILE)
    (folder / FILE).unlink()
    torch.save(held, folder / "pytorch_model.bin")
    model = load_model(ModelConfig(path=str(folder)))
    assert torch.equal(model.lm_head.weight, held["lm_head.weight"])  # type: ignore[union-attr]
    del held[Q_PROJ]
    torch.save(held, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=Q_PROJ):
        describe_model(ModelConfig(path=str(folder)))


def test_other_weights_by_other_names_are_said_to_be_there(folder: Path) -> None:
    (folder / FILE).rename(folder / "consolidated.safetensors")
    with pytest.raises(InputError, match="consolidated.safetensors.*model.safetensors"):
        describe_model(ModelConfig(path=str(folder)))


def test_many_names_are_cut(folder: Path) -> None:
    with_config(num_hidden_layers=7)(folder)
    with pytest.raises(InputError) as refused:
        describe_model(ModelConfig(path=str(folder)))
    assert f"and {5 * 9 - checkpoint_check.SHOWN} more" in str(refused.value)
    assert len(str(refused.value)) < 1000


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama(dtype=torch.bfloat16)


def same(one: LlamaForCausalLM, other: LlamaForCausalLM) -> bool:
    return weights_fingerprint(one) == weights_fingerprint(other)


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loaded", [torch.float64, torch.float32, torch.bfloat16])
def test_precision_does_not_matter(saved: torch.dtype, loaded: torch.dtype) -> None:
    assert same(tiny_llama(dtype=saved).float(), cast(Any, tiny_llama(dtype=saved)).to(loaded))


def test_float16_is_compared_with_itself_alone(model: LlamaForCausalLM) -> None:
    """It rounds small weights of a bfloat16 checkpoint, so that equal files give unequal samples."""
    ours, half = weights_fingerprint(model), weights_fingerprint(deepcopy(model).half())
    assert not comparable(ours, half)
    assert comparable(half, half)
    assert comparable(ours, weights_fingerprint(tiny_llama(seed=1)))
    assert not comparable(ours, None)


@pytest.mark.parametrize("seed", [1, 2])
def test_other_weights_of_the_same_shapes_differ(model: LlamaForCausalLM, seed: int) -> None:
    assert not same(model, tiny_llama(seed=seed, dtype=torch.bfloat16))


def test_every_tensor_is_looked_at(model: LlamaForCausalLM) -> None:
    for name, weight in model.named_parameters():
        other = deepcopy(model)
        other.get_parameter(name).data.copy_(weight * 1.05)
        assert not same(model, other), name


def test_a_merged_and_an_unmerged_adapter_are_seen(model: LlamaForCausalLM) -> None:
    before = weights_fingerprint(model)
    adapters = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))  # type: ignore[arg-type]
    assert weights_fingerprint(model) != before
    merged = cast(Any, adapters).merge_and_unload()
    assert weights_fingerprint(merged) != before


def test_layout_in_memory_and_tied_names_do_not_matter() -> None:
    model, other = (tiny_llama(tie_word_embeddings=True) for _ in range(2))
    for module in other.modules():
        if isinstance(module, torch.nn.Linear) and module is not other.lm_head:
            module.weight.data = module.weight.data.t().contiguous().t()
    assert same(model, other)


def test_weights_that_are_not_all_here_have_none(model: LlamaForCausalLM) -> None:
    model.model.layers[1].to("meta")
    assert weights_fingerprint(model) is None


def test_of_quantised_weights_what_stays_floating_point_counts(model: LlamaForCausalLM) -> None:
    plain = weights_fingerprint(model)
    model.config.quantization_config = {"quant_method": "of_some_kind"}  # type: ignore[assignment]
    packed = torch.zeros(3, dtype=torch.uint8)
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(packed, requires_grad=False)  # type: ignore[union-attr]
    ours = weights_fingerprint(model)
    assert not comparable(plain, ours)
    other = deepcopy(model)
    other.model.layers[0].mlp.up_proj.weight.data += 1  # type: ignore[union-attr]
    assert same(model, other)
    other.model.norm.weight.data += 1
    assert not same(model, other)


def test_a_sample_is_not_of_one_column(model: LlamaForCausalLM) -> None:
    wide = torch.nn.Linear(4096, 4096, bias=False)
    wide.config = model.config  # type: ignore[assignment]
    before = weights_fingerprint(wide)  # type: ignore[arg-type]
    wide.weight.data[:, 1:] += 1
    assert weights_fingerprint(wide) != before  # type: ignore[arg-type]
