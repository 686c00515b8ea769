"""Low-rank adapters (peft) in a draft, trained in place of its weights: put in, counted, and written beside the draft
that they are merged into."""

from __future__ import annotations

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
    """Raise where adapters are asked for and peft is not there."""
    if lora.rank:
        remedy = f"Install it, {extra('train')}, or train all weights with draft.lora.rank=0"
        require_installed("peft", f"draft.lora.rank={lora.rank}", remedy)


def with_adapters(draft: nn.Module, lora: AdapterConfig, task: str | None = None) -> PeftModel:
    """`draft` with new adapters in it, which alone are trained; `task` is peft's name of what it does, None for a head.
    ConfigError where none of its layers is called as draft.lora.targets says."""
    from peft import LoraConfig, get_peft_model

    linear = {name.rpartition(".")[2] for name, one in draft.named_modules() if isinstance(one, nn.Linear)}
    if not linear & set(lora.targets):
        raise ConfigError(
            f"draft.lora.targets={lora.targets} are no layers of this draft, so that nothing would be trained. It has "
            f"{', '.join(sorted(linear))}"
        )
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=list(lora.targets),
        task_type=task,  # type: ignore[arg-type]
    )
    return get_peft_model(draft, settings)  # type: ignore[arg-type, return-value]


def num_trained(draft: nn.Module, lora: AdapterConfig, task: str | None = None) -> int:
    """Weights of the adapters that `draft`, on any device, would get."""
    return with_adapters(draft, lora, task).get_nb_trainable_parameters()[0]


def merged(adapters: PeftModel, folder: Path, base: str) -> Any:
    """Write the adapters into `folder`, in peft's format, as those of the draft `base`; the draft with them merged."""
    write_adapter(adapters, folder, base)
    return adapters.merge_and_unload()  # type: ignore[operator]
