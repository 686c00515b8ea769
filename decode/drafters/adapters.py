"""Adapters (peft) of a draft, one for each kind of text, say: kept beside the draft that they were trained on, and
switched by name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decode.common.checked_json import Content, JsonFile, Text
from decode.common.errors import InputError
from decode.common.extras import extra, require_installed
from decode.common.run_folder import sha256_file
from decode.drafters.base import Drafter
from decode.models.checkpoint_files import weight_files
from decode.models.fingerprint import files_fingerprint

if TYPE_CHECKING:
    from peft import PeftModel

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILE = "adapter_of.json"


class AdapterOf(Content):
    """The draft that an adapter was trained on."""

    path: Text
    fingerprint: Text
    """Of its weights."""


ORIGIN = JsonFile(
    AdapterOf,
    "an adapter in a draft that it was not trained on drafts nonsense",
    "Copy the adapter's folder again, or train it anew.",
)


def write_adapter(adapters: PeftModel, folder: str | Path, base: str | Path) -> None:
    """Write `folder` in peft's format, and which draft the adapters belong to."""
    folder = Path(folder)
    for config in adapters.peft_config.values():
        config.base_model_name_or_path = str(base)
    adapters.save_pretrained(str(folder), save_embedding_layers=False)  # which are the draft's own
    ORIGIN.write(folder / FILE, {"path": str(base), "fingerprint": _identity(str(base))})


def load_adapters(drafter: Drafter, folders: Mapping[str, str | Path]) -> PeftModel:
    """Put adapters into a drafter that came from a folder, by name; the first one is on.

    The PeftModel that is returned switches them: `set_adapter(name)`, and `with adapters.disable_adapter()` for the
    draft as it was. The drafter stays the same object, and drafts with whichever is on; what was captured of its
    passes is captured anew. Raises InputError where a folder holds no adapter, or one of another draft.
    """
    require_installed("peft", "load_adapters", f"Install it: {extra('adapters')}")
    from peft import PeftModel

    if not folders:
        raise InputError("load_adapters was given no adapters; give {name: folder}")
    source = getattr(drafter, "source", "")
    if not source:
        raise InputError(
            f"load_adapters was given a {type(drafter).__name__} that came from no folder, and an adapter belongs to a "
            "draft that did. Give what load_drafter(FOLDER) made"
        )
    for name, folder in folders.items():
        _check(name, Path(folder), source)
    module: Any = getattr(drafter, "model", drafter)  # of a language model the transformers model, as peft knows it
    (first, place), *others = folders.items()
    adapters = PeftModel.from_pretrained(module, str(place), adapter_name=first, autocast_adapter_dtype=False)
    for name, folder in others:
        adapters.load_adapter(str(folder), name, autocast_adapter_dtype=False)
    return adapters.eval()


def _identity(draft: str) -> str:
    """Of all bytes of a folder's weights, since adapters may have changed any of them; of a GGUF file its fingerprint,
    of a hub id the id."""
    folder = Path(draft)
    if not folder.is_dir():
        return files_fingerprint(folder) if folder.is_file() else draft
    sums = "".join(sha256_file(file) for file in weight_files(folder))
    return hashlib.sha256(f"{files_fingerprint(folder)}{sums}".encode()).hexdigest()


def _check(name: str, folder: Path, base: str) -> None:
    if "." in name:
        raise InputError(f"the adapter {name!r} has a dot in its name, which torch keeps for modules; rename it")
    missing = [file for file in (CONFIG, WEIGHTS, FILE) if not (folder / file).is_file()]
    if missing:
        raise InputError(
            f"the adapter {name!r}, {folder}, lacks {' and '.join(missing)}; give the folder adapter/ of a run of "
            "python -m train draft.lora.rank=16 draft.init_from=DRAFT"
        )
    origin, own = ORIGIN.read(folder / FILE), _identity(base)
    if origin.fingerprint != own:
        raise InputError(
            f"the adapter {name!r}, {folder}, was trained on the draft {origin.path} ({origin.fingerprint[:12]}), and "
            f"{base} is another one ({own[:12]}). Load that draft, or train an adapter for this one"
        )
