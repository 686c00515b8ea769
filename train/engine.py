"""Engines: the accelerator that `engine=` asks for, built in this process, whatever launcher started it."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from decode.common.extras import extra, require_installed
from decode.common.run_folder import SLOWEST_RANK
from decode.common.typed_config import require
from train.config import EngineConfig, TrainConfig

if TYPE_CHECKING:
    from accelerate import Accelerator

OTHER_ENGINES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}


def check_launcher(engine: EngineConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError where the launcher's environment asks for another engine than `engine=`."""
    asked = [name for variable, name in OTHER_ENGINES.items() if _is_true(environ, variable)]
    if _is_true(environ, "ACCELERATE_USE_DEEPSPEED"):
        asked.append(f"DeepSpeed ZeRO stage {environ.get('ACCELERATE_DEEPSPEED_ZERO_STAGE', '2')}")
    for name in asked:
        require(
            bool(engine.zero_stage) and name == f"DeepSpeed ZeRO stage {engine.zero_stage}",
            f"the launcher asks for {name}, but engine={engine.name}. The engine is built from engine= alone: choose "
            "the matching engine=, or launch without that option (torchrun, or `accelerate launch --multi_gpu`)",
        )
    if engine.zero_stage:
        install = f"DS_BUILD_OPS=0 {extra('deepspeed')} --no-build-isolation"
        require_installed("deepspeed", f"engine={engine.name}", f"Install it, {install}, or use engine=ddp")
    processes = int(environ.get("WORLD_SIZE", "1"))
    require(
        engine.name != "single" or processes == 1,
        f"the launcher started {processes} processes, but engine=single uses one; they would train the same draft "
        f"{processes} times over each other. Set engine=ddp, or start one process",
    )


def warn_of_emulated_products(engine: EngineConfig) -> None:
    """Where passes in bfloat16 are asked of a CPU that has no arithmetic for it."""
    import torch

    from decode.common.environment import resolve_device
    from decode.models.arithmetic import warn_if_emulated

    if engine.precision == "bf16":
        warn_if_emulated(torch.bfloat16, resolve_device(engine.device), "Set engine.precision=fp32")


def build_accelerator(cfg: TrainConfig) -> Accelerator:
    """The Accelerator of `cfg.engine`; on CPU its process group is made before DeepSpeed can ask for a GPU backend."""
    import torch

    on_cpu = cfg.engine.device == "cpu" or not torch.cuda.is_available()
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed otherwise warns of, or picks, a device that is not ours
    if cfg.engine.is_sharded:
        _ensure_process_group_variables()
    if cfg.engine.zero_stage:
        _skip_compiled_reductions()
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs

    logging.getLogger("accelerate").setLevel(logging.ERROR)  # it warns of tied weights at every checkpoint
    # On a CPU under bf16 every norm says so, and nothing is lost: it is computed in float32.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    if on_cpu:
        PartialState(cpu=True, timeout=SLOWEST_RANK)
    if cfg.engine.deterministic:
        _make_deterministic()
    accelerator = Accelerator(
        cpu=on_cpu and not cfg.engine.zero_stage,  # with cpu=True accelerate would drop DeepSpeed without a word
        mixed_precision="bf16" if cfg.engine.precision == "bf16" else "no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=cfg.gradient_accumulation, sync_with_dataloader=False
        ),
        deepspeed_plugin=_deepspeed_plugin(cfg) if cfg.engine.zero_stage else None,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=SLOWEST_RANK)],
    )
    runs_deepspeed = accelerator.distributed_type.value == "DEEPSPEED"
    assert runs_deepspeed == bool(cfg.engine.zero_stage), accelerator.distributed_type
    _build_models_whole()
    return accelerator


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

    return DeepSpeedPlugin(hf_ds_config=deepspeed_config(cfg), zero3_init_flag=False)


def _build_models_whole() -> None:
    """Undo accelerate's registration with transformers, under which ZeRO-3 would shard every model from its birth.

    Only the draft is prepared, hence sharded; a live target stays whole.
    """
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()


def _ensure_process_group_variables() -> None:
    """Engines that shard want a process group even where no launcher made one: a group of one."""
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(alone | {"MASTER_PORT": str(_free_port())})


def _skip_compiled_reductions() -> None:
    """Keep DeepSpeed from compiling its shared-memory reductions for CPUs.

    They cost two minutes and a C++ compiler at the first start, and save microseconds over gloo.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _make_deterministic() -> None:
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling memory costs time, and nothing here reads what was not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _is_true(environ: Mapping[str, str], variable: str) -> bool:
    return environ.get(variable, "false").lower() in ("true", "1", "yes")
