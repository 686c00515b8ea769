"""Which drafts vLLM's engine writes with: those that it loads from a folder as it is."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import torch

from decode.common.checked_json import read_json
from decode.common.errors import InputError
from decode.config import model_folder
from decode.drafters.provenance import read_provenance
from decode.drafters.saved_draft import DraftDescription
from decode.forward.window import window_in
from distill.runtimes.engine_process import local

METHODS = {"lm": "draft_model", "eagle3": "eagle3"}
"""Family -> what vLLM's speculative_config calls it."""


def drafting_with_model(folder: str, num_draft_tokens: int, family: str = "lm") -> dict[str, Any]:
    """vLLM's speculative_config for a draft in a folder, or in the one of the run that trained it, or for a hub id."""
    path = local(model_folder(folder))
    _refuse_window(path)
    return {"method": METHODS[family], "model": path, "num_speculative_tokens": num_draft_tokens}


def _refuse_window(path: str) -> None:
    config = Path(path) / "config.json"
    window = window_in(read_json(config), path) if config.is_file() else None
    if window is not None:
        raise InputError(
            f"the draft {path} attends to its first {window.sinks} and last {window.size} positions, and vLLM would "
            "draft with it as if it saw the whole text, and accept less. Draft by draftsmith itself (target.runtime="
            "transformers), or train one without draft.window"
        )


def check_draft(found: DraftDescription, target: str, num_devices: int) -> None:
    """Raise InputError for a draft that vLLM does not load as it lies there, or reads wrongly: on CPUs the processes of
    several devices are started without `vllm_temperatures`, and so would accept by temperatures that nobody wrote."""
    if num_devices > 1 and not torch.accelerator.is_available():
        raise InputError(
            f"sampling.draft.path={found.path} on {num_devices} devices that are CPUs: vLLM reads the temperature of "
            "drafted tokens from memory that nothing has written there (vLLM issue 55005), and this is mended for one "
            "device alone. Leave the draft out, or use one"
        )
    if found.family not in METHODS:
        raise InputError(
            f"sampling.draft.path={found.path} is of family {found.family}, and target.runtime=vllm writes with "
            f"{' and '.join(METHODS)} drafts only; use one of these, or target.runtime=transformers, which writes with "
            "any"
        )
    if Path(found.path).is_file():
        raise InputError(
            f"sampling.draft.path={found.path} is a GGUF file, and target.runtime=vllm drafts with a folder: give that "
            "of the same model in transformers format, or use target.runtime=transformers"
        )
    if found.family != "lm" and read_provenance(found.path) is not None:
        paths = shlex.join([f"target.path={target}", f"draft.path={found.path}"])
        raise InputError(
            f"sampling.draft.path={found.path} is a head in our own layout, which vLLM does not load. Export it with "
            f"`python -m train.export {paths} format=vllm output_dir=FOLDER`, and give sampling.draft.path=FOLDER"
        )
