"""Every known fault of an exported folder is found, by the check that is about it; folders without one pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode.formats.source import Source
from tests.engines.faults import FAULTS, Fault
from tests.tiers import by_default
from tests.train.check.faults import BY, MORE
from tests.train.check.folders import DRAFTS, Folders, subject_of
from train.check.stage import against
from train.export.engines import ENGINES
from train.export.engines.base import Engine
from train.export.loadable import loads

EVERY = [*FAULTS, *(one for one, _ in MORE)]
DAMAGED = {"dflash": "dflash", "dspark": "dspark", "lm": "lm"}
"""Of other families the heads of a reduced vocabulary."""


@pytest.mark.parametrize("draft", by_default(5, [*DRAFTS, "lm"]))
@pytest.mark.parametrize("kind", by_default(1, ["llama", "qwen3"]))
def test_a_whole_folder_passes(folders: Folders, kind: str, draft: str) -> None:
    """By the rules of every engine that is written for so."""
    source, written = folders.source(kind, draft), folders.exported(kind, draft)
    same = [one.name for one in ENGINES.values() if reads_like_vllm(one, source)]
    assert "vllm" in same
    assert not against(subject_of(written, folders.target(kind), *same), source)


def reads_like_vllm(engine: Engine, source: Source) -> bool:
    """Whether the folder for vLLM is one for this engine too."""
    how, known = (loads(one, source, "auto")[0] for one in (engine, ENGINES["vllm"]))
    return how is not None and known is not None and how.layout is known.layout


@pytest.mark.parametrize("fault", by_default(40, EVERY), ids=lambda one: f"{one.family}: {one.name}")
def test_a_fault_is_found_by_the_check_that_is_about_it(folders: Folders, tmp_path: Path, fault: Fault) -> None:
    draft = DAMAGED.get(fault.family, f"{fault.family}-reduced")
    source = folders.source("llama", draft)
    folder = folders.copied("llama", draft, tmp_path / "out")
    fault.damage(folder)
    found = against(subject_of(folder, folders.target("llama"), "vllm"), source)
    assert BY[fault.family, fault.name] in {one.check for one in found}, [str(one) for one in found]
    assert all(one.what and one.effect and one.remedy for one in found)


def test_every_known_fault_has_a_check() -> None:
    assert {(one.family, one.name) for one in EVERY} == BY.keys()
