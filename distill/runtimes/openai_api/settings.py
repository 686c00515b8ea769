"""Which settings belong together when an OpenAI-compatible server runs the target; imports nothing heavy: bad values
fail at once."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from decode.common.typed_config import require
from distill.runtimes.vllm_settings import STARTED, check_timeout, check_url, refuse

if TYPE_CHECKING:
    from distill.config import DistillConfig, TargetConfig

LOADING = ("dtype", "device", "device_map", "attn_implementation", "allow_missing")
LATER = (
    "Record the texts by records.store=[], and have them read by `python -m distill responses=records "
    "from_records=FOLDER target.path=...` with target.runtime=transformers or vllm"
)


def check_openai_settings(target: TargetConfig) -> None:
    """Raise ConfigError for an address that is none, and for settings of other ways to run a target."""
    own = (*STARTED, "states_url", "states_folder", "vllm_python")
    refuse(target, own, "is for target.runtime=vllm, and target.runtime=openai would ignore it; leave it out")
    refuse(target, LOADING, "says how weights are loaded, and the server has loaded its own; leave it out")
    check_timeout(target)
    require(
        target.url is not None,
        "target.runtime=openai needs target.url, the server that runs the target, as http://HOST:PORT/v1",
    )
    check_url("url", target.url)
    name = target.key_variable  # never shown: it may be the key itself
    require(
        name is None or re.fullmatch("[A-Z][A-Z0-9_]*", name) is not None,
        "target.key_variable is not the name of an environment variable, as OPENAI_API_KEY (capitals, digits and _). "
        "A key itself does not belong here, since settings are written into the run's folder: put it into a variable",
    )


def check_openai_asked(config: DistillConfig) -> None:
    """Raise ConfigError for records that such a server cannot give."""
    if config.target.runtime != "openai":
        return
    require(
        config.responses == "target",
        f"target.runtime=openai writes responses, and responses={config.responses} has none written; use "
        "target.runtime=transformers or vllm, which read texts",
    )
    kept = config.records
    wanted = sorted({*kept.store} - {"topk"})
    require(
        not wanted,
        f"records.store={kept.store}, and a server (target.runtime=openai) tells no more of p than its likeliest "
        f"tokens: {', '.join(wanted)} cannot be made of them. Use records.store=[topk]. Or: {LATER}",
    )
    require(
        not kept.features.layers,
        f"records.features.layers={kept.features.layers}, and a server (target.runtime=openai) gives no hidden states. "
        f"{LATER}",
    )
    require(
        not kept.store or not config.data.learn_prompt,
        "records.store=[topk] with target.runtime=openai, and data.learn_prompt=true: a server tells p of the tokens "
        "that it writes, not of a prompt's. Set data.learn_prompt=false; a chat's prompts are never learned",
    )
