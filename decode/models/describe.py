"""What is known of a model before its weights are read; everything that can be refused is refused there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast, get_args

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import (
    AutoConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from decode.common.checked_json import read_json
from decode.common.environment import resolve_device
from decode.common.errors import InputError
from decode.config import ModelConfig, Scheme
from decode.forward.window import Window, own_window
from decode.models.checkpoint_check import check_headers, no_model
from decode.models.checkpoint_files import check_words, read_headers, weight_files
from decode.models.compatibility import (
    attention_of,
    chat_template_hash,
    load_tokenizer,
    longest_context,
    refuse_unsupported,
    token_map_hash,
)
from decode.models.fingerprint import files_fingerprint, stored_fingerprint, weights_fingerprint
from decode.models.gguf.file import open_gguf
from decode.models.gguf.model_config import gguf_config
from decode.models.gguf.weights import gguf_shapes
from decode.models.model_folder import check_folder
from decode.models.quantisation.quantised import refuse_dependent_rows, refuse_unreadable, scheme_of
from decode.models.quantisation.quantiser import refuse_missing_quantiser
from decode.models.quantisation.torchao_schemes import check_scheme
from decode.models.weight_counts import WeightCounts, count_weights

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


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
    no_hub_id = source.path.startswith((".", "/", "~")) or source.path.count("/") > 1 or folder.suffix == ".gguf"
    if folder.exists() or no_hub_id:
        check_folder(folder, role)
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


def _refuse_window(window: Window | None, path: str) -> None:
    """Its text would depend on what runs it."""
    if window is not None:
        raise InputError(
            f"target.path={path} was trained to attend to its first {window.sinks} and last {window.size} positions "
            "alone, which engines do not heed. Only drafts may; name a target without draft_window in its config.json"
        )
