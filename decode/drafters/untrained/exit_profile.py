"""The layer that a measured profile (`python -m eval mode=exits`) recommends for `early_exit`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from decode.common.checked_json import Content, JsonFile, Size, Text
from decode.common.errors import InputError
from decode.drafters.untrained.config import EarlyExitConfig
from decode.models.describe import ModelDescription
from decode.models.quantisation.quantised import method_of


class ProfiledTarget(Content):
    """Whose layers were measured."""

    path: Text
    fingerprint: Text
    quantization: Text | None = None


class ExitProfile(Content):
    """What is read of results.json."""

    mode: Literal["exits"]
    target: ProfiledTarget
    exit_layer: Size
    """Recommended at the first temperature of the profile."""


PROFILE = JsonFile(
    ExitProfile,
    "the target would be left behind a layer that nobody recommends",
    "Measure one with python -m eval mode=exits; an adapter's folder goes into draft.path.",
)


def exit_layer_of(config: EarlyExitConfig, target: ModelDescription) -> int:
    """The layers that draft, as set or as the profile has it; InputError where that is of another target."""
    if config.exit_layer is not None:
        return config.exit_layer
    file = Path(str(config.profile))
    file = file / "results.json" if file.is_dir() else file
    if not file.exists():
        raise InputError(f"profile={config.profile} holds no results.json: {PROFILE.remedy}")
    profile = PROFILE.read(file)
    _refuse_another(profile.target, target, str(config.profile))
    return profile.exit_layer


def _refuse_another(measured: ProfiledTarget, target: ModelDescription, profile: str) -> None:
    """InputError unless the target that was measured is this one, rounded alike: layers of others say other things,
    and take other times."""
    rounded = target.quantization or method_of(target.config)
    if (measured.fingerprint, measured.quantization) != (target.fingerprint, rounded):
        raise InputError(
            f"profile={profile} is of {measured.path} (fingerprint {measured.fingerprint[:12]}, quantised: "
            f"{measured.quantization or 'no'}), and the target is {target.path} ({target.fingerprint[:12]}, "
            f"{rounded or 'no'}). Measure it with python -m eval mode=exits, or give exit_layer=2, say"
        )
