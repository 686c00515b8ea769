"""Published folders that are mixed, cut short, of no known layout or of another target: refused by their description,
before a model is loaded."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from decode import load_drafter
from decode.common.errors import InputError
from decode.config import ModelConfig
from decode.drafters.saved_draft import describe_draft
from decode.models.load import describe_model
from tests.commands import main_of
from tests.decode.formats.folders import PUBLISHED, VOCAB, random, save_target

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


def publish(who: str, folder: Path, target_folder: Path) -> Path:
    embedding = LlamaForCausalLM.from_pretrained(target_folder).model.embed_tokens.weight.detach()
    return PUBLISHED[who][0](folder / who, embedding)


def setting(**fields: object) -> Damage:
    def edit(folder: Path) -> None:
        written = json.loads((folder / "config.json").read_text()) | fields
        kept = {name: value for name, value in written.items() if value != "absent"}
        (folder / "config.json").write_text(json.dumps(kept))

    return edit


def tensors(edit: Callable[[dict[str, Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        (file,) = (one for one in folder.iterdir() if one.name != "config.json")
        is_safe = file.suffix == ".safetensors"
        held = load_file(file) if is_safe else torch.load(file, weights_only=True)
        edit(held)
        save_file(held, file) if is_safe else torch.save(held, file)

    return damage


def cut_short(folder: Path) -> None:
    (file,) = (one for one in folder.iterdir() if one.name != "config.json")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


class Program:
    """What unpickling would run."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path("/nowhere/that/a/test/writes").touch, ("x",))


def with_a_program(folder: Path) -> None:
    torch.save({"fc.weight": Program()}, folder / "pytorch_model.bin")


def another_pickle(folder: Path) -> None:
    (folder / "pytorch_model.bin").rename(folder / "model.pkl")


def with_medusa(folder: Path) -> None:
    save_file({"0.0.linear.weight": random(32, 32), "0.0.linear.bias": random(32)}, folder / "more.safetensors")


def drop(name: str) -> Damage:
    return tensors(lambda held: held.pop(name))


def grow(name: str) -> Damage:
    return tensors(lambda held: held.update({name: torch.cat([held[name], held[name]])}))


def shift(name: str) -> Damage:
    return tensors(lambda held: held.update({name: held[name] + 1}))


DAMAGES: dict[str, tuple[str, Damage, str]] = {
    "two forms": ("RedHatAI", with_medusa, "several forms of head, eagle3 and medusa"),
    "another form's configuration": ("z-lab", setting(architectures=["LlamaForCausalLMEagle3"]), "names eagle3, and"),
    "no known layout": ("yuhuili", tensors(lambda held: [held.pop(one) for one in [*held] if "midlayer" in one]),
                        "no head that is known here"),
    "a safetensors file cut short": ("RedHatAI", cut_short, "damaged"),
    "a pickled file cut short": ("yuhuili", cut_short, "damaged|cannot be read"),
    "a program": ("yuhuili", with_a_program, "nothing of it was run"),
    "a pickle of another name": ("yuhuili", another_pickle, "none of pytorch_model.bin.*model.pkl"),
    "not tensors by name": ("FasterDecoding", lambda folder: torch.save([1], folder / "medusa_lm_head.pt"),
                            "holds no tensors by name"),
    "a tensor less": ("yuhuili", drop("fc.weight"), "fc.weight missing"),
    "a tensor more": ("AngelSlim", tensors(lambda held: held.update(mask_hidden=random(32))), "mask_hidden"),
    "a wrong shape": ("z-lab", grow("layers.1.mlp.up_proj.weight"), r"layers.1.mlp.up_proj.weight \(96, 32\)"),
    "a head cut off": ("FasterDecoding", setting(medusa_num_heads=5), "holds 4 heads: the others are lost"),
    "no bias matrix": ("deepseek-ai", drop("markov_head.markov_w2.weight"), "markov_w2"),
    "lists that differ": ("deepseek-ai", setting(dflash_config={"target_layer_ids": [0, 1, 2]}), "different hidden"),
    "states that are not there": ("z-lab", setting(dflash_config={"mask_token_id": 7, "target_layer_ids": [1, 3, 50]}),
                                  "which has 8 layers"),
    "no list of states": ("z-lab", setting(dflash_config={"mask_token_id": 7}), "lists no target_layer_ids"),
    "no mask": ("z-lab", setting(dflash_config={"target_layer_ids": [1, 3, 5]}), "no mask_token_id"),
    "blocks that look back alone": ("z-lab", setting(is_causal=True), "is_causal=True"),
    "a second layer": ("yuhuili", setting(num_hidden_layers=2), "num_hidden_layers=2"),
    "draft ids outside": ("SpecForge", tensors(lambda held: held.update(d2t=held["d2t"] + 40)), "different tokens"),
    "no width": ("z-lab", setting(hidden_size="absent"), "hidden_size"),
    "a single number": ("RedHatAI", tensors(lambda held: held.update({"embed_tokens.weight": torch.tensor(1.0)})),
                        "embed_tokens.weight of .* is a single number"),
    "an embedding of whole numbers": (
        "RedHatAI", tensors(lambda held: held.update({"embed_tokens.weight": held["embed_tokens.weight"].long()})),
        "64 of 64 rows of embed_tokens.weight",
    ),
    "a billion heads": (
        "FasterDecoding", tensors(lambda held: held.update({"999999999.0.linear.weight": random(1, 1)})),
        "5 residual layers of Medusa heads, and 1000000000 heads",
    ),
    "a mask below zero": ("z-lab", setting(dflash_config={"mask_token_id": -1, "target_layer_ids": [1, 3, 5]}),
                          "mask_token_id=-1, and the target has tokens 0 to 299"),
    "a mask behind the last row": ("deepseek-ai", setting(mask_token_id=VOCAB), "mask_token_id=300, and the target"),
    "lengths of words": ("RedHatAI", setting(speculators_config="greedy"), "speculators_config"),
    "lengths without end": (
        "RedHatAI", setting(speculators_config={"proposal_methods": [{"speculative_tokens": 1 << 40}]}),
        "speculative_tokens",
    ),
    "a width of words": ("z-lab", setting(hidden_size="wide"), "hidden_size"),
    "whole numbers": ("TGI", tensors(lambda held: held.update({n: one.long() for n, one in held.items()})), "int64"),
    "another width": ("z-lab", setting(hidden_size=64), "hidden_size=64, and .* has 32"),
    "another vocabulary": ("yuhuili", setting(vocab_size=VOCAB + 8), "vocab_size=308, and .* has 300"),
    "another vocabulary, by its heads": ("FasterDecoding", grow("0.1.weight"), "vocab_size=600, and .* has 300"),
    "another target's embedding": ("RedHatAI", shift("embed_tokens.weight"), "64 of 64 rows of embed_tokens.weight"),
    "another target's output head": (
        "deepseek-ai", tensors(lambda held: held.update({"lm_head.weight": random(VOCAB, 32)})),
        "rows of lm_head.weight .* output head",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_bad_folder_is_refused_by_its_description(name: str, tmp_path: Path, target_folder: Path) -> None:
    who, damage, words = DAMAGES[name]
    folder = publish(who, tmp_path, target_folder)
    known = describe_model(ModelConfig(path=str(target_folder)))
    describe_draft(str(folder), known)
    damage(folder)
    with pytest.raises(InputError, match=words):
        describe_draft(str(folder), known)
    with pytest.raises(InputError, match=words):
        load_drafter(folder, target=LlamaForCausalLM.from_pretrained(target_folder))


def test_one_row_of_another_target_is_found_when_the_target_is_loaded(tmp_path: Path, target_folder: Path) -> None:
    """Before that, 64 rows are sampled."""
    folder = publish("RedHatAI", tmp_path, target_folder)
    model = LlamaForCausalLM.from_pretrained(target_folder)
    model.model.embed_tokens.weight.data[10] += 1
    copy = tmp_path / "copy"
    model.save_pretrained(copy)
    with pytest.raises(InputError, match=r"1 of 300 rows of embed_tokens.weight"):
        load_drafter(folder, target=LlamaForCausalLM.from_pretrained(copy))
    load_drafter(folder, target=LlamaForCausalLM.from_pretrained(copy), check=False)


def test_weights_that_are_no_numbers(tmp_path: Path, target_folder: Path) -> None:
    folder = publish("FasterDecoding", tmp_path, target_folder)
    tensors(lambda held: held["1.0.linear.weight"].fill_(torch.nan))(folder)
    with pytest.raises(InputError, match=r"heads.1.0.linear.weight of .* holds NaN"):
        load_drafter(folder, target=LlamaForCausalLM.from_pretrained(target_folder))


def test_rounding_is_no_other_target(tmp_path: Path, target_folder: Path) -> None:
    folder = publish("RedHatAI", tmp_path, target_folder)
    tensors(lambda held: held.update({n: one.half() for n, one in held.items() if one.is_floating_point()}))(folder)
    for dtype in (torch.float32, torch.bfloat16):
        load_drafter(folder, target=LlamaForCausalLM.from_pretrained(target_folder, dtype=dtype))


def test_the_command_ends_with_exit_code_2(
    tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = publish("RedHatAI", tmp_path, target_folder)
    shutil.copytree(folder, tmp_path / "bad")
    cut_short(tmp_path / "bad")
    monkeypatch.setattr(
        sys, "argv", ["decode", f"target.path={target_folder}", f"draft.path={tmp_path / 'bad'}", "prompt=x"]
    )
    with pytest.raises(SystemExit) as ended:
        main_of("decode")()
    assert ended.value.code == 2
