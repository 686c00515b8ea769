"""Folders that are no model's, and what they are instead."""

from __future__ import annotations

from pathlib import Path

from decode.common.checked_json import read_json
from decode.common.errors import InputError
from decode.models.checkpoint_files import check_model_files

EXAMPLE = Path("runs/models/smollm2")
"""Where scripts/example_model.sh puts the model that target=smollm2 names."""


def check_folder(folder: Path, role: str) -> None:
    """InputError unless it is a model's folder, or a file."""
    if folder.is_file():
        return  # a GGUF file, or one that is refused when it is opened
    if not folder.is_dir():
        remedy = "give a folder in transformers format, a GGUF file or a hub id"
        if folder == EXAMPLE:
            remedy = "bash scripts/example_model.sh fetches it, once"
        raise InputError(f"{role}.path={folder} does not exist; {remedy}")
    if not (folder / "config.json").is_file():
        if (folder / "run.json").is_file():
            raise InputError(
                f"{role}.path={folder} is the folder of a run without a model in model/: one of another stage, or an "
                "unfinished training. Finish it by its own command with resume=auto, or give a model's folder"
            )
        if (folder / "adapter_config.json").is_file():
            raise InputError(
                f"{role}.path={folder} holds an adapter alone (adapter_config.json). Merge: peft's "
                "AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload().save_pretrained(MERGED), and "
                "save the tokenizer"
            )
        several = sorted(one.name for one in folder.glob("*.gguf"))
        if several:
            raise InputError(
                f"{role}.path={folder} holds {len(several)} GGUF files ({', '.join(several[:4])}), and nothing says "
                f"which one is meant. Name it: {role}.path={folder / several[0]}"
            )
        raise InputError(
            f"{role}.path={folder} holds no config.json, so it is not a model folder in transformers format"
        )
    if (folder / "draftsmith.json").is_file() and "model_type" not in read_json(folder / "config.json"):
        raise InputError(
            f"{role}.path={folder} holds a head, which drafts from hidden states of its target; a language model is "
            "wanted here. To go on training it, give draft=FAMILY of that head"
        )
    if (folder / "adapter_config.json").is_file():
        raise InputError(with_adapter(folder, role))
    check_model_files(folder, role)


def with_adapter(path: object, role: str) -> str:
    """What to say of a checkpoint with an adapter in it."""
    return (
        f"{role}.path={path} holds an adapter (adapter_config.json) beside the weights: two models, with peft and "
        "without. Merge it (merge_and_unload) and save that, or take adapter_config.json away"
    )
