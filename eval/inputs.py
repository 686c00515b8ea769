"""What every measurement has in common: what it checks before a weight is loaded, how it loads target and drafts, and
the run's settings at each temperature."""

from __future__ import annotations

import gc
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from decode import load_drafter
from decode.common.environment import resolve_device
from decode.common.errors import ConfigError, InputError
from decode.config import ModelConfig
from decode.drafters.beside.refusals import check_foresees, check_overlap
from decode.drafters.provenance import TextOrigin, read_provenance
from decode.drafters.saved_draft import DraftDescription, describe_draft
from decode.drafters.untrained.config import UNTRAINED, check_strict, settings_of
from decode.drafters.untrained.index.datastore import manifest_of
from decode.models.compatibility import load_tokenizer
from decode.models.describe import ModelDescription, describe_model
from decode.models.load import load_model
from decode.sampling.own_settings import RESTING, asked_by, say_others
from decode.sampling.penalties import asked_processors
from decode.sampling.stopping import own_eos_ids
from decode.sampling.warp import Sampling
from distill.corpora.config import DataConfig
from eval.config import EvalConfig
from eval.prompts.chats import check_chats_of_draft, check_same_chats

_BYTES_PER_S = {"cpu": 10e9, "cuda": 1e12}
"""Weights read per second at batch 1, as an order of magnitude for the estimate."""
_HOST_S = 0.5e-3
"""Seconds a layer costs besides, on any device: Python calls its kernels one by one."""

Named = tuple[str, dict[str, Any]]
"""What a draft is loaded by: its folder or name, and its settings."""
_OF_TRAINED = ("families", "served")
"""Modes that ask for a draft's folder."""


def named_drafts(cfg: EvalConfig) -> dict[str, Named]:
    """Name in `drafts` -> what it is loaded by. `drafts.both=lookup+mtp` is a mixture of drafts of those names, or of
    drafters without weights."""
    return {name: _named(cfg, value) for name, value in cfg.drafts.items()}


def _named(cfg: EvalConfig, value: str) -> Named:
    parts = value.split("+")
    if len(parts) > 1 and all(part in cfg.drafts or part in UNTRAINED for part in parts):
        return "mixture", {"members": [cfg.drafts.get(part, part) for part in parts]}
    return value, {}


def say_sampling(cfg: EvalConfig, target: ModelDescription) -> None:
    """One line where the target's own generation_config asks for other sampling."""
    own = asked_by(target.generation_config).get("temperature")
    used = vars(cfg.decode) | {"temperature": own if own in cfg.temperatures else cfg.temperatures[0]}
    written = {name: f"decode.{name}={{}}" for name in RESTING} | {"temperature": "'temperatures=[{}]'"}
    say_others(target.generation_config, used, target.path, written, of_run=True)


def check_models(cfg: EvalConfig) -> tuple[ModelDescription, dict[str, str]]:
    """The target's description and each draft's family; InputError where a draft's tokens are not the target's."""
    target = describe_model(cfg.target, loads=cfg.mode != "served")
    say_sampling(cfg, target)
    families = {}
    for name, (path, settings) in named_drafts(cfg).items():
        if path in UNTRAINED and not settings:
            _check_unset(name, path)
        draft = describe_draft(path, target, f"drafts.{name}", settings)
        if draft.family in UNTRAINED and cfg.mode in _OF_TRAINED:
            raise InputError(
                f"drafts.{name}={draft.family} is no trained draft, and mode={cfg.mode} is of trained ones. Time it "
                "with mode=report, mode=drafters or mode=decoders"
            )
        check_strict(draft.family, settings, cfg.decode.strict, "decode.strict")
        check_overlap(draft.family, cfg.decode.overlap, "decode.overlap")
        for where, changes in _settings_with(cfg, name).items():
            check_foresees(draft.foresees, changes.get("confidence", cfg.decode.confidence), f"{where}.confidence")
        check_chats_of_draft(cfg, f"drafts.{name}", draft.path, target)
        families[name] = draft.family
        if cfg.prompts.file is None:
            check_held_out(cfg.data, f"drafts.{name}", draft.path)
    return target, families


def _check_unset(name: str, drafter: str) -> None:
    """ConfigError for a drafter without weights that cannot do without settings, for which `drafts` has no place."""
    try:
        settings_of(drafter, {})
    except ConfigError as error:
        raise ConfigError(
            f"drafts.{name}={drafter} cannot be timed so, since drafts have no settings, and it wants some ({error}). "
            f"Time it with mode=drafters '+drafters.arms.{name}={{draft: {drafter}, settings: {{...}}}}'"
        ) from error


def _settings_with(cfg: EvalConfig, draft: str) -> dict[str, dict[str, Any]]:
    """Where settings stand that this draft is timed with -> what they change in `decode`."""
    found: dict[str, dict[str, Any]] = {"decode": {}}
    if cfg.mode == "decoders":
        found |= {f"decoders.arms.{name}": changes for name, changes in cfg.decoders.arms.items()}
    if cfg.mode == "report" and draft in cfg.headline.drafts:
        found |= {f"headline.settings.{name}": changes for name, changes in cfg.headline.settings.items()}
    return found


def check_held_out(data: DataConfig, who: str, draft: str) -> None:
    """Raise InputError where the draft was trained on the same corpus under other shares: held-out text would be
    seen."""
    provenance = read_provenance(draft)
    if provenance is not None and provenance.data is not None:
        check_same_shares(data, provenance.data, f"{who}={draft}")


def check_datastore(cfg: EvalConfig, arm: str, folder: str, target: ModelDescription) -> None:
    """The same for a datastore that an arm looks drafts up in, and for its chats."""
    known = manifest_of(folder)
    if known is not None and known.data is not None:
        who = f"the datastore {folder} of arm {arm}"
        check_same_shares(cfg.data, known.data, who)
        check_same_chats(cfg, known.data, known.chat_template_hash, target, who)


def check_same_shares(data: DataConfig, origin: TextOrigin, who: str) -> None:
    """The same for any training split: the corpus and its shares, as DataConfig names them."""
    if _files(origin) != _files(data) or origin.subset != data.subset:
        return
    for key in ("heldout_share", "validation_share"):
        there, here = getattr(origin, key), getattr(data, key)
        if there != here:
            raise InputError(
                f"{who} was made of text split with data.{key}={there}, and this report draws its prompts with "
                f"data.{key}={here}: part of them is in that text. Give data.{key}={there}"
            )


def _files(data: DataConfig | TextOrigin) -> tuple[str, str | None]:
    """(corpus, path) of the files: tasks are made of those of another corpus, and follow its split."""
    if data.name == "tasks":
        return "python_stdlib" if data.path is None else "text", data.path
    return data.name, data.path


def shared_context(cfg: EvalConfig, target: ModelDescription) -> int:
    """Longest context in tokens that target and drafts all know."""
    return min([target.max_positions, *(draft.max_positions for draft in described_drafts(cfg, target).values())])


def described_drafts(cfg: EvalConfig, target: ModelDescription) -> dict[str, DraftDescription]:
    """By name in `drafts`."""
    named = named_drafts(cfg)
    return {name: describe_draft(path, target, settings=settings) for name, (path, settings) in named.items()}


def load(cfg: EvalConfig, source: ModelConfig) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The target as `source` says and all drafts, after whatever models were held before are gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    model = load_model(source)
    named = named_drafts(cfg)
    return model, {name: load_drafter(path, target=model, **settings) for name, (path, settings) in named.items()}


def sampling_at(cfg: EvalConfig, temperature: float) -> Sampling:
    """The run's sampling at another temperature."""
    return Sampling(temperature, cfg.decode.top_k, cfg.decode.top_p, cfg.decode.min_p)


def verifier_at(cfg: EvalConfig, temperature: float) -> str:
    """greedy at temperature 0, else the configured rule."""
    return "greedy" if temperature == 0 else cfg.decode.verifier


def settings_at(cfg: EvalConfig, temperature: float) -> dict[str, Any]:
    """The configured keyword arguments of decode.generate at another temperature."""
    settings = dict(vars(cfg.decode))
    if _names_texts(cfg):
        settings["tokenizer"] = load_tokenizer(cfg.target)
    return {**settings, "temperature": temperature, "verifier": verifier_at(cfg, temperature)}


def processors_of(cfg: EvalConfig, model: PreTrainedModel) -> LogitsProcessorList | None:
    """The configured penalties, biases, bans and grammar; None where all are at rest."""
    tokenizer = load_tokenizer(cfg.target) if _names_texts(cfg) else None
    vocab_size = model.config.get_text_config().vocab_size
    ends = own_eos_ids(model.generation_config, vocab_size)
    found = asked_processors(vocab_size, tokenizer, cfg.decode, ends)
    return LogitsProcessorList(found) if found else None


def can_resume(cfg: EvalConfig) -> bool:
    """Whether a text may be continued from its own middle as from a prompt: these settings tell one from the other."""
    return not (cfg.decode.presence_penalty or cfg.decode.frequency_penalty or cfg.decode.grammar)


def _names_texts(cfg: EvalConfig) -> bool:
    named = any(isinstance(key, str) for key in (*cfg.decode.logit_bias, *cfg.decode.banned_words))
    return named or cfg.decode.grammar is not None


def rough_seconds_per_token(target: ModelDescription, device: str) -> float:
    """Of plain decoding at batch 1, as an order of magnitude."""
    kind = resolve_device(device).type
    return target.weight_bytes / _BYTES_PER_S.get(kind, 10e9) + _HOST_S * target.num_layers
