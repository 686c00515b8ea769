"""Engines: the accelerator that `engine=` asks for, built in this process, whatever launcher started it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from decode.house.config import require
from train.config import EngineConfig, TrainConfig

if TYPE_CHECKING:
    from accelerate import Accelerator

OTHER_ENGINES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}


def check_launcher(engine: EngineConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError where the launcher's environment asks for another engine than `engine=`; nothing heavy is imported."""
    asked = [name for variable, name in OTHER_ENGINES.items() if _is_true(environ, variable)]
    if _is_true(environ, "ACCELERATE_USE_DEEPSPEED"):
        asked.append(f"DeepSpeed ZeRO stage {environ.get('ACCELERATE_DEEPSPEED_ZERO_STAGE', '2')}")
    for name in asked:
        require(
            bool(engine.zero_stage) and name == f"DeepSpeed ZeRO stage {engine.zero_stage}",
            f"the launcher asks for {name}, but engine={engine.name}. The engine is built from engine= alone: choose the "
            "matching engine=, or launch without that option (`accelerate launch --multi_gpu -m train ...`, or torchrun)",
        )
    processes = int(environ.get("WORLD_SIZE", "1"))
    require(
        engine.name != "single" or processes == 1,
        f"the launcher started {processes} processes, but engine=single uses one; they would train the same draft "
        f"{processes} times over each other. Set engine=ddp, or start one process",
    )


def build_accelerator(cfg: TrainConfig) -> Accelerator:
    """The Accelerator of `cfg.engine`; on CPU its process group is made before DeepSpeed can ask for a GPU backend."""
    import torch

    on_cpu = cfg.engine.device == "cpu" or not torch.cuda.is_available()
    if cfg.engine.zero_stage:
        _prepare_environment(on_cpu)
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import GradientAccumulationPlugin

    if on_cpu:
        PartialState(cpu=True)
    if cfg.engine.deterministic:
        _make_deterministic()
    return Accelerator(
        cpu=on_cpu,
        mixed_precision="bf16" if cfg.engine.precision == "bf16" else "no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=cfg.gradient_accumulation, sync_with_dataloader=False
        ),
        deepspeed_plugin=_deepspeed_plugin(cfg) if cfg.engine.zero_stage else None,
    )


def deepspeed_config(cfg: TrainConfig) -> dict[str, Any]:
    """DeepSpeed's configuration of `cfg`; our own torch optimizer is sharded, never swapped for DeepSpeed's CPU one."""
    zero: dict[str, Any] = {"stage": cfg.engine.zero_stage, "contiguous_gradients": True, "overlap_comm": False}
    if cfg.engine.zero_stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
        zero["stage3_param_persistence_threshold"] = 0
    if cfg.engine.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return {
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": cfg.batch_size,
        "gradient_accumulation_steps": cfg.gradient_accumulation,
        "gradient_clipping": cfg.clip,
        "bf16": {"enabled": cfg.engine.precision == "bf16"},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 30,
    }


def _deepspeed_plugin(cfg: TrainConfig) -> Any:
    from accelerate.utils import DeepSpeedPlugin

    # Without the init flag a target loaded in this process stays whole: only the draft is prepared, hence sharded.
    return DeepSpeedPlugin(hf_ds_config=deepspeed_config(cfg), zero3_init_flag=False)


def _prepare_environment(on_cpu: bool) -> None:
    """What DeepSpeed reads from the environment: its device, and a process group of one where no launcher made one."""
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(alone | {"MASTER_PORT": str(_free_port())})


def _make_deterministic() -> None:
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs time, and nothing here reads such memory


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _is_true(environ: Mapping[str, str], variable: str) -> bool:
    return environ.get(variable, "false").lower() in ("true", "1", "yes")
