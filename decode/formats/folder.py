"""A published draft's folder: config.json with checked types, and its tensors by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from decode.common.checked_json import Content, JsonFile, Size, Text, read_json
from decode.common.errors import InputError
from decode.formats.weights import Stored, stored_tensors, tensor_of
from decode.models.checkpoint_files import Layers, ModelFile, Token, Width

Ids = Annotated[list[Token], Field(max_length=1 << 10)]
Depth = Annotated[int, Field(ge=1, le=1 << 10)]
REMEDY = "Write it again, or fetch the folder again."


class Nested(Content):
    """`eagle_config`, `dflash_config` or `dspark_config`."""

    eagle_aux_hidden_state_layer_ids: Ids | None = None
    target_layer_ids: Ids | None = None
    mask_token_id: Token | None = None
    sample_from_anchor: bool | None = None
    use_aux_hidden_state: bool | None = None
    causal: bool | None = None
    conv_kernel_size: Annotated[int, Field(ge=0, le=1 << 10)] | None = None
    conv_group_size: Annotated[int, Field(ge=0, le=1 << 16)] | None = None
    """0 of both is without convolutions."""
    selector_rank: Width | None = None
    selector_top_k: Layers | None = None
    lilicorr_enabled: bool | None = None
    lilicorr_candidate_topk: Layers | None = None
    lilicorr_hidden_size: Annotated[int, Field(ge=0, le=1 << 24)] | None = None
    """0 is the draft's."""
    lilicorr_num_layers: Layers | None = None
    lilicorr_num_heads: Layers | None = None
    lilicorr_mlp_ratio: Annotated[float, Field(gt=0, le=1e4)] | None = None
    lilicorr_factor_dim: Width | None = None
    lilicorr_vector_eps: Annotated[float, Field(gt=0, le=1)] | None = None
    lilicorr_logit_scale: Annotated[float, Field(gt=0, le=1e4)] | None = None
    norm_before_fc: bool | None = None


class Proposal(Content):
    """One of `proposal_methods`."""

    speculative_tokens: Depth | None = None


class Speculators(Content):
    """What is read of `speculators_config`."""

    proposal_methods: list[Proposal] | None = None


class DraftFile(ModelFile):
    """config.json of a draft: what is read of it has these types."""

    speculators_model_type: Text | None = None
    transformer_layer_config: ModelFile | None = None
    speculators_config: Speculators | None = None
    ttt_length: Depth | None = None
    eagle_config: Nested | None = None
    dflash_config: Nested | None = None
    dspark_config: Nested | None = None
    eagle_aux_hidden_state_layer_ids: Ids | None = None
    aux_hidden_state_layer_ids: Ids | None = None
    target_layer_ids: Ids | None = None
    num_aux_hidden_states: Layers | None = None
    target_hidden_size: Width | None = None
    draft_vocab_size: Width | None = None
    truncated_vocab_size: Width | None = None
    num_target_layers: Layers | None = None
    block_size: Layers | None = None
    markov_rank: Annotated[int, Field(ge=0, le=1 << 16)] | None = None
    mask_token_id: Token | None = None
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    medusa_num_heads: Layers | None = None
    medusa_num_layers: Layers | None = None
    num_heads: Layers | None = None
    tie_word_embeddings: bool | None = None
    is_causal: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    max_seq_len: Size | None = None


CONFIG = JsonFile(DraftFile, "engines read it before they make room for the weights", REMEDY)


@dataclass(frozen=True)
class PublishedFolder:
    """A draft as an engine is given it."""

    path: Path
    written: dict[str, Any]
    """config.json."""
    stored: dict[str, Stored]
    """Its tensors by the names they have there."""

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The values that engines work with: where vLLM reads by the speculators library's rules those that it nests,
        above them the others."""
        nested = (self.written.get("transformer_layer_config") or {}) if self.is_speculators else {}
        own = {name: value for name, value in self.written.items() if value is not None or name not in nested}
        return completed({**nested, **own})

    @property
    def is_speculators(self) -> bool:
        """Whether vLLM reads it by the speculators library's rules: where there is no model_type at the top."""
        return "speculators_model_type" in self.written and "model_type" not in self.written

    def tensor(self, name: str) -> Tensor:
        """Its values, read now."""
        return tensor_of(name, self.stored[name])

    @cached_property
    def plain_names(self) -> dict[str, str]:
        """The names of its tensors without the prefix that some have, and as they are."""
        return {name.removeprefix("model."): name for name in self.stored}

    def named(self, name: str) -> str:
        """A tensor of that plain name; InputError where there is none."""
        if name not in self.plain_names:
            raise InputError(f"{self.path} holds no {name}, which config.json calls for. Fetch the folder again")
        return self.plain_names[name]

    def setting(self, name: str) -> Any:
        """At the top of config.json or in a part of it, wherever it is set."""
        parts = (self.fields, *(self.fields.get(part) or {} for part in ("dflash_config", "dspark_config")))
        return next((part[name] for part in parts if part.get(name) is not None), None)

    def needed(self, *names: str) -> tuple[Any, ...]:
        """Values of config.json; InputError where one is not there."""
        missing = [name for name in names if self.fields.get(name) is None]
        if missing:
            raise InputError(
                f"{self.path}/config.json does not say {', '.join(missing)}, so that no head can be built that its "
                "weights fit. Fetch the folder again, or write the values that it was trained with"
            )
        return tuple(self.fields[name] for name in names)

    def only(self, wanted: Mapping[str, Any], why: str) -> None:
        """Raise InputError where config.json has another value than what is computed here; null and absent are fine."""
        for name, value in wanted.items():
            found = self.fields.get(name)
            if found is not None and found != value:
                raise InputError(
                    f"{self.path}/config.json says {name}={found}, and heads are computed here with {value}: {why}. "
                    "Serve this head with the engine that it was published for"
                )


def completed(written: Mapping[str, Any]) -> dict[str, Any]:
    """With what transformers puts in place of fields that are often left out."""
    heads, width = written.get("num_attention_heads"), written.get("hidden_size")
    usual = {"rms_norm_eps": 1e-6, "hidden_act": "silu"}
    if heads:
        usual |= {"num_key_value_heads": heads} | ({"head_dim": width // heads} if width else {})
    return {**usual, **{name: value for name, value in written.items() if value is not None or name not in usual}}


def read_folder(folder: Path) -> PublishedFolder:
    """The folder, of which no values are read; InputError where it has no config.json, and for damaged files."""
    if not (folder / "config.json").is_file():
        inside = sorted(one.parent.name for one in folder.glob("*/config.json"))
        hint = f"; it holds the folders {', '.join(inside)}: give one of them" if inside else ""
        raise InputError(f"{folder} holds no config.json, so no engine reads a draft there{hint}")
    CONFIG.read(folder / "config.json")
    return PublishedFolder(folder, read_json(folder / "config.json", REMEDY), stored_tensors(folder))
