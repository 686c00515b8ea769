"""What a user sets about a target and what runs it; imports nothing heavy: bad values fail at once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from decode.common.typed_config import require, require_at_least
from decode.config import ModelConfig, require_scheme

RuntimeName = Literal["transformers", "vllm", "openai"]
STARTED = ("tensor_parallel_size", "pipeline_parallel_size", "quantization", "gpu_memory_utilization")
"""What an engine is started with; a server has its own."""
_SERVED = ("url", "states_url", "states_folder")
_LOADING = ("dtype", "device", "device_map", "attn_implementation", "allow_missing")
LATER = "record texts alone (records.store=[]), p later (docs/how-to/large_targets.md)"


@dataclass
class TargetConfig(ModelConfig):
    """The model whose distributions are recorded, and what runs it."""

    runtime: RuntimeName = "transformers"
    """transformers: in this process; vllm: in vLLM's engine, in a process and an environment of its own, which writes
    all responses first and then reads them for p and hidden states; openai: in a server that runs already and speaks
    OpenAI's protocol, which writes responses, with its likeliest tokens where it tells them."""
    vllm_python: str = ".venv-vllm/bin/python"
    """runtime=vllm only: interpreter of vLLM's environment; `bash scripts/vllm_env.sh` makes this one."""
    tensor_parallel_size: int = 1
    """runtime=vllm only: devices that share each layer of the target."""
    pipeline_parallel_size: int = 1
    """runtime=vllm only: groups of devices that hold the target's layers one after another."""
    quantization: str | None = None  # type: ignore[assignment]
    """Quantises the target as it is loaded. runtime=transformers: int8 and int4 the weights alone, int8_dynamic weights
    and activations, with a scale for each token; runtime=vllm: a word of vLLM's, such as fp8. None leaves it as it is.
    A checkpoint that is quantised already needs no word."""
    gpu_memory_utilization: float | None = None
    """runtime=vllm only: share of each device's memory that an engine takes; None is vLLM's own."""
    url: str | None = None
    """A running server, http://HOST:PORT/v1. runtime=vllm: in place of engines that are started here; runtime=openai:
    any that speaks OpenAI's protocol."""
    served_name: str | None = None
    """runtime=openai only: what the server calls the target; None is the only model that it lists."""
    key_variable: str | None = None
    """runtime=openai only: environment variable that holds the server's key; None sends none."""
    states_url: str | None = None
    """With url: the server that gives the hidden states; None is the same one, which then writes slowly."""
    states_folder: str | None = None
    """With url: where the files of hidden states that the server writes to its shared_storage_path appear here."""
    timeout: float = 1800.0
    """runtime=vllm and openai only: seconds without a sign of life after which an engine or a server is given up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.runtime == "openai":
            _check_openai_settings(self)
            return
        _check_engine_settings(self)
        if self.runtime != "vllm":
            return
        require(
            self.dtype != "float64",
            "target.dtype=float64 and target.runtime=vllm, whose kernels have no float64; use float32, or "
            "target.runtime=transformers",
        )
        _refuse(
            self,
            ("device", "device_map", "attn_implementation", "trust_remote_code", "allow_missing"),
            "says how transformers loads a model, and target.runtime=vllm would ignore it; leave it out, or use "
            "target.runtime=transformers",
        )


def _check_engine_settings(target: TargetConfig) -> None:
    """Raise ConfigError for settings of vLLM's that are out of range, or that this runtime would ignore."""
    _refuse(target, ("served_name", "key_variable"), "is for target.runtime=openai; set that, or leave it out")
    if target.runtime == "transformers":
        if target.quantization is not None:
            require_scheme(target.quantization, "target.quantization", "set target.runtime=vllm, which has others")
        _refuse(
            target,
            (*(name for name in STARTED if name != "quantization"), "states_url", "states_folder"),
            "is vLLM's; set target.runtime=vllm, or leave it out",
        )
        _refuse(target, ("url", "timeout"), "is for target.runtime=vllm and target.runtime=openai; set one of them")
        return
    require_at_least(1, target, "target.", "tensor_parallel_size", "pipeline_parallel_size")
    share = target.gpu_memory_utilization
    require(
        share is None or 0 < share <= 1,
        f"target.gpu_memory_utilization={share} is no share in (0, 1] of a device's memory; 0.9 leaves a tenth free",
    )
    _check_timeout(target)
    if target.url is None:
        _refuse(target, _SERVED, "belongs to a running server; name it with target.url, or leave it out")
        return
    _refuse(target, STARTED, "is for engines that are started here, and the server has its own; leave it out")
    for name in ("url", "states_url"):
        _check_url(name, getattr(target, name))
    require(
        target.states_folder is not None,
        f"target.url={target.url} and no target.states_folder: p is made of hidden states, which the server writes to "
        "files. Name the folder in which they appear here (docs/how-to/record_a_target.md)",
    )


def _check_timeout(target: TargetConfig) -> None:
    """Raise ConfigError where nothing could ever answer."""
    require(
        target.timeout > 0,
        f"target.timeout={target.timeout} gives an engine or a server no time to answer; use some minutes",
    )


def _check_url(name: str, url: str | None) -> None:
    """Raise ConfigError for what is no address, or holds a secret."""
    parts = urlsplit(url or "http://host/v1")
    require(
        parts.username is None and parts.password is None,
        f"target.{name} holds a user or a password, which would be written into the run's folder; give a key in the "
        "environment (docs/how-to/record_a_target.md)",
    )
    good = parts.scheme in ("http", "https") and parts.netloc and not parts.query and not parts.fragment
    require(
        bool(good) and parts.path.rstrip("/") == "/v1",
        f"target.{name}={url} is no address of an OpenAI-compatible server; give it as http://HOST:PORT/v1",
    )


def _refuse(target: TargetConfig, names: tuple[str, ...], why: str) -> None:
    """Raise ConfigError where one of these is set."""
    usual = type(target).__dataclass_fields__
    for name in names:
        value = getattr(target, name)
        require(value == usual[name].default, f"target.{name}={value} {why}")


def _check_openai_settings(target: TargetConfig) -> None:
    """Raise ConfigError for an address that is none, and for settings of other ways to run a target."""
    own = (*STARTED, "states_url", "states_folder", "vllm_python")
    _refuse(target, own, "is for target.runtime=vllm, and target.runtime=openai would ignore it; leave it out")
    _refuse(target, _LOADING, "says how weights are loaded, and the server has loaded its own; leave it out")
    _check_timeout(target)
    require(
        target.url is not None,
        "target.runtime=openai needs target.url, the server that runs the target, as http://HOST:PORT/v1",
    )
    _check_url("url", target.url)
    name = target.key_variable  # never shown: it may be the key itself
    require(
        name is None or re.fullmatch("[A-Z][A-Z0-9_]*", name) is not None,
        "target.key_variable is not the name of an environment variable, as OPENAI_API_KEY (capitals, digits and _). "
        "The key itself would be written into the run's folder: put it into a variable",
    )
