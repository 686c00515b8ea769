"""The version of what is installed, which pyproject.toml alone says."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("draftsmith")
except PackageNotFoundError:  # run from a clone that was never installed
    __version__ = "0+not.installed"
