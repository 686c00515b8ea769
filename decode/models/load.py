"""Finding, describing and loading models; everything that can be refused is refused before weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast, get_args

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as hf_logging

from decode.common.checked_json import read_json
from decode.common.environment import resolve_device
from decode.common.errors import InputError
from decode.config import ModelConfig, Scheme
from decode.forward.window import Window, own_window
from decode.models.arithmetic import warn_if_emulated
from decode.models.checkpoint_check import check_headers, check_report, is_quantised, no_model
from decode.models.checkpoint_files import DAMAGED, check_model_files, check_words, damaged, read_headers, weight_files
from decode.models.compatibility import (
    attention_of,
    chat_template_hash,
    load_tokenizer,
    longest_context,
    refuse_unsupported,
    token_map_hash,
)
from decode.models.fingerprint import files_fingerprint, stored_fingerprint, weights_fingerprint
from decode.models.gguf_config import gguf_config
from decode.models.gguf_file import open_gguf
from decode.models.gguf_weights import gguf_shapes, gguf_weights
from decode.models.quantised import refuse_dependent_rows, refuse_unreadable, scheme_of
from decode.models.quantiser import refuse_missing_quantiser
from decode.models.torchao_schemes import check_scheme, scheme_settings
from decode.models.weight_counts import WeightCounts, count_weights

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
EXAMPLE = Path("runs/models/smollm2")
"""Where scripts/example_model.sh puts the model that target=smollm2 names."""
QUICKLY_READ = 1 << 30  # bytes: weights that are there before a progress bar is of use


@dataclass(frozen=True)
class ModelDescription:
    """What config.json and the tokenizer files say of a model; no weights are read."""

    source: ModelConfig
    config: PretrainedConfig
    model: PreTrainedModel | None = None
    """The model itself, where it is in memory already."""

    @property
    def path(self) -> str:
        """Folder or hub id."""
        assert self.source.path is not None
        return self.source.path

    @property
    def vocab_size(self) -> int:
        """Rows of the output head (padding entries included)."""
        return self.config.get_text_config().vocab_size

    @property
    def num_layers(self) -> int:
        """Transformer layers."""
        return self.config.get_text_config().num_hidden_layers

    @property
    def hidden_size(self) -> int:
        """Width d of the final hidden state."""
        return self.config.get_text_config().hidden_size

    @property
    def dtype_name(self) -> str:
        """Precision of its passes: that asked for, else that of the checkpoint."""
        asked = str(self.source.dtype)
        own = str(getattr(self.config, "dtype", None) or "float32").removeprefix("torch.")
        return own if asked == "auto" else asked

    @property
    def max_positions(self) -> int:
        """Longest context in tokens."""
        return longest_context(self.config) or 1 << 30

    @cached_property
    def weight_counts(self) -> WeightCounts:
        """Parameters, and those that a token costs."""
        return count_weights(self.config)

    @property
    def num_parameters(self) -> int:
        """Parameters, tied ones once."""
        return self.weight_counts.total

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight files; of a GGUF file, what it has; for a hub id, two bytes a parameter."""
        path = Path(self.path)
        files = [path] if path.is_file() else weight_files(path) if path.is_dir() else []
        return sum(file.stat().st_size for file in files) or 2 * self.num_parameters

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the weights: commit of a hub repository, else a hash of config.json and the edges of each
        weight file."""
        commit = getattr(self.config, "_commit_hash", None)
        if not Path(self.path).exists():
            return f"hub:{self.path}@{commit or self.source.revision or 'main'}"
        return files_fingerprint(Path(self.path))

    @property
    def quantization(self) -> str | None:
        """The scheme that it is quantised by as it is loaded; None for none, and for one that an engine knows."""
        asked = self.source.quantization
        return asked if asked in get_args(Scheme) else None

    @property
    def identity(self) -> str:
        """Of what its passes compute: the weights, and what they are rounded to."""
        return self.fingerprint if self.quantization is None else f"{self.fingerprint} in {self.quantization}"

    @cached_property
    def weights_fingerprint(self) -> str | None:
        """Of the weights in memory (`weights_fingerprint`); None where the model is not there."""
        return None if self.model is None else weights_fingerprint(self.model)

    @cached_property
    def stored_fingerprint(self) -> str | None:
        """Of the weights in a folder, as `weights_fingerprint` would have it of them; None where only loading tells."""
        return stored_fingerprint(Path(self.path), self.config) if Path(self.path).is_dir() else None

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer, or None where a local folder holds no tokenizer files, or a GGUF file no tokens."""
        folder = Path(self.path)
        if folder.is_file() and "tokenizer.ggml.tokens" not in open_gguf(folder, "target").metadata:
            return None
        if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
            return None
        return load_tokenizer(self.source)

    @cached_property
    def generation_config(self) -> GenerationConfig:
        """What the model generates by, its end-of-text tokens among it: its own file, else its config."""
        if Path(self.path).is_file():  # GGUF has one configuration of all
            return GenerationConfig.from_model_config(self.config)
        try:
            return GenerationConfig.from_pretrained(self.path, revision=self.source.revision or "main")
        except OSError:  # there is none
            return GenerationConfig.from_model_config(self.config)

    @property
    def token_map_hash(self) -> str | None:
        """Hash of the token-to-id map; None without a tokenizer."""
        return None if self.tokenizer is None else token_map_hash(self.tokenizer)

    @property
    def chat_template_hash(self) -> str | None:
        """Hash of the chat template; None without one."""
        return None if self.tokenizer is None else chat_template_hash(self.tokenizer)


def describe_model(source: ModelConfig, role: str = "target", loads: bool = True) -> ModelDescription:
    """Read config.json of `source`, and of a folder the headers of its weights; raises InputError where there is no
    model that this decoder can treat exactly, or other weights than config.json calls for, and, with `loads`, where
    what unpacks its quantised weights is not installed: an engine may have that, and ends are plain weights."""
    if source.path is None:
        raise InputError(f"{role}.path is not set, so there is no {role} model to load; give a folder or a hub id")
    folder = Path(source.path)
    if folder.exists() or source.path.startswith((".", "/", "~")) or source.path.count("/") > 1 or _is_gguf(folder):
        _check_folder(folder, role)
    try:
        config = _read_config(source, role)
    except (AttributeError, TypeError, ZeroDivisionError) as error:  # sizes that its own class divides by
        fields = read_json(folder / "config.json") if folder.is_dir() else {}
        refuse_unreadable(fields.get("quantization_config"), source.path, role)
        raise InputError(no_model(f"{role}.path={source.path}", fields, error)) from error
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise InputError(
            f"{role}.path={source.path} is neither a model folder here nor a hub repository that can be reached: "
            f"{error}"
        ) from error
    refuse_unsupported(config, source.path, role)
    refuse_unreadable(getattr(config, "quantization_config", None), source.path, role)
    window = own_window(config)
    if role == "target":  # a draft's passes may depend on one another: its tokens are checked
        refuse_dependent_rows(config, source.path)
        _refuse_window(window, source.path)
    check_scheme(source, config, role)
    if loads:
        refuse_missing_quantiser(config, source, role)
    attention_of(config, source.attn_implementation)
    check_words(config, source.path, role)
    resolve_device(source.device)
    if folder.exists():
        check_headers(source, config, role, _headers(source, config, role))
    return ModelDescription(source, config)


def _headers(source: ModelConfig, config: PretrainedConfig, role: str) -> Mapping[str, Tensor]:
    """Names and shapes of its tensors, on the meta device."""
    path = Path(source.path or "")
    return gguf_shapes(open_gguf(path, role), config) if path.is_file() else read_headers(path, role)


def _read_config(source: ModelConfig, role: str) -> PretrainedConfig:
    if Path(source.path or "").is_file():
        return gguf_config(open_gguf(source.path or "", role), role)
    return AutoConfig.from_pretrained(
        source.path or "", revision=source.revision, trust_remote_code=source.trust_remote_code
    )


def _is_gguf(path: Path) -> bool:
    """Whether it is meant as a file, there or not: a hub id has no such ending."""
    return path.suffix == ".gguf"


def describe_loaded(model: PreTrainedModel, check: bool = True) -> ModelDescription:
    """The description of a model that is in memory already, found again by the path it came from; InputError, with
    `check`, where it came from nowhere. What was done to its weights since shows in `weights_fingerprint` alone."""
    path = model.config.name_or_path or model.name_or_path
    if check and not path:
        raise InputError(
            "the target was built in memory, so whether a saved draft fits it cannot be checked. Save it, and load "
            "it with from_pretrained, or insist with load_drafter(..., check=False)"
        )
    source = ModelConfig(path=path or "the target in memory", quantization=cast(Any, scheme_of(model.config)))
    return ModelDescription(source, model.config, model)


def load_model(source: ModelConfig, role: str = "target", computes_on: torch.device | None = None) -> PreTrainedModel:
    """The model in eval mode with frozen weights, on its device; checked first as by `describe_model`, and by
    transformers' own report of what it loaded. `computes_on` is where it will be moved to, if it will."""
    description = describe_model(source, role)
    if description.weight_bytes < QUICKLY_READ:
        hf_logging.disable_progress_bar()
    model, report = read_weights(source, description.config, role)
    if is_quantised(description.config):  # scales that only other engines use are left aside on purpose
        report |= {"unexpected_keys": ()}
    check_report(report, source, role)
    if source.device_map is None:
        model.to(resolve_device(source.device))  # type: ignore[arg-type]
    warn_if_emulated(model.dtype, computes_on or model.device, f"Set {role}.dtype=float32")
    return model.eval().requires_grad_(False)


def read_weights(source: ModelConfig, config: PretrainedConfig, role: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model of `config` with the weights of `source`, and transformers' report of what was missing, unexpected or of
    another shape, for `decode.models.checkpoint_check.check_report`; InputError where files are missing or damaged."""
    assert source.path is not None
    is_file = Path(source.path).is_file()
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] if is_file else AutoModelForCausalLM
    try:
        loaded = kind.from_pretrained(
            **(_gguf_weights(source, config) if is_file else _checkpoint(source)),
            config=config,
            **_quantised_by(source),
            revision=source.revision,
            attn_implementation=attention_of(config, source.attn_implementation),
            trust_remote_code=source.trust_remote_code,
            ignore_mismatched_sizes=True,  # they are in the report, which names the two shapes
            output_loading_info=True,
        )
    except DAMAGED as error:
        raise InputError(damaged(f"{role}.path={source.path}", error)) from error
    except RuntimeError as error:
        if "conversion of the weights" not in str(error):
            raise
        raise InputError(
            f"the weights of {role}.path={source.path} are not those that its config.json calls for: transformers "
            "merges some of them, and the report above names those that it could not. Copy the folder again"
        ) from error
    model, report = loaded
    model.name_or_path = model.config.name_or_path = source.path
    if getattr(model, "_hf_peft_config_loaded", False):
        raise InputError(with_adapter(source.path, role))
    return model, report


def _checkpoint(source: ModelConfig) -> dict[str, Any]:
    dtype = "auto" if source.dtype == "auto" else getattr(torch, source.dtype)
    return {"pretrained_model_name_or_path": source.path, "dtype": dtype}


def _gguf_weights(source: ModelConfig, config: PretrainedConfig) -> dict[str, Any]:
    """The tensors of a GGUF file as numbers, so that the model is a plain one, which can be trained and saved."""
    dtype = config.dtype if source.dtype == "auto" else getattr(torch, source.dtype)
    tensors = gguf_weights(open_gguf(source.path or "", "target"), config, cast(torch.dtype, dtype))
    return {"pretrained_model_name_or_path": None, "dtype": dtype, "state_dict": tensors}


def _quantised_by(source: ModelConfig) -> dict[str, Any]:
    """Kernels pack weights where these lie, so that a quantised model is loaded onto its device at once."""
    if source.quantization is None:
        return {"device_map": source.device_map}
    device = resolve_device(source.device)
    settings = scheme_settings(source.quantization, device)
    return {"device_map": source.device_map or {"": device}, "quantization_config": settings}


def _refuse_window(window: Window | None, path: str) -> None:
    """Its text would depend on what runs it."""
    if window is not None:
        raise InputError(
            f"target.path={path} was trained to attend to its first {window.sinks} and last {window.size} positions "
            "alone, which engines do not heed. Only drafts may; name a target without draft_window in its config.json"
        )


def _check_folder(folder: Path, role: str) -> None:
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
