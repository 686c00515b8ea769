"""What every results.json says about itself: its name, its mode, the machine, the software and the target."""

from __future__ import annotations

from typing import Any

from eval.render.templates import Code


def title_of(results: dict[str, Any]) -> str:
    """The name of the run."""
    return results.get("name") or results["suite"]


def mode_of(results: dict[str, Any]) -> str:
    """What was run: report, decoders, families."""
    return results.get("mode") or results.get("face") or "report"


def hardware(environment: dict[str, Any]) -> str:
    """The machine in one line."""
    device = environment.get("cuda_device")
    cpu = f"{environment.get('cpu')}, {environment.get('cores')} cores, {environment.get('threads')} threads"
    return f"{device}; {cpu}" if device else cpu


def software(environment: dict[str, Any]) -> str:
    """Versions in one line."""
    packages = environment.get("packages", {})
    versions = f"torch {packages.get('torch')}, transformers {packages.get('transformers')}"
    return f"{versions}, Python {environment['python']}"


def size(model: dict[str, Any]) -> str:
    """How large a model is."""
    return f"{model['num_parameters'] / 1e6:,.1f}M parameters"


def drafts(results: dict[str, Any]) -> str:
    """Names of the drafts, with their folders."""
    return ", ".join(f"{name} ({path})" for name, path in results["drafts"].items())


def setup_facts(results: dict[str, Any]) -> dict[str, str]:
    """Machine, software and target."""
    environment, target = results["environment"], results["target"]
    return {
        "Machine": hardware(environment),
        "Software": software(environment),
        "Target": f"{target['path']}, {size(target)}, {target['dtype']}",
    }


def origin_facts(results: dict[str, Any]) -> dict[str, str]:
    """What makes the same run again."""
    environment = results["environment"]
    return {"Seed": str(environment["seed"]), "Command": Code(environment["command"])}
