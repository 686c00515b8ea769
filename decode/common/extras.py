"""Packages that only some settings need, and that a plain `pip install` leaves out."""

from importlib.util import find_spec

from decode.common.errors import ConfigError


def require_installed(package: str, what: str, remedy: str) -> None:
    """Raise ConfigError unless `package` can be imported: `what` needs it, and `remedy` says how to get it or do
    without it. To be called before anything is loaded.

    A folder of that name in the current one (W&B leaves a `wandb/`) can be imported too, as a namespace of nothing, so
    a package has to have a file of its own.
    """
    found = find_spec(package)
    if found is None or found.origin is None:
        raise ConfigError(f"{what} needs the package {package}, which is not installed here. {remedy}")


def extra(name: str) -> str:
    """The command that installs an extra of this project (pyproject.toml)."""
    return f"pip install 'draftsmith[{name}]'"
