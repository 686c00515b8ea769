"""Folders that a kill cannot tear: everything is written into a hidden one, synced, then renamed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from decode.common.errors import InputError

HIDDEN = re.compile(r"\.(step|best)_\d+\..*tmp")
"""What is being written or removed."""


def hidden_name(path: Path) -> Path:
    """A name beside it that was never used: a rank of a killed run may still write into the folder that it knows."""
    return path.with_name(f".{path.name}.{uuid4().hex[:12]}.tmp")


def fresh(final: Path) -> Path:
    """An empty hidden folder for what is to be called `final`; InputError where something is called so already."""
    if final.exists():
        raise InputError(
            f"{final} is there already, and this run has not written it: checkpoints are never written over. Is "
            "another process at work in this folder? Move it away, and go on with resume=auto"
        )
    draft = hidden_name(final)
    draft.mkdir(parents=True)
    return draft


def give_name(draft: Path, final: Path) -> None:
    """Once all of it is on disk."""
    for path in (*draft.rglob("*"), draft):
        _sync(path)
    draft.rename(final)
    _sync(final.parent)


def copy_whole(folder: Path, to: Path, change: Callable[[Path], None] | None = None) -> None:
    """A whole folder of another run put into `to`, changed on its way, in place of what a kill left half of."""
    final, draft = to / folder.name, hidden_name(to / folder.name)
    shutil.copytree(folder, draft)
    if change is not None:
        change(draft)
    if final.exists():
        remove(final)
    give_name(draft, final)


def remove(path: Path) -> None:
    """Out of sight first, so that a kill in between leaves no half of a folder that looks whole."""
    hidden = hidden_name(path)
    path.rename(hidden)
    shutil.rmtree(hidden)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
