"""Adapters (peft) of a draft, one for each kind of text, say: kept beside the draft that they were trained on, and
switched by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from decode.common.checked_json import Content, JsonFile, Text
from decode.common.errors import InputError
from decode.common.extras import extra, require_installed
from decode.drafters.base import Drafter
from decode.models.fingerprint import files_fingerprint

if TYPE_CHECKING:
    from peft import PeftModel

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILE = "adapter_of.json"


class AdapterOf(Content):
    """The draft that an adapter was trained on."""

    path: Text
    fingerprint: Text
    """`files_fingerprint` of its folder."""


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
    for name, folder in folders.items():
        _check(name, Path(folder), cast(Any, drafter).source)
    module: Any = getattr(drafter, "model", drafter)  # of a language model the transformers model, as peft knows it
    (first, place), *others = folders.items()
    adapters = PeftModel.from_pretrained(module, str(place), adapter_name=first, autocast_adapter_dtype=False)
    for name, folder in others:
        adapters.load_adapter(str(folder), name, autocast_adapter_dtype=False)
    return adapters.eval()


def _identity(draft: str) -> str:
    """Of the files of a folder, GGUF file or hub id."""
    return files_fingerprint(Path(draft)) if Path(draft).exists() else draft


def _check(name: str, folder: Path, base: str) -> None:
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
