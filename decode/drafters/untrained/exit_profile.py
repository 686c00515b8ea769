"""The layer that a measured profile (`python -m eval mode=exits`) recommends for `early_exit`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from decode.common.checked_json import Content, JsonFile, Size, Text
from decode.common.errors import InputError
from decode.drafters.untrained.config import EarlyExitConfig
from decode.models.load import ModelDescription


class ProfiledTarget(Content):
    """Whose layers were measured."""

    path: Text
    fingerprint: Text


class ExitProfile(Content):
    """What is read of results.json."""

    mode: Literal["exits"]
    target: ProfiledTarget
    exit_layer: Size
    """Recommended at the first temperature of the profile."""


PROFILE = JsonFile(
    ExitProfile,
    "the target would be left behind a layer that nobody recommends",
    "Measure it again with python -m eval mode=exits.",
)


def exit_layer_of(config: EarlyExitConfig, target: ModelDescription) -> int:
    """The layers that draft, as set or as the profile has it; InputError where that is of another target."""
    if config.exit_layer is not None:
        return config.exit_layer
    file = Path(str(config.profile))
    file = file / "results.json" if file.is_dir() else file
    profile = PROFILE.read(file)
    if profile.target.fingerprint != target.fingerprint:
        raise InputError(
            f"profile={config.profile} is of {profile.target.path} (fingerprint {profile.target.fingerprint[:12]}), "
            f"and the target is {target.path} ({target.fingerprint[:12]}): its layers say other things. Measure this "
            "one with python -m eval mode=exits, or give exit_layer=2, say"
        )
    return profile.exit_layer
