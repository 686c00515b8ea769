"""Every known fault of an exported folder is found, by the check that is about it; folders without one pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.faults import FAULTS, Fault
from tests.train.check.faults import BY, MORE
from tests.train.check.folders import DRAFTS, Folders, subject_of
from train.check.stage import against

EVERY = [*FAULTS, *(one for one, _ in MORE)]
HEADS = [one for one in EVERY if one.family != "lm"]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_whole_folder_passes(folders: Folders, kind: str, draft: str) -> None:
    subject = subject_of(folders.exported(kind, draft), folders.target(kind), "vllm")
    assert not against(subject, folders.source(kind, draft))


@pytest.mark.parametrize("fault", HEADS, ids=lambda one: f"{one.family}: {one.name}")
def test_a_fault_is_found_by_the_check_that_is_about_it(folders: Folders, tmp_path: Path, fault: Fault) -> None:
    draft = "dflash" if fault.family == "dflash" else f"{fault.family}-reduced"
    source = folders.source("llama", draft)
    folder = folders.copied("llama", draft, tmp_path / "out")
    fault.damage(folder)
    found = against(subject_of(folder, folders.target("llama"), "vllm"), source)
    assert BY[fault.family, fault.name] in {one.check for one in found}, [str(one) for one in found]
    assert all(one.what and one.effect and one.remedy for one in found)
