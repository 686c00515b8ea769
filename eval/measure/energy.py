"""Joules of a timed call: counters of the hardware read before and after it, or a stated power times its seconds.

RAPL counts what processor packages and memory took (Linux, Documentation/power/powercap), NVML what a GPU took. Both
count all that ran there, so other programs are in the figure.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from transformers import PreTrainedModel

Result = TypeVar("Result")
Kind = Literal["measured", "estimate"]
POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True)
class Counter:
    """A count of joules that grows, and begins again at nothing once it has reached `wraps_at`."""

    name: str
    read: Callable[[], float]
    wraps_at: float = math.inf

    def since(self, before: float) -> float:
        """Joules since `read` gave `before`; right for one wrap-around, which takes a package minutes at the least."""
        grown = self.read() - before
        return grown if grown >= 0 else grown + self.wraps_at


@dataclass(frozen=True)
class EnergyMeter:
    """Counters that are read together. Without any, `reason` says why."""

    counters: tuple[Counter, ...] = ()
    reason: str | None = None
    kind: Kind | None = None

    def around(self, call: Callable[[], Result]) -> tuple[Result, float | None]:
        """What the call gives, and the joules that it took; None without a counter."""
        before = [counter.read() for counter in self.counters]
        result = call()
        spent = [counter.since(start) for counter, start in zip(self.counters, before, strict=True)]
        return result, sum(spent) if spent else None

    def facts(self) -> dict[str, str | None]:
        """What was read, whether that measures or estimates, or why there is nothing."""
        source = " + ".join(counter.name for counter in self.counters) or None
        return {"kind": self.kind, "source": source, "reason": self.reason}


NO_METER = EnergyMeter(reason="no energy meter stood around these calls")


def energy_meter(watts: float | None, devices: Collection[torch.device]) -> EnergyMeter:
    """The meter of a run on `devices`: an estimate from `watts` where these are stated; else the counters of the GPUs
    among them and of the processor. Without those of the GPUs there is none: most of the energy would be missing."""
    if watts is not None:
        counter = Counter(f"{watts:g} W as timing.watts states", lambda: watts * time.perf_counter())
        return EnergyMeter((counter,), kind="estimate")
    gpus = [device for device in devices if device.type == "cuda"]
    of_gpus, no_gpus = nvml(gpus) if gpus else ([], None)
    of_processor, no_processor = rapl(POWERCAP)
    reason = no_gpus if gpus else no_processor
    if reason is not None:
        return EnergyMeter(reason=f"{reason}; timing.watts=WATTS gives an estimate")
    return EnergyMeter((*of_gpus, *of_processor), kind="measured")


def meter_of(watts: float | None, model: PreTrainedModel) -> EnergyMeter:
    """That of the devices which hold a model."""
    return energy_meter(watts, {parameter.device for parameter in model.parameters()})


def rapl(folder: Path) -> tuple[list[Counter], str | None]:
    """Counters of the processor packages and their memory, or why there are none. Cores are in their package, and the
    zone of the whole platform (psys) holds the packages, so neither is added."""
    found = []
    try:
        for zone in sorted(folder.glob("intel-rapl:*")):  # AMD's have that name too
            name = (zone / "name").read_text().strip()
            if name.startswith("package") or name == "dram":
                counter = Counter(
                    f"RAPL {zone.name} ({name})", _reader(zone), _microjoules(zone / "max_energy_range_uj")
                )
                counter.read()
                found.append(counter)
    except PermissionError as error:
        return [], f"RAPL counters are not readable by this user ({error.filename}; sudo chmod a+r lets it)"
    except (OSError, ValueError) as error:
        return [], f"RAPL counters could not be read: {error}"
    return found, None if found else f"no RAPL counter in {folder}"


def _reader(zone: Path) -> Callable[[], float]:
    return lambda: _microjoules(zone / "energy_uj")


def _microjoules(file: Path) -> float:
    return int(file.read_text()) / 1e6


def nvml(gpus: Sequence[torch.device]) -> tuple[list[Counter], str | None]:
    """A counter of each GPU, or why there are none. It is found by its UUID: CUDA_VISIBLE_DEVICES numbers torch's
    devices anew, and not NVML's."""
    try:
        import pynvml  # type: ignore[import-not-found]
    except ImportError:
        return [], "NVML needs the package nvidia-ml-py (pip install 'draftsmith[energy]')"
    found = []
    try:
        pynvml.nvmlInit()
        for gpu in gpus:
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(gpu).uuid}")
            counter = Counter(f"NVML {gpu}", _millijoules(pynvml, handle))
            counter.read()
            found.append(counter)
    except pynvml.NVMLError as error:  # before Volta, and of a slice of a GPU (MIG), there is no such counter
        return [], f"NVML counts no energy here: {error}"
    return found, None


def _millijoules(library: Any, handle: Any) -> Callable[[], float]:
    return lambda: library.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
