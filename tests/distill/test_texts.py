"""Texts of an earlier run: those of a prompt together, without the p and states that were recorded with them."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from distill.config import DistillConfig
from distill.prompts.text_sources import RecordedTexts
from tests.distill.folders import WITH_STATES, folder_of, record


def test_recorded_texts_are_found_by_the_numbers_of_their_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt 0 has two turns; 1, 3 and 4 had no room in the context."""
    prompts = [(0, 0), (0, 1), (2, 0), (5, 0)]
    records = [record(prompt, [1, 2, 3], [2], WITH_STATES, turn=turn) for prompt, turn in prompts]
    folder = folder_of(tmp_path, [records[:3], records[3:]], WITH_STATES)
    monkeypatch.setattr("distill.prompts.text_sources.RecordFolder", SimpleNamespace(open=lambda *_, **__: folder))
    texts = RecordedTexts(DistillConfig(responses="records", from_records=str(tmp_path)), SimpleNamespace())  # type: ignore[arg-type]
    assert texts.num_prompts == 6
    for first, last, expected in ((0, 2, prompts[:2]), (2, 5, prompts[2:3]), (3, 5, []), (5, 6, prompts[3:])):
        found = texts.write(first, last)
        assert [(one.meta["prompt"], one.meta["turn"]) for one in found] == expected
        assert not any(one.payload or one.features for one in found)
