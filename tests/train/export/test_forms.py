"""What an export of each form holds, byte for byte: names, types, shapes and values of tensors, and config.json; and
that it is read back as a published head, with the same weights and the same drafts.

After a wanted change: `python -m tests.train.export.test_forms` writes forms.json anew; read its difference.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from decode import generate, load_drafter
from decode.common.checked_json import read_json, write_json
from decode.common.run_folder import sha256_file
from decode.config import ModelConfig
from decode.drafters.head_draft import HeadDraft
from decode.drafters.mtp import own_mtp
from decode.drafters.provenance import FILE
from decode.models.describe import describe_model
from tests.tiers import by_default
from tests.tiny import exaone_moe_config, tiny_tokenizer
from tests.train.check.folders import DRAFTS, SHAPE, TARGETS, VOCAB, Folders, config_of, save_draft_model
from tests.train.export.saved_heads import save_head
from tests.train.own_layer import add_own_layer
from train.export.stage import run

GOLDEN = Path(__file__).with_name("forms.json")
FORMS = (
    "eagle3-reduced",
    "peagle",
    "medusa-reduced",
    "dflash-reduced",
    "dflash",
    "dflash2",
    "lilicorr",
    "dspark",
    "lm",
    "mtp",
)


@pytest.mark.parametrize("form", FORMS)
def test_an_export_holds_what_it_always_held(form: str, tmp_path: Path) -> None:
    assert facts(form, tmp_path) == json.loads(GOLDEN.read_text())[form]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("served"))


@pytest.mark.usefixtures("uncaptured")
@pytest.mark.parametrize("draft", by_default(4, DRAFTS))
def test_an_exported_head_is_read_back_as_it_was(draft: str, folders: Folders) -> None:
    target = LlamaForCausalLM.from_pretrained(folders.target("llama"))
    saved, read = (
        load_drafter(folder, target=target)
        for folder in (folders.draft("llama", draft), folders.exported("llama", draft))
    )
    assert isinstance(saved, HeadDraft)
    assert isinstance(read, HeadDraft)
    ours, theirs = saved.state_dict(), read.state_dict()
    assert {*theirs} - {"lm_head.weight"} == {*ours}, "shipped of the target's"
    assert all(torch.equal(one, theirs[name]) for name, one in ours.items())
    if "lm_head.weight" in theirs:
        rows = target.lm_head.weight
        assert torch.equal(theirs["lm_head.weight"], rows if saved.vocab is None else rows[saved.vocab])
    prompts = torch.randint(4, 300, (2, 6), generator=torch.Generator().manual_seed(0))
    for temperature in (0.0, 1.0):
        settings = {"max_new_tokens": 24, "temperature": temperature, "seed": 1, "eos_token_id": ()}
        one, other = (generate(target, head, prompts, **settings) for head in (saved, read))
        assert one.stats.rounds == other.stats.rounds
        assert torch.equal(one.sequences, other.sequences)


def facts(form: str, folder: Path) -> dict[str, Any]:
    """config.json without paths, and each tensor with the beginning of its values' checksum."""
    target = save_target(folder / "target", is_moe=form == "mtp")
    save_draft(form, folder / "draft", target)
    run(config_of(folder / "draft", folder / "out"))
    written = json.loads(json.dumps(read_json(folder / "out/config.json")).replace(str(target), "TARGET"))
    tensors = {name: one for file in (folder / "out").glob("*.safetensors") for name, one in load_file(file).items()}
    if form == "mtp":  # beside the target's own
        written, tensors = {}, {name: one for name, one in tensors.items() if name.startswith("mtp.")}
    written.pop("transformers_version", None)
    extras = sorted(file.name for file in (folder / "out").iterdir() if file.suffix != ".safetensors")
    return {"config": written, "files": extras, "tensors": {name: told(tensors[name]) for name in sorted(tensors)}}


def told(tensor: Tensor) -> str:
    """dtype, shape and checksum."""
    values = hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {values[:8]}"


def save_target(folder: Path, is_moe: bool) -> Path:
    tokenizer = tiny_tokenizer(VOCAB)
    ends: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = exaone_moe_config(vocab_size=VOCAB, **ends) if is_moe else TARGETS["llama"](**SHAPE, **ends)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return filled(add_own_layer(folder) if is_moe else folder)


def save_draft(form: str, folder: Path, target: Path) -> Path:
    if form == "lm":
        save_draft_model(folder, target)
    elif form == "mtp":
        config, _ = own_mtp(describe_model(ModelConfig(path=str(target))), 1)
        save_head(folder, target, "mtp", **dataclasses.asdict(config))
    else:
        variant, fields, is_reduced = DRAFTS[form]
        save_head(folder, target, variant, torch.arange(0, VOCAB, 3) if is_reduced else None, **fields)
    return filled(folder)


def filled(folder: Path) -> Path:
    """With weights that are the same on every machine, where random ones may not be."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for place, (name, one) in enumerate(sorted(tensors.items())):
            if one.is_floating_point():
                values = (torch.arange(one.numel()) * 7919 + 31 * place + 1) % 2003 - 1001
                tensors[name] = (values / 4096).view(one.shape).to(one.dtype)
        save_file(tensors, file, metadata={"format": "pt"})
        if (folder / FILE).is_file():
            told = read_json(folder / FILE)
            told["sha256"][file.name] = sha256_file(file)
            write_json(folder / FILE, told)
    return folder


if __name__ == "__main__":
    with TemporaryDirectory() as place:
        found = {form: facts(form, Path(place) / form) for form in FORMS}
    GOLDEN.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")
