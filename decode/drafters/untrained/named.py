"""The drafters that a name alone makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.common.errors import InputError
from decode.config import ModelConfig, Precision
from decode.drafters.base import Drafter
from decode.drafters.lm import LMDraft
from decode.drafters.saved_head import HEADS
from decode.drafters.untrained.cascade import CascadeDrafter
from decode.drafters.untrained.config import (
    ALONE,
    CascadeConfig,
    EarlyExitConfig,
    EditConfig,
    ForeignConfig,
    MixtureConfig,
    RetrievalConfig,
    settings_of,
)
from decode.drafters.untrained.early_exit import EarlyExitDrafter, refuse_exit
from decode.drafters.untrained.edit import EditDrafter
from decode.drafters.untrained.exit_profile import exit_layer_of
from decode.drafters.untrained.foreign.made import check_foreign, make_foreign
from decode.drafters.untrained.index.datastore import Datastore
from decode.drafters.untrained.jacobi import JacobiDrafter
from decode.drafters.untrained.mixture import MixtureDrafter
from decode.drafters.untrained.ngram import NgramDrafter
from decode.drafters.untrained.retrieval import RetrievalDrafter
from decode.models.compatibility import load_tokenizer, token_map_hash
from decode.models.describe import ModelDescription, describe_loaded

Load = Callable[..., Drafter]
"""`saved_draft.load_drafter` for a target: path, then settings."""
Describe = Callable[[str, ModelDescription, str, Mapping[str, Any]], Any]
"""`saved_draft.describe_draft`, which raises InputError for a member that does not fit the target."""


def _edit(config: EditConfig, target: PreTrainedModel) -> EditDrafter:
    if config.source is None:
        return EditDrafter()
    return EditDrafter(_encoded(_tokenizer(target), _source(config.source), target))


def _source(path: str) -> str:
    text = _read(Path(path), f"source={path}")
    if not text:
        raise InputError(f"source={path} is empty: nothing in it can be edited. Give the file that is edited")
    return text


def _retrieval(config: RetrievalConfig, target: PreTrainedModel) -> RetrievalDrafter:
    tokenizer = _tokenizer(target)
    datastore = None if config.datastore is None else Datastore.open(config.datastore, token_map_hash(tokenizer))
    texts = [] if config.documents is None else _documents(config.documents)
    return RetrievalDrafter(config.least_match, datastore, [_encoded(tokenizer, text, target) for text in texts])


def _documents(path: str) -> list[str]:
    """The texts of a file, or of all files in a folder; InputError where there are none."""
    folder = Path(path)
    files = sorted(one for one in folder.rglob("*") if one.is_file()) if folder.is_dir() else [folder]
    texts = [text for file in files if (text := _read(file, f"documents={path}")).strip()]
    if not texts:
        raise InputError(f"documents={path} holds no text, so nothing can be drafted from it; give files with text")
    return texts


def _read(file: Path, where: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{where}: {file} cannot be read ({error.strerror}); give a text file") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: {file} is not UTF-8 text: {error}. Convert it first") from error


def _early_exit(config: EarlyExitConfig, target: PreTrainedModel) -> EarlyExitDrafter:
    layer = config.exit_layer or exit_layer_of(config, describe_loaded(target))
    return EarlyExitDrafter(target, layer)


def _cascade(config: CascadeConfig, load: Load) -> CascadeDrafter:
    assert config.draft is not None
    draft, helper = load(config.draft), load(config.helper, **config.helper_settings)
    _check_cascade(config, getattr(draft, "family", "lm"), getattr(helper, "family", "lm"))
    return CascadeDrafter(cast(LMDraft, draft), helper)


def _check_cascade(config: CascadeConfig, draft: str, helper: str) -> None:
    """Heads draft from the target's hidden states, which nobody has of the draft."""
    if draft != "lm" or helper in HEADS:
        raise InputError(
            f"a cascade is of a draft LM and a helper that reads tokens alone, no head; draft={config.draft} is of "
            f"family {draft}, helper={config.helper} of family {helper}. Give a draft LM and another helper"
        )


def _mixture(config: MixtureConfig, load: Load) -> MixtureDrafter:
    members = [load(name, **config.settings.get(name, {})) for name in config.members]
    _refuse_adapters(config.members, [getattr(one, "family", "") for one in members])
    _check_mixture([name for name, one in zip(config.members, members, strict=True) if one.taps])
    return MixtureDrafter(members)


def _check_mixture(heads: Sequence[str]) -> None:
    if len(heads) > 1:
        raise InputError(
            f"a mixture reads the hidden states of one head, and {', '.join(heads)} are {len(heads)}; leave the others "
            "out of its members"
        )


def _refuse_adapters(members: Sequence[str], families: Sequence[str]) -> None:
    wrong = [name for name, family in zip(members, families, strict=True) if family == "exit_adapter"]
    if wrong:
        raise InputError(f"members={list(members)}: {wrong[0]} is an exit adapter, which {ALONE}. Leave it out")


def check_named(name: str, settings: Mapping[str, Any], target: ModelDescription, describe: Describe) -> None:
    """Raise what making this drafter would raise, before the target is loaded."""
    asked = settings_of(name, settings)
    if isinstance(asked, CascadeConfig):
        assert asked.draft is not None
        draft = describe(asked.draft, target, "the cascade's draft", {})
        helper = describe(asked.helper, target, "the cascade's helper", asked.helper_settings)
        _check_cascade(asked, draft.family, helper.family)
    if isinstance(asked, MixtureConfig):
        described = {
            name: describe(name, target, "the mixture's member", asked.settings.get(name, {})) for name in asked.members
        }
        _refuse_adapters(asked.members, [one.family for one in described.values()])
        _check_mixture([name for name, one in described.items() if one.family in HEADS])
    if isinstance(asked, RetrievalConfig):
        if asked.datastore is not None:
            Datastore.open(asked.datastore, target.token_map_hash)
        if asked.documents is not None:
            _documents(asked.documents)
    if isinstance(asked, EditConfig) and asked.source is not None:
        _source(asked.source)
    if isinstance(asked, EarlyExitConfig):
        refuse_exit(exit_layer_of(asked, target), target.num_layers, target.path)
    if isinstance(asked, ForeignConfig):
        check_foreign(asked, target)


def _tokenizer(target: PreTrainedModel) -> PreTrainedTokenizerBase:
    if not target.config.name_or_path:
        raise InputError(
            "a target in memory that came from no files has no tokenizer, and texts on disk cannot be read without "
            "one; load the target with from_pretrained, or make the drafter from token ids"
        )
    return load_tokenizer(ModelConfig(path=target.config.name_or_path))


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str, target: PreTrainedModel) -> list[int]:
    """Tokens that were added to the tokenizer alone are left out: the target has no embedding of them."""
    known = target.config.get_text_config().vocab_size
    return [one for one in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if one < known]


DRAFTERS: dict[str, Callable[[Any, PreTrainedModel, Load, Precision], Drafter]] = {
    "ngram": lambda config, target, load, dtype: NgramDrafter(config),
    "edit": lambda config, target, load, dtype: _edit(config, target),
    "retrieval": lambda config, target, load, dtype: _retrieval(config, target),
    "jacobi": lambda config, target, load, dtype: JacobiDrafter(config),
    "early_exit": lambda config, target, load, dtype: _early_exit(config, target),
    "cascade": lambda config, target, load, dtype: _cascade(config, load),
    "mixture": lambda config, target, load, dtype: _mixture(config, load),
    "foreign": lambda config, target, load, dtype: make_foreign(config, target, _tokenizer(target), dtype),
}
"""Name -> what makes it from its settings (`config.UNTRAINED`) for a target, given what loads its members, and the
precision of weights."""
