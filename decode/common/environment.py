"""The machine: the devices that torch may use, and where a number was measured (machine, versions and git state, as
plain JSON values). Importing it costs nothing: torch is imported by what needs it."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from decode.common.errors import InputError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = (
    "draftsmith",
    "torch",
    "transformers",
    "accelerate",
    "deepspeed",
    "peft",
    "datasets",
    "tokenizers",
    "safetensors",
    "numpy",
    "scipy",
    "hydra-core",
    "wandb",
)


M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of mallopt, as malloc.h numbers them


def memory_bytes() -> int:
    """Of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def environment() -> dict:
    """Python, packages, CPU (name, usable cores, threads), memory in bytes, and the CUDA device's name or None."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": package_versions(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": memory_bytes(),
        "cuda_device": device,
    }


def resolve_device(device: str, where: str = "device") -> torch.device:
    """The device: "auto" is CUDA where there is one; raises InputError, which names the setting `where`, for a device
    that is not there."""
    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"{where}={device}, but torch sees no CUDA device; use {where}=cpu or {where}=auto")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"{where}={device} is not a torch device; use auto, cpu, cuda or cuda:1, say") from error
    if found.type == "cuda" and (found.index or 0) >= (count := torch.cuda.device_count()):
        raise InputError(f"{where}={device}, but torch sees {count} CUDA devices, numbered from 0; use one of those")
    return found


def keep_freed_memory() -> None:
    """glibc gives the memory of a large tensor back to the system, and gets it anew, zeroed page by page: that was more
    than half of the time in which a CPU made the loss of a draft LM over 151,936 tokens, and a fifth of a whole
    quickstart. From here on this process keeps what it has freed. Not without glibc, nor where variables say what they
    want of it, nor beside a GPU, where a model that has moved there would stay here too."""
    asked = any(name in os.environ for name in ("GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"))
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
    if sys.platform != "linux" or asked or has_gpu or not hasattr(ctypes.CDLL(None), "mallopt"):
        return
    for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1)):
        ctypes.CDLL(None).mallopt(option, value)


def device_of(model: PreTrainedModel) -> torch.device:
    """Where a model takes its token ids: the device of its input embedding, also for a model spread over several."""
    return next(model.get_input_embeddings().parameters()).device


@functools.cache
def package_versions() -> dict[str, str]:
    """Installed versions of the packages that results depend on; those not installed are left out."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_state() -> dict:
    """The revision of this checkout and whether tracked files differ from it; both None without git, and for an
    installed copy, whose folder may lie in somebody else's checkout."""
    if _git("ls-files", "--error-unmatch", __file__) is None:
        return {"revision": None, "dirty": None}
    revision = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {"revision": revision, "dirty": None if changes is None else bool(changes)}


def _git(*arguments: str) -> str | None:
    if shutil.which("git") is None:
        return None
    done = subprocess.run(["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
