"""Which settings of a target belong together when vLLM runs it; imports nothing heavy: bad values fail at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args
from urllib.parse import urlsplit

from decode.common.typed_config import require, require_at_least
from decode.config import Scheme

if TYPE_CHECKING:
    from distill.config import TargetConfig

STARTED = ("tensor_parallel_size", "pipeline_parallel_size", "quantization", "gpu_memory_utilization")
"""What an engine is started with; a server has its own."""
SERVED = ("url", "states_url", "states_folder")


def check_engine_settings(target: TargetConfig) -> None:
    """Raise ConfigError for settings of vLLM's that are out of range, or that this runtime would ignore."""
    refuse(target, ("served_name", "key_variable"), "is for target.runtime=openai; set that, or leave it out")
    if target.runtime == "transformers":
        _check_scheme(target)
        refuse(
            target,
            (*(name for name in STARTED if name != "quantization"), "states_url", "states_folder"),
            "is vLLM's; set target.runtime=vllm, or leave it out",
        )
        refuse(target, ("url", "timeout"), "is for target.runtime=vllm and target.runtime=openai; set one of them")
        return
    require_at_least(1, target, "target.", "tensor_parallel_size", "pipeline_parallel_size")
    share = target.gpu_memory_utilization
    require(
        share is None or 0 < share <= 1,
        f"target.gpu_memory_utilization={share} is no share in (0, 1] of a device's memory; 0.9 leaves a tenth free",
    )
    check_timeout(target)
    if target.url is None:
        refuse(target, SERVED, "belongs to a running server; name it with target.url, or leave it out")
        return
    refuse(target, STARTED, "is for engines that are started here, and the server has its own; leave it out")
    for name in ("url", "states_url"):
        check_url(name, getattr(target, name))
    require(
        target.states_folder is not None,
        f"target.url={target.url} and no target.states_folder: p is made of hidden states, which the server writes to "
        "files. Name the folder in which they appear here (docs/how-to/record_a_target.md)",
    )


def _check_scheme(target: TargetConfig) -> None:
    schemes = get_args(Scheme)
    require(
        target.quantization is None or target.quantization in schemes,
        f"target.quantization={target.quantization} is no scheme of target.runtime=transformers, which has "
        f"{', '.join(schemes)}; use one of them, or set target.runtime=vllm, whose own words are others",
    )


def check_timeout(target: TargetConfig) -> None:
    """Raise ConfigError where nothing could ever answer."""
    require(
        target.timeout > 0,
        f"target.timeout={target.timeout} gives an engine or a server no time to answer; use some minutes",
    )


def check_url(name: str, url: str | None) -> None:
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


def refuse(target: TargetConfig, names: tuple[str, ...], why: str) -> None:
    """Raise ConfigError where one of these is set."""
    usual = type(target).__dataclass_fields__
    for name in names:
        value = getattr(target, name)
        require(value == usual[name].default, f"target.{name}={value} {why}")
