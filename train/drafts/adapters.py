"""Low-rank adapters (peft) in a draft, trained in place of its weights: put in, counted, and written beside the draft
that they are merged into."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from decode.common.errors import ConfigError
from decode.common.extras import extra, require_installed
from decode.drafters.adapters import write_adapter
from train.drafts.draft_config import AdapterConfig

if TYPE_CHECKING:
    from peft import PeftModel


def require_peft(lora: AdapterConfig) -> None:
    """Raise ConfigError where adapters are asked for and peft is not there."""
    if lora.rank:
        remedy = f"Install it, {extra('train')}, or train all weights with draft.lora.rank=0"
        require_installed("peft", f"draft.lora.rank={lora.rank}", remedy)


def with_adapters(draft: nn.Module, lora: AdapterConfig, task: str | None = None) -> PeftModel:
    """`draft` with new adapters in it, which alone are trained; `task` is peft's name of what it does, None for a head.
    ConfigError where it has no layers of draft.lora.targets, or not those that were asked for by name."""
    from peft import LoraConfig, get_peft_model

    _check_targets(draft, lora.targets)
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=list(lora.targets),
        task_type=task,  # type: ignore[arg-type]
    )
    return get_peft_model(draft, settings)  # type: ignore[arg-type, return-value]


def _check_targets(draft: nn.Module, targets: Sequence[str]) -> None:
    """Of the default ones a draft may lack some; of others each must be there, or a misspelt one goes unseen."""
    layers = [name for name, one in draft.named_modules() if getattr(one, "weight", None) is not None]
    missing = [one for one in targets if not any(f".{name}".endswith(f".{one}") for name in layers)]
    if len(missing) == len(targets) or (missing and list(targets) != AdapterConfig().targets):
        matrices = (name for name in layers if getattr(draft.get_submodule(name).weight, "ndim", 0) == 2)
        known = {name.rpartition(".")[2] for name in matrices}
        raise ConfigError(
            f"draft.lora.targets={list(targets)}: the draft has no layers called {', '.join(missing)}, which would not "
            f"be trained. It has {', '.join(sorted(known))}"
        )


def num_trained(draft: nn.Module, lora: AdapterConfig, task: str | None = None) -> int:
    """Weights of the adapters that `draft`, on any device, would get."""
    return with_adapters(draft, lora, task).get_nb_trainable_parameters()[0]


def merged(adapters: PeftModel, folder: Path, base: str) -> Any:
    """Write the adapters into `folder`, in peft's format, as those of the draft `base`; the draft with them merged."""
    write_adapter(adapters, folder, base)
    return adapters.merge_and_unload()  # type: ignore[operator]
